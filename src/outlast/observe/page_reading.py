"""Reading a run's journal for the page: what matters first, the long history beside it, then what is new.

Role: the one who reads. `open` takes every event but progress, kind by kind along the journal's index, and the newest
progress, so that a run of a million steps can be shown in a second; `advance` reads the whole history a piece at a
time; `poll` takes what is new. Invariants: it only reads; the two folds see every event once and in order; a journal
that is not there yet is waited for, one that cannot be read is told once.
"""

from __future__ import annotations

import heapq
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

from outlast.core import events as ev
from outlast.errors import ConfigError, OutlastError
from outlast.journal import Entry, Journal, holds_run, is_held
from outlast.observe._history import History
from outlast.observe._kept_history import keep, kept_history
from outlast.observe.page_picture import RunFold
from outlast.observe.run_status import NUM_NEWEST
from outlast.observe.step_anatomy import NUM_WORDS
from outlast.observe.story_events import counted_view

__all__ = ["RunReading", "StateReading", "read_state", "read_story", "sample_losses"]

_KINDS: tuple[type[ev.AnyEvent], ...] = tuple(
    kind for kind in typing.get_args(ev.AnyEvent) if kind is not ev.ProgressMade
)
_PIECE, _PIECE_OF_VIEWS = 2000, 16  # entries held at once; a view names all its members
_NUM_SAMPLES, _ALL_OF = 2000, 20_000  # what is sampled of a journal longer than that
_WORTH_KEEPING = 20_000
_NAMES, _NAMED_VIEWS = 80_000, (4, 64)  # the newest views are read with names: so many names, so many views
_ENDS: Mapping[type[ev.AnyEvent], int] = MappingProxyType({
    ev.ProgressMade: NUM_NEWEST, ev.StepAnatomy: NUM_WORDS,
})  # fmt: skip
_NEWEST_ONLY: dict[type[ev.AnyEvent], int] = {
    ev.ProgressMade: NUM_NEWEST, ev.StateCertified: 1, ev.CheckpointSaved: 1, ev.StepAnatomy: 64,
}  # fmt: skip
_STATE_KINDS: tuple[type[ev.AnyEvent], ...] = (
    ev.RunStarted, ev.RunFinished, ev.Recovery, ev.VerdictReached, ev.CheckpointFailed, ev.FleetGone, ev.AuditMismatch,
    ev.CoordinatorStarted, ev.CoordinatorLost, ev.AgentStarted, ev.AgentLost, ev.ViewFormed, ev.TrainingEnded, ev.Asked,
)  # fmt: skip
_PEOPLE_KINDS: tuple[type[ev.AnyEvent], ...] = (
    ev.ReplicaStarted, ev.ReplicaExited, ev.Suspected, ev.JoinerServed, ev.JoinerCaughtUp,
)  # fmt: skip


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
            for event in _merged(journal, _KINDS, self._seq):
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


def read_story(journal: Journal, history: History | None = None) -> list[ev.AnyEvent]:
    """All events in order, but of the progress of a long run only so many, evenly spread, and the newest: what `why`
    needs beside the history, and enough to learn a pace and a band of losses from. With `history`, which was read to
    the end, what that kept of them: no starts of members, in a time that grows with what befell the run only."""
    last = journal.last_seq
    words = _newest(journal, ev.StepAnatomy, NUM_WORDS, last)
    newest = _newest(journal, ev.ProgressMade, NUM_NEWEST, last)
    if history is not None:
        told = [*history.story.entries(), *((entry.seq, entry.event) for stream in (newest, words) for entry in stream)]
        return list(dict(sorted(told, key=itemgetter(0))).values())
    short = last <= _ALL_OF
    found = journal.events(kinds=[ev.ProgressMade]) if short else journal.sample(ev.ProgressMade, _NUM_SAMPLES)
    progress = (_Ordered(entry) for entry in found if entry.seq <= last)
    whole = (_entries(journal, kind, last) for kind in _KINDS if kind is not ev.StepAnatomy)
    return _once(heapq.merge(*whole, progress, newest, words))


def _once(entries: Iterable[_Ordered]) -> list[ev.AnyEvent]:
    """The events of entries in order; what several streams had counts once."""
    last, events = 0, []
    for entry in entries:
        if entry.seq != last:
            last = entry.seq
            events.append(entry.event)
    return events


class StateReading:
    """The events that make a run's status at one moment, in a time that does not grow with its steps. Read in two
    parts: what the run as a whole is like, and then who is in it, which may be ten thousand."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._last = journal, journal.last_seq
        whole = (_entries(journal, kind, self._last) for kind in _STATE_KINDS)
        # Without names, which say nothing of the run as a whole and take most of the time of a fleet of thousands.
        bodies = journal.newest_bodies(ev.ViewInstalled, _NAMED_VIEWS[0], self._last)
        views = (_Ordered(Entry(seq, counted_view(body))) for seq, body in bodies)
        ends = (_newest(journal, kind, count, self._last) for kind, count in _NEWEST_ONLY.items())
        newest = map(_Ordered, journal.latest(self._last))  # says when the run was heard of last, whatever it is
        self._run = list(heapq.merge(*whole, views, *ends, newest))

    def of_run(self) -> list[ev.AnyEvent]:
        """Those that tell all but `replicas`, in order."""
        return _once(self._run)

    def of_all(self) -> list[ev.AnyEvent]:
        """All of them, in order."""
        views = [_Ordered(entry) for entry in _named_views(self._journal) if entry.seq <= self._last]
        named = {entry.seq for entry in views}
        rest = (entry for entry in self._run if entry.seq not in named)  # those were read without names
        people = (_entries(self._journal, kind, self._last) for kind in _PEOPLE_KINDS)
        return _once(heapq.merge(views, rest, *people))


def read_state(journal: Journal) -> list[ev.AnyEvent]:
    """The events that make a run's status, in order, in a time that does not grow with its steps."""
    return StateReading(journal).of_all()


def sample_losses(journal: Journal, count: int = 240) -> list[float]:
    """Losses for a line of them: all of a short run, of a long one those at `count` even places of its journal."""
    events = [entry.event for entry in journal.sample(ev.ProgressMade, count)]
    return [loss for event in events if isinstance(event, ev.ProgressMade) for _, loss in event.losses]


def _merged(
    journal: Journal,
    kinds: Sequence[type[ev.AnyEvent]],
    last: int,
    newest: Mapping[type[ev.AnyEvent], int] = _ENDS,
) -> Iterator[ev.AnyEvent]:
    """Events of `kinds` up to the entry `last`, in order; of those in `newest` only so many."""
    whole = [_entries(journal, kind, last) for kind in kinds if kind not in newest]
    ends = [_newest(journal, kind, count, last) for kind, count in newest.items()]
    for entry in heapq.merge(*whole, *ends):
        yield entry.event


def _entries(journal: Journal, kind: type[ev.AnyEvent], last: int) -> Iterator[_Ordered]:
    if kind is ev.ViewInstalled:
        yield from _views(journal, last)
        return
    since = 0
    while entries := journal.events(since, [kind], limit=_PIECE):
        since = entries[-1].seq
        yield from (_Ordered(entry) for entry in entries if entry.seq <= last)
        if since > last:
            return


def _views(journal: Journal, last: int) -> Iterator[_Ordered]:
    """All views; those before the newest few with the number of their members, and without their names."""
    named = _named_views(journal)
    since, until = 0, min([last + 1, *(entry.seq for entry in named)])
    while bodies := journal.bodies(ev.ViewInstalled, since, until, limit=_PIECE_OF_VIEWS):
        since = bodies[-1][0]
        yield from (_Ordered(Entry(seq, counted_view(body))) for seq, body in bodies)
    yield from (_Ordered(entry) for entry in named if entry.seq <= last)


def _named_views(journal: Journal) -> list[Entry]:
    """The newest views, as many as have not too many members in all: each changes by one or two of them."""
    newest = journal.newest(ev.ViewInstalled)
    size = max((len(entry.event.members) for entry in newest if isinstance(entry.event, ev.ViewInstalled)), default=1)
    least, most = _NAMED_VIEWS
    return journal.newest(ev.ViewInstalled, min(most, max(least, _NAMES // max(1, size))))


def _newest(journal: Journal, kind: type[ev.AnyEvent], count: int, last: int) -> Iterator[_Ordered]:
    yield from (_Ordered(entry) for entry in journal.newest(kind, count) if entry.seq <= last)


class _Ordered:
    """An entry that is compared by its place, and never by its event."""

    __slots__ = ("event", "seq")

    def __init__(self, entry: Entry) -> None:
        self.seq, self.event = entry

    def __lt__(self, other: _Ordered) -> bool:
        return self.seq < other.seq
