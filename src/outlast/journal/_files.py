"""Opening the two SQLite files: format, durability, and whom to refuse.

Role: one place for pragmas, schema and version. Write-ahead logging, so that readers and the writer never wait for
each other; `synchronous=FULL`, so that a commit is on the disk when it returns. Not for queries: those stand beside
their owners.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outlast.errors import ConfigError, EnvironmentFault, OutlastError
from outlast.journal._faults import damaged, newer, os_fault, sqlite_fault

__all__ = [
    "EVENTS_NAME", "FORMAT", "RECORD_NAME", "close_whole", "holds_run", "open_read_only", "open_writable",
    "sync_directory", "transaction",
]  # fmt: skip

EVENTS_NAME, RECORD_NAME = "journal.db", "record.db"
FORMAT = 1
_APPLICATION = 0x4F4C5354  # "OLST": marks the files as ours, for file(1) and for a wrong file with the right name
_BUSY_S = 5.0
_SCHEMA = {
    EVENTS_NAME: (
        "CREATE TABLE events(seq INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, kind TEXT NOT NULL,"
        " body TEXT NOT NULL)",
        "CREATE INDEX events_by_kind ON events(kind, seq)",
    ),
    RECORD_NAME: (
        "CREATE TABLE claims(epoch INTEGER PRIMARY KEY, owner TEXT NOT NULL)",
        "CREATE TABLE records(key TEXT PRIMARY KEY, epoch INTEGER NOT NULL, value BLOB NOT NULL) WITHOUT ROWID",
    ),
}


def holds_run(run_dir: Path) -> bool:
    """Whether a run was created here. `journal.db` is created last, so it stands for both files."""
    return (run_dir / EVENTS_NAME).is_file()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One write transaction; undone, and the error passed on, if anything in it fails."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:  # SQLite undoes by itself on a full disk, but not on every error
            connection.execute("ROLLBACK")


def open_writable(run_dir: Path, name: str, *, create: bool) -> sqlite3.Connection:
    """A connection that several threads may use in turn. Raises EnvironmentFault, or ConfigError if there is no run."""
    path = run_dir / name
    if not create and not path.is_file():
        raise _missing(run_dir, name)
    try:
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise sqlite_fault(error, path) from error
    try:
        connection.execute("PRAGMA synchronous = FULL")
        if create:
            _make(connection, name)
        else:
            _check_format(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.Error as error:
        connection.close()
        raise sqlite_fault(error, path) from error
    except OutlastError:
        connection.close()
        raise
    return connection


def close_whole(connection: sqlite3.Connection) -> None:
    """Close after moving the log into the file, without waiting for readers: the file can be copied alone."""
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    except sqlite3.Error:
        return  # a full or lost disk; the log holds what it holds
    finally:
        connection.close()


def open_read_only(run_dir: Path, name: str) -> sqlite3.Connection:
    """A connection that changes nothing and blocks nobody. Raises EnvironmentFault, or ConfigError if there is no run.

    A finished run can be read from a read-only disk too: without a log beside it the file is complete as it is.
    """
    path = run_dir / name
    if not path.is_file():
        raise _missing(run_dir, name)
    options = "mode=ro"
    if not os.access(run_dir, os.W_OK) and not path.with_name(name + "-wal").exists():
        options += "&immutable=1"
    try:
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?{options}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise sqlite_fault(error, path, reading=True) from error
    try:
        _check_format(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise sqlite_fault(error, path, reading=True) from error
    except OutlastError:
        connection.close()
        raise
    return connection


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise os_fault(error, path) from error


def _make(connection: sqlite3.Connection, name: str) -> None:
    with transaction(connection):
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            for statement in _SCHEMA[name]:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    if application != _APPLICATION:
        raise damaged(path, "it is not a journal of outlast, or its creation was interrupted")
    if version > FORMAT:
        raise newer(path, version, FORMAT)


def _missing(run_dir: Path, name: str) -> OutlastError:
    """What a file that is not there means: no run at all, or, as `journal.db` is created last, one that lost a part."""
    if name != EVENTS_NAME and holds_run(run_dir):
        return EnvironmentFault(
            f"{run_dir / name} is missing, and {EVENTS_NAME} beside it is there",
            remedy=f"copy a run's directory whole, or save its events: outlast export {run_dir} --salvage NEW-DIR",
        )
    return ConfigError(
        f"{run_dir} holds no run",
        remedy="give the directory that `outlast run --run-dir` was given, or one that holds it",
    )
