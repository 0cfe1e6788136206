"""Joiners, and members that come into a view, as they must not be: each variant leaves out a part of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from outlast.core.protocol import HandOver, Member
from outlast.core.protocol.step.catching_up import CatchingUp, JoinerPort
from outlast.core.protocol.step.effects import Course, Seat
from outlast.core.protocol.step.forming import RollFacts
from outlast.core.protocol.step.loop_copies import LoopCopies
from outlast.core.protocol.step.verdict import StepEvidence
from outlast.prove.adversary._broken_steps import unacted
from outlast.prove.adversary._guards import SimulatedGuards
from outlast.prove.adversary._variants import Variant

__all__ = ["JOINS_BROKEN"]


class _Rejoining(Variant):
    """Base of those in which only the joiner is wrong."""

    wrong: type[CatchingUp] = CatchingUp

    def joiner(self, member: Member, lock: AbstractContextManager[Any], port: JoinerPort, grace_s: float) -> CatchingUp:
        return self.wrong(member, lock, port, grace_s)


class _Skipping(CatchingUp):
    def replay(self, late: bool = False) -> bool:
        if self.port.loaded:
            for step in sorted(self.port.steps):
                if step > self.member.committed and self.port.outcome(step) != "incomplete":
                    self.member.replayed(step)
                    break
        return super().replay(late)


class GapsSkipped(_Rejoining):
    """An outcome is applied though the one before it has not come."""

    wrong = _Skipping


class _Untrue(CatchingUp):
    def replay(self, late: bool = False) -> bool:
        done = super().replay(late)
        if self.late:
            self.late = False
            self.member.caught_up_late()
        return done


class LateUnsaid(_Rejoining):
    """Who has yet to apply an outcome is not late by its own word, and hands over what it has not."""

    wrong = _Untrue


class _Faithful(CatchingUp):
    def begin_turn(self) -> None:
        """What it was first served is what it goes on with."""
        if self.port.serving == (0, 0):
            super().begin_turn()


class FirstServingKept(_Rejoining):
    """A joiner that is served anew goes on with what it had."""

    wrong = _Faithful


class OutcomeUntaken(Variant):
    """Who is a step behind goes on without the outcome that it is handed."""

    def hand_over(self, seat: Seat, todo: HandOver) -> Course[None]:
        return unacted(super().hand_over(seat, todo), "take")


class _FedAlone(LoopCopies):
    def flushed(self) -> None:
        """Who was still catching up is forgotten."""


class CopiesOfFedStepsAlone(Variant):
    """What the loops made of their state is kept of steps that somebody is fed, and of no other."""

    def copies(self) -> LoopCopies:
        return _FedAlone()


class BegunFromNothing(Variant):
    """A fleet that begins again does not look for a generation."""

    def form(
        self, seat: Seat, guards: SimulatedGuards, found: StepEvidence, facts: Callable[[], RollFacts]
    ) -> Course[bool]:
        return unacted(super().form(seat, guards, found, facts), "begin")


JOINS_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "outcome-untaken": (OutcomeUntaken, 2000),
    "begun-from-nothing": (BegunFromNothing, 2000),
    "copies-of-fed-steps-alone": (CopiesOfFedStepsAlone, 2000),
    "gaps-skipped": (GapsSkipped, 2000),
    "late-unsaid": (LateUnsaid, 2000),
    "first-serving-kept": (FirstServingKept, 20000),
}
