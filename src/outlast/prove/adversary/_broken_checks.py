"""The checks of a step as they must not be: audits, slices, states and rows that are looked at too little."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from outlast.core.policy import Culprit, GuardEvidence, Ruling
from outlast.core.protocol import (
    Header,
    Member,
    Order,
    RollEntry,
    RowsNote,
    Stand,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.effects import Course, Seat, TellFleet
from outlast.core.protocol.step.verdict import StepEvidence, StepGuards, examined
from outlast.errors import Evicted, ViewAbandoned
from outlast.prove.adversary._guards import SimulatedGuards
from outlast.prove.adversary._variants import Variant, WithMember

__all__ = [
    "AccusationsIgnored",
    "AccuserBelieved",
    "CulpritsKept",
    "DisputeForgotten",
    "FirstStateCounts",
    "FirstStepBlind",
    "HeldOrdersAtOnce",
    "MismatchIgnored",
    "NoCloserLook",
    "SecondsUnheard",
    "SlicesBelieved",
    "SumsBelieved",
]


class MismatchIgnored(Variant):
    """Microbatches are computed twice, and nobody compares."""

    def course(
        self, seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence
    ) -> Course[Ruling | None]:
        return super().course(seat, guards, headers, dataclasses.replace(found, said=None))


class _Deafened(Variant):
    """Base of those that do not hear a part of what headers say."""

    changes: ClassVar[dict[str, Any]] = {}

    def course(
        self, seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence
    ) -> Course[Ruling | None]:
        heard = [msgspec.structs.replace(h, audit=msgspec.structs.replace(h.audit, **self.changes)) for h in headers]
        return super().course(seat, guards, heard, found)


class SumsBelieved(_Deafened):
    """Somebody read other sums than were made, and nobody minds."""

    changes: ClassVar = {"unlike": ()}


class SecondsUnheard(_Deafened):
    """Who computed somebody else's microbatch tells what it got, and nobody listens."""

    changes: ClassVar = {"claims": ()}


class SlicesBelieved(_Deafened):
    """Somebody computes another slice than was gathered, and nobody minds."""

    changes: ClassVar = {"false": ()}


class FirstStepBlind(Variant):
    """States are not compared in a view's first step."""

    def course(
        self, seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence
    ) -> Course[Ruling | None]:
        return super().course(seat, guards, headers, dataclasses.replace(found, entries=None))


class NoCloserLook(Variant):
    """Headers show that states differ, and the step is decided all the same."""

    def course(
        self, seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence
    ) -> Course[Ruling | None]:
        yield from examined(seat, guards, headers, found)
        return None


class _Favouring(SimulatedGuards):
    def evidence(self, headers: Sequence[Header], culprits: Sequence[Culprit], part: str) -> GuardEvidence:
        found = super().evidence(headers, culprits, part)
        others = tuple(header.member for header in headers if header.state != headers[0].state)
        return msgspec.structs.replace(found, differing=others, majority=True)


class FirstStateCounts(Variant):
    """Whoever's state differs from the first member's has to go, however many they are."""

    guards = _Favouring


class CulpritsKept(Variant):
    """One whose state is wrong is left, and neither told to go nor spoken of."""

    def course(
        self, seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence
    ) -> Course[Ruling | None]:
        whole = super().course(seat, guards, headers, found)
        reply: Any = None
        try:
            while True:
                effect = whole.send(reply)
                if isinstance(effect, TellFleet):
                    effect = TellFleet(
                        tuple(_unsaid(said) for said in effect.messages if not isinstance(said, m.Judged))
                    )
                reply = yield effect
        except StopIteration as done:
            result: Ruling | None = done.value
            return result
        except Evicted:
            raise ViewAbandoned("it stays") from None


def _unsaid(said: Any) -> Any:
    return msgspec.structs.replace(said, stale=()) if isinstance(said, m.Left) else said


class _Forgetful(Member):
    def called(self, entries: Sequence[RollEntry], now_s: float = 0.0) -> list[m.ToCoordinator]:
        return super().called([msgspec.structs.replace(e, audit=Stand(host=e.audit.host)) for e in entries], now_s)


class DisputeForgotten(WithMember):
    """The next view does not know what was disputed: the wrong sum is held and counts again."""

    wrong = _Forgetful


class AccusationsIgnored(Variant):
    """Somebody found that a slice is not what the rows give, and nobody votes on it."""

    def course(
        self, seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence
    ) -> Course[Ruling | None]:
        return super().course(seat, guards, headers, dataclasses.replace(found, rows=None))


class AccuserBelieved(Variant):
    """Who is accused has to go: nobody looks for itself."""

    def course(
        self, seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence
    ) -> Course[Ruling | None]:
        rows = _Believing() if found.rows is not None else None
        return super().course(seat, guards, headers, dataclasses.replace(found, rows=rows))


class _Believing:
    def refuse_bad_rows(self, notes: Sequence[RowsNote], leaves: Mapping[str, Sequence[int]]) -> None:
        """There are none."""

    def false(self, bucket: int, reducer: int) -> bool | None:
        return True


class _Hurried(Member):
    def _carry_out(self, agreed: int) -> list[Order]:
        return super()._carry_out(self.heard if self.held_back else agreed)


class HeldOrdersAtOnce(WithMember):
    """In a view that is held back, orders are carried out when heard."""

    wrong = _Hurried
