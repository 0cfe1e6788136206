"""Shares that follow speed as they must not: each variant has members that do not all cut the step alike."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outlast.core.protocol import Member, Order, RollEntry, plan_of
from outlast.core.protocol import messages as m
from outlast.prove.adversary._variants import Variant, WithMember

__all__ = ["WORK_BROKEN"]


class _Equal(Member):
    def called(self, entries: Sequence[RollEntry], now_s: float = 0.0) -> list[m.ToCoordinator]:
        answers = super().called(entries, now_s)
        self._forget()
        return answers

    def commit(self) -> list[Order]:
        due = super().commit()
        self._forget()
        return due

    def _forget(self) -> None:
        view, plan = self.view, self.plan
        if plan is None or view is None or not view.work or plan.orphans != plan.leaves or view.members[0] != self.me:
            return
        if {name: len(leaves) for name, leaves in plan.leaves.items()} == dict(
            zip(view.members, view.work, strict=True)
        ):
            self.plan = plan_of(view.members, plan.step, self.num_microbatches)


class EvenToOneself(WithMember):
    """The first member of a view takes an even share, whatever the view says."""

    wrong = _Equal


class _Thrifty(Member):
    def _amended(self, message: m.Amend) -> list[m.ToCoordinator]:
        answers = super()._amended(message)
        self._lose(message.delta.work)
        return answers

    def _take(self, message: m.Take) -> list[m.ToCoordinator]:
        answers = super()._take(message)
        if message.delta is not None and message.order.number in self._orders:
            order = self._orders[message.order.number]
            if order.next is not None and order.next.work:
                plain = msgspec.structs.replace(order.next, work=())
                self._orders[order.number] = msgspec.structs.replace(order, next=plain)
        return answers

    def _lose(self, work: tuple[int, ...]) -> None:
        if work and self.view is not None and self.view.work == work:
            self.view = msgspec.structs.replace(self.view, work=())


class SharesLostInDifferences(WithMember):
    """Who hears of a view as a difference does not learn its shares; who hears of it whole does."""

    wrong = _Thrifty


class _Early(Member):
    def _take(self, message: m.Take) -> list[m.ToCoordinator]:
        answers = super()._take(message)
        view, order = self.view, self._orders.get(message.order.number)
        if view is not None and order is not None and order.next is not None and order.next.members == view.members:
            self.view = msgspec.structs.replace(view, work=order.next.work)
        return answers


class SharesAtOnce(WithMember):
    """New shares are taken when they are heard of, not in the view that they come with."""

    wrong = _Early


WORK_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "even-to-oneself": (EvenToOneself, 2000),
    "shares-lost-in-differences": (SharesLostInDifferences, 20000),
    "shares-at-once": (SharesAtOnce, 20000),
}
