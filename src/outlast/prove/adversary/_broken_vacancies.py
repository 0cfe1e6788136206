"""Waiting for replacements as it must not be: not all members of a held view wait, or nobody compares them."""

from __future__ import annotations

from collections.abc import Callable

from outlast.core.protocol import Member, Order, View
from outlast.core.protocol.step.effects import Course, Seat
from outlast.core.protocol.step.todo import Todo
from outlast.core.protocol.step.verdict import StepEvidence
from outlast.prove.adversary._guards import SimulatedGuards
from outlast.prove.adversary._variants import Variant, WithMember

__all__ = ["VACANCIES_BROKEN"]


class _Restless(Member):
    def next(self, now_s: float = 0.0) -> Todo:
        if self.view is not None and self.view.held and self.view.members[0] == self.me:
            self.held_back = False
        return super().next(now_s)


class FirstWaitsForNobody(WithMember):
    """The first member of a held view goes on with the step, and its peers rest."""

    wrong = _Restless


class HeldStatesUnseen(Variant):
    """Whoever joins while others wait is fed and let in, and nobody compares the states of those that do."""

    def take_orders(
        self,
        seat: Seat,
        guards: SimulatedGuards,
        found: StepEvidence,
        state: Callable[[], int],
        carry_out: Callable[[Order, View], None],
    ) -> Course[None]:
        return super().take_orders(seat, guards, found, lambda: 0, carry_out)


VACANCIES_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "first-waits-for-nobody": (FirstWaitsForNobody, 2000),
    "held-states-unseen": (HeldStatesUnseen, 20000),
}
