"""Steps, and the end of a run, as they must not be: each variant leaves out a part of the course."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, TypeVar

from outlast.core.policy import Ruling
from outlast.core.protocol import Exchange, Header
from outlast.core.protocol.step.deciding import StepPort
from outlast.core.protocol.step.effects import Act, AskAll, Course, Effect, Seat, replying
from outlast.core.protocol.step.exchange_order import ExchangeOrder, ExchangeStages
from outlast.prove.adversary._guards import SimulatedGuards
from outlast.prove.adversary._variants import Variant

__all__ = ["STEPS_BROKEN", "unacted"]

T = TypeVar("T")
Decided = tuple[Sequence[Header], Ruling | None]


def _answered(course: Course[T], answer: Callable[[Effect], tuple[Any] | None]) -> Course[T]:
    """A course, but for the effects that `answer` has a reply to: those are not carried out."""

    def reply_to(effect: Effect) -> Generator[Effect, Any, Any]:
        found = answer(effect)
        return found[0] if found is not None else (yield effect)

    return replying(course, reply_to)


def unacted(course: Course[T], what: str) -> Course[T]:
    """A course, but for one of its acts."""
    return _answered(course, lambda effect: (None,) if isinstance(effect, Act) and effect.what == what else None)


def _unheard(course: Course[T], me: str, name: Literal["prints", "final"]) -> Course[T]:
    """A course in which nobody is waited for on one channel: what I said is all there is."""

    def answer(effect: Effect) -> tuple[Any] | None:
        if not isinstance(effect, AskAll) or name not in effect.words or effect.half == "say":
            return None
        return ({name: {me: effect.words[name]}},)

    return _answered(course, answer)


class BarrierSkipped(Variant):
    """Who has committed the last step says so without waiting for the others."""

    def leave(self, seat: Seat) -> Course[None]:
        return _unheard(super().leave(seat), seat.me, "final")


class AuditsUndone(Variant):
    """What a second replica owes is computed by nobody."""

    def step(self, seat: Seat, guards: SimulatedGuards, todo: Exchange, port: StepPort) -> Course[Decided]:
        return unacted(super().step(seat, guards, todo, port), "audit")


class CommitmentsUnheard(Variant):
    """Audits are drawn by each member from its own word alone."""

    def step(self, seat: Seat, guards: SimulatedGuards, todo: Exchange, port: StepPort) -> Course[Decided]:
        return _unheard(super().step(seat, guards, todo, port), seat.me, "prints")


class _Early(ExchangeOrder):
    def __init__(self, num_buckets: int, stages: ExchangeStages) -> None:
        super().__init__(num_buckets, stages)
        stages.scattered()


class StableEarly(Variant):
    """The step before is called stable as soon as one's own sums of this one are offered."""

    def order(self, num_buckets: int, stages: ExchangeStages) -> ExchangeOrder:
        return _Early(num_buckets, stages)


class _Hasty(ExchangeOrder):
    def end(self) -> None:
        super().end()
        if self.awaits == "slices":
            self.awaits = None


class SlicesUnawaited(Variant):
    """Who has reduced its own slices goes on with what it has of the others'."""

    def order(self, num_buckets: int, stages: ExchangeStages) -> ExchangeOrder:
        return _Hasty(num_buckets, stages)


class _Trusting(ExchangeOrder):
    def end(self) -> None:
        if self.awaits == "sums":
            super().end()
        else:
            self.awaits = None


class SlicesUnchecked(Variant):
    """Nobody reduces once more what others have reduced."""

    def order(self, num_buckets: int, stages: ExchangeStages) -> ExchangeOrder:
        return _Trusting(num_buckets, stages)


STEPS_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "barrier-skipped": (BarrierSkipped, 2000),
    "audits-undone": (AuditsUndone, 2000),
    "commitments-unheard": (CommitmentsUnheard, 2000),
    "stable-early": (StableEarly, 2000),
    "slices-unawaited": (SlicesUnawaited, 2000),
    "slices-unchecked": (SlicesUnchecked, 2000),
}
