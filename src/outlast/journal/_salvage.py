"""What is readable of a damaged journal, as a run directory of its own.

Role: reads each entry by its number and passes over those that a lost part of the file held. Invariants: the damaged
file is copied and never written; entries keep their order; nothing is made up for what is lost.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.core.events import AnyEvent, decode
from outlast.errors import ConfigError
from outlast.journal._faults import damaged, os_fault
from outlast.journal._files import EVENTS_NAME, holds_run
from outlast.journal._journal import Journal

__all__ = ["Salvaged", "salvage"]

_MAGIC = b"SQLite format 3\x00"
_IN_VAIN = 20_000  # numbers in a row without an entry: where nothing says how many there were, this is the end
_BATCH = 1000


class Salvaged(NamedTuple):
    """Entries that were read, and of how many; 0 where the file no longer says that."""

    num_entries: int
    num_known: int


def salvage(run_dir: Path, target: Path) -> Salvaged:
    """Write what is readable of the journal in `run_dir` as a new run into `target`, which must not hold one. Raises
    ConfigError for directories that are not so, EnvironmentFault where nothing is readable or `target` cannot be
    written."""
    if not holds_run(run_dir):
        raise ConfigError(f"{run_dir} holds no run", remedy="give the directory whose journal is damaged")
    path = run_dir / EVENTS_NAME
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / EVENTS_NAME
        try:
            shutil.copyfile(path, copy)
            log = path.with_name(f"{EVENTS_NAME}-wal")
            if log.exists():  # what was written last may stand there alone
                shutil.copyfile(log, copy.with_name(log.name))
            whole = _lengthened(copy)
        except OSError as error:
            raise os_fault(error, path) from error
        if not whole:
            raise damaged(path, "not even its first page is there", readable=False)
        connection = sqlite3.connect(copy, isolation_level=None)
        try:
            num_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
            known = min(_num_known(connection), num_bytes)  # damaged itself it may say any number
            return Salvaged(_written(_readable(connection, known), path, target), known)
        finally:
            connection.close()


def _lengthened(copy: Path) -> bool:
    """Make a file that was cut as long as its first page says it was: SQLite reads nothing of a shorter one. False
    where it has no first page."""
    with copy.open("rb") as file:
        head = file.read(32)
    if len(head) < 32 or not head.startswith(_MAGIC):
        return False
    page_bytes = int.from_bytes(head[16:18], "big")
    size_bytes = (65536 if page_bytes == 1 else page_bytes) * int.from_bytes(head[28:32], "big")
    if copy.stat().st_size < size_bytes:
        with copy.open("r+b") as longer:
            longer.truncate(size_bytes)
    return True


def _num_known(connection: sqlite3.Connection) -> int:
    try:
        found = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    except sqlite3.Error:
        return 0
    return int(found[0]) if found else 0


def _readable(connection: sqlite3.Connection, known: int) -> Iterator[AnyEvent]:
    seq = vain = 0
    while seq < known if known else vain < _IN_VAIN:
        seq, vain = seq + 1, vain + 1
        try:
            row = connection.execute("SELECT body FROM events WHERE seq = ?", [seq]).fetchone()
            if row is not None:
                yield decode(row[0])
                vain = 0
        except (sqlite3.Error, msgspec.MsgspecError, ValueError):
            continue  # lost with the part of the file that held it


def _written(events: Iterator[AnyEvent], path: Path, target: Path) -> int:
    count, batch = 0, list(itertools.islice(events, _BATCH))
    if not batch:
        raise damaged(path, "no entry of it is readable", readable=False)
    with Journal.create(target) as journal:
        while batch:
            journal.append_many(batch)
            journal.flush()
            count += len(batch)
            batch = list(itertools.islice(events, _BATCH))
    return count
