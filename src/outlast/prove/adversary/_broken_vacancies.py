"""Waiting for replacements as it must not be: variants in which not all members of a held view wait."""

from __future__ import annotations

from outlast.core.protocol import Member
from outlast.core.protocol.step.todo import Todo
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


VACANCIES_BROKEN: dict[str, tuple[type[Variant], int]] = {"first-waits-for-nobody": (FirstWaitsForNobody, 2000)}
