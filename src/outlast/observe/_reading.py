"""Reading a run's journal for the page: what matters first, the long history beside it, then what is new.

Role: the one who reads. `open` takes every event but progress, kind by kind along the journal's index, and the newest
progress, so that a run of a million steps can be shown in a second; `advance` reads the whole history a piece at a
time; `poll` takes what is new. Invariants: it only reads; the two folds see every event once and in order; a journal
that is not there yet is waited for, one that cannot be read is told once.
"""

from __future__ import annotations

import heapq
import typing
from collections.abc import Iterator
from pathlib import Path

from outlast.core import events as ev
from outlast.errors import ConfigError, OutlastError
from outlast.journal import Entry, Journal, holds_run, is_held
from outlast.observe._picture import RunFold

__all__ = ["RunReading"]

_KINDS: tuple[type[ev.AnyEvent], ...] = tuple(kind for kind in typing.get_args(ev.AnyEvent) if kind is not ev.Progress)
_PIECE, _PIECE_OF_VIEWS = 2000, 16  # entries held at once; a view names all its members
_NEWEST = 20


class RunReading:
    """The run in `run_dir` as its journal tells it so far. Used by one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.fold = run_dir, RunFold()
        self.trouble = ""
        """Why nothing more is read; empty while all is well."""
        self._journal: Journal | None = None
        self._seq = self._history_seq = self._goal_seq = 0

    @property
    def opened(self) -> bool:
        """Return whether the journal is there, and all but its history was read."""
        return self._journal is not None

    @property
    def whole(self) -> bool:
        """Return whether history was read to the end."""
        return self.opened and self._history_seq >= self._seq

    @property
    def share_read(self) -> float:
        """Return how much of the history was read, from 0 to 1."""
        return 1.0 if self.whole else self._history_seq / max(1, self._goal_seq)

    def held(self) -> bool | None:
        """Whether a process holds the run; None where nobody knows."""
        return is_held(self.run_dir) if self.opened else None

    def open(self) -> bool:
        """Read what is needed at once; False while there is no journal."""
        if self._journal is not None or self.trouble:
            return self._journal is not None
        try:
            if not holds_run(self.run_dir):
                return False
            journal = Journal.open_reader(self.run_dir)
            self._goal_seq = self._seq = journal.last_seq
            for entry in heapq.merge(*(self._entries(journal, kind) for kind in _KINDS), self._newest(journal)):
                self.fold.take(entry.event)
        except ConfigError:
            return False  # removed between the look and the opening
        except OutlastError as error:
            self.trouble = str(error)
            return False
        self._journal = journal
        return True

    def advance(self, count: int = _PIECE) -> bool:
        """Read the next piece of history; whether there was any."""
        if self._journal is None or self.trouble or self._history_seq >= self._seq:
            return False
        entries = self._read(self._history_seq, count)
        for entry in entries:
            if entry.seq <= self._seq:
                self.fold.take_history(entry.event)
        self._history_seq = min(entries[-1].seq, self._seq) if entries else self._seq
        return True

    def poll(self) -> bool:
        """Take what is new since the last call; whether there was any. History follows by `advance`."""
        if self._journal is None:
            return self.open()
        if self.trouble:
            return False
        entries = self._read(self._seq, _PIECE)
        whole = self.whole
        for entry in entries:
            self.fold.take(entry.event)
            if whole:
                self.fold.take_history(entry.event)
        if entries:
            self._seq = self._goal_seq = entries[-1].seq
            self._history_seq = self._seq if whole else self._history_seq
        return bool(entries)

    def close(self) -> None:
        """Let go of the journal."""
        if self._journal is not None:
            self._journal.close()

    def _read(self, since_seq: int, count: int) -> list[Entry]:
        assert self._journal is not None
        try:
            return self._journal.events(since_seq, limit=count)
        except OutlastError as error:
            self.trouble = str(error)
            return []

    def _entries(self, journal: Journal, kind: type[ev.AnyEvent]) -> Iterator[_Ordered]:
        since, count = 0, _PIECE_OF_VIEWS if kind is ev.ViewInstalled else _PIECE
        while entries := journal.events(since, [kind], limit=count):
            since = entries[-1].seq
            yield from (_Ordered(entry) for entry in entries if entry.seq <= self._seq)
            if since > self._seq:
                return

    def _newest(self, journal: Journal) -> Iterator[_Ordered]:
        entries = journal.newest(ev.Progress, _NEWEST)
        yield from (_Ordered(entry) for entry in entries if entry.seq <= self._seq)


class _Ordered:
    """An entry that is compared by its place, and never by its event."""

    __slots__ = ("event", "seq")

    def __init__(self, entry: Entry) -> None:
        self.seq, self.event = entry

    def __lt__(self, other: _Ordered) -> bool:
        return self.seq < other.seq
