"""Joiners as they must not be: each variant takes for whole, for the next or for the newest what is not."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from outlast.core.protocol import Member
from outlast.core.protocol.step.catching_up import CatchingUp, JoinerPort
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


JOINS_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "gaps-skipped": (GapsSkipped, 2000),
    "late-unsaid": (LateUnsaid, 2000),
    "first-serving-kept": (FirstServingKept, 20000),
}
