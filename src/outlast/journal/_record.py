"""The coordinator's durable record: who may write (claims), and what was decided (records).

Role: compare-on-epoch. A coordinator claims an epoch in one transaction; each later write holds only while no higher
epoch has been claimed. Invariants: a value is on the disk before `put` returns; a superseded coordinator writes
nothing; a key's epoch never goes down. Source: protocol rule 1 (views are fenced by epoch). It never touches events.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from outlast.errors import ProtocolViolation
from outlast.journal._faults import sqlite_fault
from outlast.journal._files import RECORD_NAME, close_whole, open_read_only, open_writable, transaction

__all__ = ["Record"]

_RESERVE_BYTES = 512 * 1024
_CHECKPOINT_PAGES = 64  # of 4 KiB: the log is emptied long before it outgrows the reserve


class Record:
    """`record.db`, opened to write or to read. Calls from several threads are taken one at a time."""

    def __init__(self, run_dir: Path, connection: sqlite3.Connection, *, write: bool) -> None:
        self._path, self._connection, self._mutex = run_dir / RECORD_NAME, connection, threading.Lock()
        self._write = write

    @classmethod
    def open(cls, run_dir: Path, *, write: bool, create: bool = False) -> Record:
        """Raises EnvironmentFault, or ConfigError where there is no run."""
        if not write:
            return cls(run_dir, open_read_only(run_dir, RECORD_NAME), write=False)
        record = cls(run_dir, open_writable(run_dir, RECORD_NAME, create=create), write=True)
        try:
            record._reserve()
        except sqlite3.Error as error:
            if create:
                record.close()
                raise sqlite_fault(error, record._path) from error
        return record

    def claim(self, owner: str) -> int:
        """A new epoch, higher than all before; durable on return. `owner` is for people to read."""
        try:
            with self._mutex, transaction(self._connection):
                epoch = self._epoch() + 1
                self._connection.execute("INSERT INTO claims(epoch, owner) VALUES (?, ?)", (epoch, owner))
        except sqlite3.Error as error:
            raise sqlite_fault(error, self._path) from error
        return epoch

    def follow(self, epoch: int, owner: str) -> None:
        """An epoch that was claimed where several hosts keep the record; here its copies are kept."""
        try:
            with self._mutex, transaction(self._connection):
                self._connection.execute("INSERT OR IGNORE INTO claims(epoch, owner) VALUES (?, ?)", (epoch, owner))
        except sqlite3.Error as error:
            raise sqlite_fault(error, self._path) from error

    def put(self, epoch: int, key: str, value: bytes) -> bool:
        """Store `value`; True when it is on the disk, False when a higher epoch has been claimed: stop coordinating.

        Raises ProtocolViolation for an epoch that nobody claimed, EnvironmentFault if the disk refuses.
        """
        try:
            with self._mutex, transaction(self._connection):
                newest = self._epoch()
                if epoch > newest:
                    raise ProtocolViolation(f"a record under epoch {epoch}, which was never claimed", where=key)
                if epoch == newest:
                    self._connection.execute(
                        "REPLACE INTO records(key, epoch, value) VALUES (?, ?, ?)", (key, epoch, value)
                    )
        except sqlite3.Error as error:
            raise sqlite_fault(error, self._path) from error
        return epoch == newest

    def get(self, key: str) -> bytes | None:
        """The newest value of `key`, or None."""
        try:
            with self._mutex:
                row = self._connection.execute("SELECT value FROM records WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise sqlite_fault(error, self._path) from error
        return None if row is None else bytes(row[0])

    def newest_epoch(self) -> int:
        """The highest epoch claimed; 0 before the first."""
        try:
            with self._mutex:
                return self._epoch()
        except sqlite3.Error as error:
            raise sqlite_fault(error, self._path) from error

    def close(self) -> None:
        with self._mutex:
            if self._write:
                close_whole(self._connection)
            else:
                self._connection.close()

    def _epoch(self) -> int:
        return int(self._connection.execute("SELECT coalesce(max(epoch), 0) FROM claims").fetchone()[0])

    def _reserve(self) -> None:
        """Hold room in the file and its log, so that a disk that events filled still takes a view record."""
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        self._connection.execute("PRAGMA wal_checkpoint(RESTART)")
        for statement in ("REPLACE INTO records VALUES ('', 0, zeroblob(?))", "DELETE FROM records WHERE key = ''"):
            with transaction(self._connection):
                self._connection.execute(statement, (_RESERVE_BYTES,) if "?" in statement else ())
        self._connection.execute("PRAGMA wal_checkpoint(RESTART)")
