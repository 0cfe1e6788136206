"""What `outlast status` reads of a journal, in a time that does not grow with the run's steps.

Role: the events from which a `StatusFold` knows all that it would know from every one of them. Only reads. No names and
no agents come before the run as a whole has been told: in a fleet of thousands they take most of the time.
"""

from __future__ import annotations

import heapq
import typing

from outlast.core import events as ev
from outlast.journal import Entry, Journal
from outlast.observe.journal_streams import NUM_NAMED_VIEWS, Ordered, entries_of, in_order, named_views, newest_of
from outlast.observe.run_status import NUM_NEWEST
from outlast.observe.story_events import counted_view

__all__ = ["StateReading", "newest_told", "read_state", "sample_losses"]

_NEWEST_ONLY: dict[type[ev.AnyEvent], int] = {
    ev.ProgressMade: NUM_NEWEST, ev.StateCertified: 1, ev.CheckpointSaved: 1,
    ev.ViewFormed: NUM_NAMED_VIEWS[1],  # as many as there are views with names, each of which may wait for its own
}  # fmt: skip
_RUN_KINDS: tuple[type[ev.AnyEvent], ...] = (
    ev.RunStarted, ev.RunFinished, ev.Recovery, ev.VerdictReached, ev.CheckpointFailed, ev.FleetGone, ev.AuditMismatch,
    ev.CoordinatorStarted, ev.CoordinatorLost, ev.TrainingEnded, ev.Asked, ev.VacancyDecided,
)  # fmt: skip
_PEOPLE_KINDS: tuple[type[ev.AnyEvent], ...] = (
    ev.AgentStarted, ev.AgentLost, ev.ReplicaStarted, ev.ReplicaExited, ev.Suspected, ev.JoinerServed,
    ev.JoinerCaughtUp,
)  # fmt: skip
_TOLD_KINDS: tuple[type[ev.AnyEvent], ...] = tuple(
    kind for kind in typing.get_args(ev.AnyEvent) if kind not in {ev.ProgressMade, ev.StepAnatomy, ev.ViewInstalled}
)  # a view's names, too, take longest to read, and what led to it is told beside it


class StateReading:
    """The events that make a run's status at one moment, in a time that does not grow with its steps. Read in two
    parts: what the run as a whole is like, and then who is in it, which may be ten thousand."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self.last_seq = journal, journal.last_seq
        whole = (entries_of(journal, kind, self.last_seq) for kind in _RUN_KINDS)
        # Without names, which say nothing of the run as a whole and take most of the time of a fleet of thousands.
        bodies = journal.newest_bodies(ev.ViewInstalled, NUM_NAMED_VIEWS[0], self.last_seq)
        views = (Ordered(Entry(seq, counted_view(body))) for seq, body in bodies)
        ends = (newest_of(journal, kind, count, self.last_seq) for kind, count in _NEWEST_ONLY.items())
        newest = map(Ordered, journal.latest(self.last_seq))  # says when the run was heard of last, whatever it is
        self._run = list(heapq.merge(*whole, views, *ends, newest))

    def of_run(self) -> list[ev.AnyEvent]:
        """Those that tell all but `agents` and `replicas`, in order."""
        return in_order(self._run)

    def of_all(self) -> list[ev.AnyEvent]:
        """All of them, in order."""
        views = [Ordered(entry) for entry in named_views(self._journal) if entry.seq <= self.last_seq]
        named = {entry.seq for entry in views}
        rest = (entry for entry in self._run if entry.seq not in named)  # those were read without names
        people = (entries_of(self._journal, kind, self.last_seq) for kind in _PEOPLE_KINDS)
        return in_order(heapq.merge(views, rest, *people))


def read_state(journal: Journal) -> list[ev.AnyEvent]:
    """The events that make a run's status, in order, in a time that does not grow with its steps."""
    return StateReading(journal).of_all()


def newest_told(journal: Journal, count: int, last_seq: int) -> list[ev.AnyEvent]:
    """The newest `count` events up to the entry `last_seq` that a timeline may tell, in order, of a journal of any
    length."""
    return in_order(heapq.merge(*(newest_of(journal, kind, count, last_seq) for kind in _TOLD_KINDS)))[-count:]


def sample_losses(journal: Journal, count: int = 240) -> list[float]:
    """Losses for a line of them: all of a short run, of a long one those at `count` even places of its journal."""
    events = [entry.event for entry in journal.sample(ev.ProgressMade, count)]
    return [loss for event in events if isinstance(event, ev.ProgressMade) for _, loss in event.losses]
