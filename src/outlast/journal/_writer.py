"""Events on their way to the disk: batched on a thread of their own, held in memory while the disk refuses them.

Role: `append` costs microseconds and never waits for a disk; whatever has gathered meanwhile is one transaction.
Invariants: events reach the file in the order they were appended; memory is bounded; a disk that is full, or
read-only for a while, never stops the run, and is told once, when it is over. Errors that no waiting can mend (a
damaged file) end the writing; `trouble` says so. It keeps no clock: a notice takes the time of the event before it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from outlast.core.events import AnyEvent, Notice, ProgressMade, encode
from outlast.journal._faults import is_transient, sqlite_fault
from outlast.journal._files import EVENTS_NAME, close_whole, open_writable, transaction

__all__ = ["EventWriter", "insert", "tag_of"]

_RETRY_S = 1.0
_MAX_EVENTS = 50_000
_MAX_BYTES = 32 * 2**20


class _Row(NamedTuple):
    at_s: float
    kind: str
    body: str


def tag_of(event: type[AnyEvent] | AnyEvent) -> str:
    """The event's `kind`, as it stands in the file."""
    return str(event.__struct_config__.tag)


def insert(connection: sqlite3.Connection, events: Iterable[AnyEvent]) -> None:
    """Put events into the file, within a transaction of the caller's."""
    _insert(connection, [_row(event) for event in events])


def _insert(connection: sqlite3.Connection, rows: list[_Row]) -> None:
    connection.executemany("INSERT INTO events(at_s, kind, body) VALUES (?, ?, ?)", rows)


def _row(event: AnyEvent) -> _Row:
    return _Row(event.at_s, tag_of(event), encode(event).decode())


_PROGRESS = tag_of(ProgressMade)


class EventWriter:
    """The one writer of `journal.db`. `max_events`, `max_bytes`: what is held while the disk refuses."""

    def __init__(
        self, run_dir: Path, *, create: bool = False, max_events: int = _MAX_EVENTS, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._path = run_dir / EVENTS_NAME
        self._connection = open_writable(run_dir, EVENTS_NAME, create=create)
        self._max_events, self._max_bytes = max_events, max_bytes
        self._changed = threading.Condition()
        self._rows: deque[_Row] = deque()
        self._bytes = 0
        self._accepted = self._settled = self._dropped = self._tries = 0
        self._closing = self._hurry = False
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="outlast-journal", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Why events are not reaching the disk just now, or None."""
        return self._trouble

    def append(self, events: list[AnyEvent]) -> None:
        """Take events for writing; returns at once. After `close` they are dropped."""
        rows = [_row(event) for event in events]
        with self._changed:
            if self._closing:
                return
            self._rows.extend(rows)
            self._bytes += sum(len(row.body) for row in rows)
            self._accepted += len(rows)
            self._bound()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was appended before is on the disk; False if the disk refuses or time is up."""
        with self._changed:
            goal, tries = self._accepted, self._tries
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self._settled >= goal or (self._trouble is not None and self._tries > tries) or not self._alive()
                ),
                timeout_s,
            )
            return self._settled >= goal and self._trouble is None

    def close(self, timeout_s: float) -> bool:
        """Write what can be written, then close the file; False if events were lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False  # stuck in the kernel: the connection is the thread's, and dies with the process
        close_whole(self._connection)
        return not self._rows

    def _alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._due, _RETRY_S if self._trouble else None)
                closing, self._hurry = self._closing, False
                batch = list(self._rows)
            if not self._write(batch) or (closing and (self._trouble is not None or not self._rows)):
                return

    def _due(self) -> bool:
        """Whether to write now; a refused write is tried again when its time is up, or when somebody waits for it."""
        return self._closing or self._hurry or (bool(self._rows) and self._trouble is None)

    def _write(self, batch: list[_Row]) -> bool:
        """Try one transaction; False if no later try can succeed."""
        failure: sqlite3.Error | None = None
        try:
            if batch:
                with transaction(self._connection):
                    _insert(self._connection, batch)
        except sqlite3.Error as error:
            failure = error
        with self._changed:
            self._tries += 1
            if failure is None:
                self._settle(batch)
            else:
                self._trouble = sqlite_fault(failure, self._path).message
            self._changed.notify_all()
        return failure is None or is_transient(failure)

    def _settle(self, batch: list[_Row]) -> None:
        """The batch is on the disk. Rows of it that `_bound` dropped meanwhile were written nevertheless."""
        written = {id(row) for row in batch}
        while self._rows and id(self._rows[0]) in written:
            self._bytes -= len(self._rows.popleft().body)
        self._settled = self._accepted - len(self._rows)
        if batch and (self._trouble is not None or self._dropped):
            self._tell_recovery(batch[-1].at_s)

    def _tell_recovery(self, at_s: float) -> None:
        why = self._trouble or "the disk was slower than the events"
        lost = f", and {self._dropped} did not fit there and are lost" if self._dropped else ""
        text = f"the journal could not be written for a while ({why}); events were held in memory{lost}"
        notice = Notice(at_s=at_s, level="warning", text=text)
        self._trouble, self._dropped = None, 0
        row = _row(notice)
        self._rows.append(row)
        self._bytes += len(row.body)
        self._accepted += 1

    def _bound(self) -> None:
        """Keep memory bounded: progress goes first, as the next one repeats most of what it says, then the oldest."""
        if len(self._rows) <= self._max_events and self._bytes <= self._max_bytes:
            return
        before = len(self._rows)
        self._rows = deque(row for row in self._rows if row.kind != _PROGRESS)
        self._bytes = sum(len(row.body) for row in self._rows)
        while len(self._rows) > self._max_events or self._bytes > self._max_bytes:
            self._bytes -= len(self._rows.popleft().body)
        self._dropped += before - len(self._rows)
