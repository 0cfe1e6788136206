"""Checkpoints as they must not be: each variant forgets what makes a generation whole, stable or the newest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from outlast.core.protocol import View, ViewId
from outlast.core.protocol.saves import commit as cm
from outlast.core.protocol.saves.agreement import SavePromise, SaveVotes
from outlast.core.protocol.step.effects import Course, Seat
from outlast.core.protocol.step.forming import RollFacts
from outlast.core.protocol.step.verdict import StepEvidence
from outlast.prove.adversary._guards import SimulatedGuards
from outlast.prove.adversary._variants import Variant

__all__ = ["SAVES_BROKEN"]

G = TypeVar("G")


class _Alone(SaveVotes):
    _mine = 0

    def vote(self, can: bool) -> int:
        self._mine = super().vote(can)
        return self._mine

    def decided(self, view: ViewId, committed: int, votes: Sequence[int]) -> None:
        super().decided(view, committed, [self._mine])


class OwnVoteCounts(Variant):
    """Each member saves when it wants to."""

    def votes(self) -> SaveVotes:
        return _Alone()


class _Late(SaveVotes):
    _view: ViewId | None = None

    def decided(self, view: ViewId, committed: int, votes: Sequence[int]) -> None:
        super().decided(view, committed, votes)
        self._view = view

    def due(self, view: ViewId, committed: int) -> str | None:
        return super().due(self._view or view, committed)


class DueInAnyView(Variant):
    """A save that was agreed on in one view is taken in the next."""

    def votes(self) -> SaveVotes:
        return _Late()


class PromisedUnstable(Variant):
    """A part is promised as soon as it is durable, while the step can still be taken back."""

    def promises(self, promise: SavePromise) -> bool:
        return promise.durable and not promise.given


class ShareKept(Variant):
    """A member goes on to write the share that it had in an earlier view."""

    def share(self, place: int, view: View, before: tuple[int, int]) -> tuple[int, int]:
        return before if before[1] else super().share(place, view, before)


class LastPartForgone(Variant):
    """A save is published when all parts but one are there."""

    def commit(
        self, state: cm.CommitState, event: cm.CommitEvent
    ) -> tuple[cm.CommitState, tuple[cm.CommitAction, ...]]:
        if isinstance(event, cm.ViewChanged) and len(event.writers) > 1:
            event = msgspec.structs.replace(event, writers=event.writers[:-1])
        return super().commit(state, event)


class OlderRead(Variant):
    """A fleet that begins again reads the generation before the newest."""

    def newest(self, generations: Sequence[G]) -> G | None:
        return super().newest(generations[:-1])


class SpareAsItIs(Variant):
    """A spare that takes over goes on from what it holds, whatever is saved."""

    def form(
        self, seat: Seat, guards: SimulatedGuards, found: StepEvidence, facts: Callable[[], RollFacts]
    ) -> Course[bool]:
        return super().form(seat, guards, replace(found, view=msgspec.structs.replace(found.view, saved=0)), facts)


class StopOfItsOwn(Variant):
    """A member whose part of the last save was refused at once begins the next step; the others wait for the stop."""

    def stops(self, votes: SaveVotes, view: ViewId, step: int, under_way: bool) -> bool:
        return under_way and super().stops(votes, view, step, under_way)


class StopUnawaited(Variant):
    """Members begin the next step once the last save is settled, and lose it when the stop comes."""

    def awaits_stop(self, votes: SaveVotes, view: ViewId, step: int) -> bool:
        return False


class AnySaveStops(Variant):
    """A save answers every request before it: the run that was to stop with one that failed stops with one that steps
    follow."""

    def meets(self, votes: SaveVotes, view: ViewId, step: int) -> int:
        return votes.acted


SAVES_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "own-vote-counts": (OwnVoteCounts, 2000),
    "due-in-any-view": (DueInAnyView, 2000),
    "promised-unstable": (PromisedUnstable, 2000),
    "share-kept": (ShareKept, 2000),
    "last-part-forgone": (LastPartForgone, 2000),
    "older-read": (OlderRead, 2000),
    "spare-as-it-is": (SpareAsItIs, 3000),
    "stop-of-its-own": (StopOfItsOwn, 3000),
    "stop-unawaited": (StopUnawaited, 3000),
    "any-save-stops": (AnySaveStops, 3000),
}
