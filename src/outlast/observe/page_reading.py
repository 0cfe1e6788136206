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
from outlast.observe._kept_history import keep, kept_history
from outlast.observe.journal_streams import entries_of, newest_of
from outlast.observe.page_picture import RunFold
from outlast.observe.run_status import NUM_NEWEST
from outlast.observe.step_anatomy import NUM_WORDS
from outlast.observe.story_reading import read_story

__all__ = ["RunReading"]

_PIECE = 2000  # entries held at once
_WORTH_KEEPING = 20_000
_ENDS: dict[type[ev.AnyEvent], int] = {ev.ProgressMade: NUM_NEWEST, ev.StepAnatomy: NUM_WORDS}


class RunReading:
    """The run in `run_dir` as its journal tells it so far. Used by one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.fold = run_dir, RunFold()
        self.trouble = ""
        """Why nothing more is read; empty while all is well."""
        self._journal: Journal | None = None
        self._seq = self._history_seq = self._goal_seq = self._kept_seq = 0

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
            kept = kept_history(self.run_dir, journal)  # first, so that it is not newer than what is read below
            self._goal_seq = self._seq = journal.last_seq
            for event in _merged(journal, self._seq):
                self.fold.take(event)
        except ConfigError:
            return False  # removed between the look and the opening
        except OutlastError as error:
            self.trouble = str(error)
            return False
        self._journal = journal
        if kept is not None:
            self.fold.history, self._history_seq = kept, kept.seq
        self._kept_seq = self._history_seq
        return True

    def advance(self, count: int = _PIECE) -> bool:
        """Read the next piece of history; whether there was any."""
        if self._journal is None or self.trouble or self._history_seq >= self._seq:
            return False
        entries = self._read(self._history_seq, count)
        for entry in entries:
            if entry.seq <= self._seq:
                self.fold.take_history(entry.event, entry.seq)
        self._history_seq = min(entries[-1].seq, self._seq) if entries else self._seq
        if self.whole:
            self._keep()
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
                self.fold.take_history(entry.event, entry.seq)
        if entries:
            self._seq = self._goal_seq = entries[-1].seq
            self._history_seq = self._seq if whole else self._history_seq
            self._keep()
        return bool(entries)

    def story(self) -> list[ev.AnyEvent]:
        """The events that `outlast why` tells the run from; none before history was read to the end."""
        return read_story(self._journal, self.fold.history) if self._journal is not None and self.whole else []

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

    def _keep(self) -> None:
        """Write history down for the next reader, where it is whole and has grown by much."""
        if self._journal is not None and self.whole and self._history_seq - self._kept_seq > _WORTH_KEEPING:
            self._kept_seq = self._history_seq
            keep(self.run_dir, self._journal, self.fold.history)


def _merged(journal: Journal, last: int) -> Iterator[ev.AnyEvent]:
    """Events of all kinds up to the entry `last`, in order; of those in `_ENDS` only the newest."""
    whole = [entries_of(journal, kind, last) for kind in typing.get_args(ev.AnyEvent) if kind not in _ENDS]
    ends = [newest_of(journal, kind, count, last) for kind, count in _ENDS.items()]
    for entry in heapq.merge(*whole, *ends):
        yield entry.event
