"""The last event of a run, whose own writing is a part of the run's time.

Role: on a slow disk each wait for it takes a tenth of a second and more, and an event that tells when all was over is
followed by several. Invariant: opening waits for the disk as closing does, so who measures the one knows the other. A
power cut may lose the event, never the file. It keeps no clock.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Self

from outlast.core.events import AnyEvent
from outlast.journal._faults import sqlite_fault
from outlast.journal._files import EVENTS_NAME, FORMAT, close_whole, open_writable, transaction
from outlast.journal._writer import insert

__all__ = ["LastLine"]


class LastLine:
    """For whoever holds the run's lock when all writers have closed. A context manager; opening, `append` and closing
    raise ConfigError and EnvironmentFault."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVENTS_NAME
        self._connection = open_writable(run_dir, EVENTS_NAME, create=False)
        try:
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(f"PRAGMA user_version = {FORMAT}")  # written, though nothing is changed by it
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            self._connection.close()
            raise sqlite_fault(error, self._path) from error

    def append(self, event: AnyEvent) -> None:
        """Write the event; waits for no disk."""
        try:
            with transaction(self._connection):
                insert(self._connection, [event])
        except sqlite3.Error as error:
            raise sqlite_fault(error, self._path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_whole(self._connection)  # waits for the log, then for the file
