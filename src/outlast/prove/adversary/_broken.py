"""Mistakes that an implementation could make, one each. They test the adversary: every one must be caught.

Each class changes what it says and nothing else; `BROKEN` names them and says within how many schedules from seed 0
they are caught.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from outlast.core.protocol import (
    Coordinator,
    Header,
    Member,
    RollEntry,
    View,
    plan_of,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.change import successor
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.fleet.views import install
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._broken_checks import (
    AccusationsIgnored,
    AccuserBelieved,
    CulpritsKept,
    DisputeForgotten,
    FirstStateCounts,
    FirstStepBlind,
    HeldOrdersAtOnce,
    MismatchIgnored,
    NoCloserLook,
    SecondsUnheard,
    SlicesBelieved,
    SumsBelieved,
)
from outlast.prove.adversary._broken_hosts import HOSTS_BROKEN
from outlast.prove.adversary._broken_joins import JOINS_BROKEN
from outlast.prove.adversary._broken_levels import LEVELS_BROKEN
from outlast.prove.adversary._broken_saves import SAVES_BROKEN
from outlast.prove.adversary._broken_steps import STEPS_BROKEN
from outlast.prove.adversary._broken_turns import TURNS_BROKEN
from outlast.prove.adversary._broken_vacancies import VACANCIES_BROKEN
from outlast.prove.adversary._broken_work import WORK_BROKEN
from outlast.prove.adversary._variants import Buffers, Variant, WithCoordinator, WithMember

__all__ = ["BROKEN"]


# --- views -----------------------------------------------------------------------------------------------------------
class _Unfenced(Member):
    def told(self, message: m.FromCoordinator) -> list[m.ToCoordinator]:
        self.epoch = 0
        return super().told(message)


class NoEpochs(WithMember):
    """The record takes any write, and members do whatever the last speaker says."""

    fenced = False
    wrong = _Unfenced


class ToldBeforeDurable(Variant):
    """A view is told first and written afterwards."""

    def actions(self, actions: list[m.Action]) -> list[m.Action]:
        return sorted(actions, key=lambda action: isinstance(action, m.Persist))


class _Impatient(Coordinator):
    def _progress(self, now_s: float) -> None:
        change = self.change
        ready = self.roster.having("ready")
        if change is not None and change.expired and not change.acked and ready and not self.awaiting:
            for name in sorted(change.waiting):
                self.roster.mark(name, "condemned")
            install(self, successor(self, change, ready), change.cause)
        super()._progress(now_s)


class StrangersSucceed(WithCoordinator):
    """When nobody acknowledges in time, spares go on: a successor without a member of the old view."""

    wrong = _Impatient


def _believed(c: FleetState, now_s: float, hello: m.Hello) -> None:
    if c.awaiting and hello.view is not None and hello.formed:
        c.awaiting.clear()
        c.disturbed = ""
        c.set_views(hello.view, None)
        c.unformed.clear()
    Coordinator.rules[m.Hello](c, now_s, hello)


class _Gullible(Coordinator):
    rules: ClassVar = {**Coordinator.rules, m.Hello: _believed}


class FirstReportDecides(WithCoordinator):
    """A restarted coordinator believes the first who reports."""

    wrong = _Gullible


def _welcomed(c: FleetState, now_s: float, hello: m.AgentHello) -> None:
    if hello.epoch <= c.epoch:
        c.tell([hello.agent], m.Welcome(epoch=c.epoch))
        c.roster.agent_here(hello.agent, hello.pid, hello.number)


class _Deaf(Coordinator):
    rules: ClassVar = {**Coordinator.rules, m.AgentHello: _welcomed}


class AgentsForgotten(WithCoordinator):
    """What an agent lists when it returns is not compared with what is known."""

    wrong = _Deaf


class _Credulous(Member):
    def _amended(self, message: m.Amend) -> list[m.ToCoordinator]:
        if self.view is None:
            return super()._amended(message)
        removed, added = set(message.delta.removed), dict(message.delta.added)
        staying = iter([name for index, name in enumerate(self.view.members) if index not in removed])
        size = len(self.view.members) - len(removed) + len(added)
        members = tuple(added[index] if index in added else next(staying, "") for index in range(size))
        view = View(id=message.delta.id, members=members, attached=message.delta.attached)
        return self._install(m.Install(view=view, addresses=self.contacts | message.addresses, store=message.store))


class BaseUnchecked(WithMember):
    """The difference that leads to a view is applied to whatever view is there."""

    wrong = _Credulous


class NoGoodbye(Variant):
    """A member that leaves a view just closes its connections."""

    says_goodbye = False


class _Unbounded(Member):
    def renewed(self, until_s: float) -> None:
        super().renewed(math.inf)


class LeaseIgnored(WithMember):
    """Members go on without the coordinator for ever, though it counts on the lease."""

    wrong = _Unbounded


# --- steps -----------------------------------------------------------------------------------------------------------
class _Lenient(Member):
    def called(self, entries: Sequence[RollEntry], now_s: float = 0.0) -> list[m.ToCoordinator]:
        top = max(entry.committed for entry in entries)
        near = [msgspec.structs.replace(entry, committed=max(entry.committed, top - 1)) for entry in entries]
        return super().called(near, now_s)


class StaleTaken(WithMember):
    """Whoever is behind, however far, takes the last outcome."""

    wrong = _Lenient


class _Eager(Member):
    def called(self, entries: Sequence[RollEntry], now_s: float = 0.0) -> list[m.ToCoordinator]:
        answers = super().called(entries, now_s)
        plan = self.plan
        if plan is not None and any(entry.held for entry in entries):
            usual = plan_of([entry.member for entry in entries], plan.step, self.num_microbatches).leaves
            leaves = {
                e.member: plan.leaves[e.member] if e.held else tuple({*plan.leaves[e.member], *usual[e.member]})
                for e in entries
            }
            self.plan = msgspec.structs.replace(plan, leaves=leaves)
        return answers


class CountedTwice(WithMember):
    """Who brings nothing to an interrupted step computes its usual share, which others hold already."""

    wrong = _Eager


class _Careless(Member):
    def called(self, entries: Sequence[RollEntry], now_s: float = 0.0) -> list[m.ToCoordinator]:
        answers = super().called(entries, now_s)
        plan = self.plan
        if plan is not None and any(entry.held for entry in entries):
            lost = {leaf for leaves in plan.orphans.values() for leaf in leaves}
            leaves = {name: tuple(leaf for leaf in mine if leaf not in lost) for name, mine in plan.leaves.items()}
            self.plan = msgspec.structs.replace(plan, leaves=leaves)
        return answers


class OrphansForgotten(WithMember):
    """What the dead had computed is computed by nobody."""

    wrong = _Careless


class _Rash(Member):
    def decide(self, headers: Sequence[Header], now_s: float = 0.0) -> None:
        super().decide(headers, now_s)
        self._agreed = self.heard


class OrdersAtOnce(WithMember):
    """Orders are carried out when heard, not when all have heard them."""

    wrong = _Rash


class _Claimant(Member):
    def scattered(self) -> None:
        kept = self.keeps_output
        super().scattered()
        self.keeps_output = kept


class OutputClaimed(WithMember):
    """The output is said to be there after the next step has begun to write over it."""

    wrong = _Claimant


class OutputReused(Variant):
    """The next exchange writes over the last output before all are known to have it."""

    def before_exchange(self, out: list[int]) -> None:
        out[:] = [0] * len(out)


class VerdictForgotten(Variant):
    """The raw output is handed over without what was decided about it."""

    def handed(self, out: list[int], norm: int) -> algebra.Outcome:
        return tuple(out), 0


class NormBySlices(Variant):
    """Each member sums its slices first."""

    def norm(self, parts: Sequence[Sequence[tuple[int, int]]]) -> int:
        return algebra.norm_of(tuple(hash(tuple(value for _, value in part)) for part in parts))


class BuffersReused(Variant):
    """A new view receives into the buffers that an abandoned one may still be written into."""

    def late_write(self, old: Buffers, new: Buffers | None, key: Any, source: str, payload: Any) -> None:
        if new is not None and source in new.get(key, ()):
            new[key][source] = payload


# --- the end ---------------------------------------------------------------------------------------------------------
def _ended_well(c: FleetState, now_s: float, exited: m.Exited) -> None:
    well = msgspec.structs.replace(exited, cause="finished") if c.ending is not None else exited
    Coordinator.rules[m.Exited](c, now_s, well)


class _Content(Coordinator):
    rules: ClassVar = {**Coordinator.rules, m.Exited: _ended_well}


class WriterNotFollowed(WithCoordinator):
    """After the last step every end of a process is taken for a good one."""

    wrong = _Content


BROKEN: dict[str, tuple[type[Variant], int]] = {
    "no-epochs": (NoEpochs, 2000),
    "told-before-durable": (ToldBeforeDurable, 2000),
    "strangers-succeed": (StrangersSucceed, 20000),
    "first-report-decides": (FirstReportDecides, 2000),
    "agents-forgotten": (AgentsForgotten, 2000),
    "base-unchecked": (BaseUnchecked, 20000),
    "no-goodbye": (NoGoodbye, 2000),
    "lease-ignored": (LeaseIgnored, 20000),
    "stale-taken": (StaleTaken, 20000),
    "counted-twice": (CountedTwice, 2000),
    "orphans-forgotten": (OrphansForgotten, 2000),
    "orders-at-once": (OrdersAtOnce, 2000),
    "output-claimed": (OutputClaimed, 20000),
    "output-reused": (OutputReused, 2000),
    "verdict-forgotten": (VerdictForgotten, 2000),
    "norm-by-slices": (NormBySlices, 100),
    "buffers-reused": (BuffersReused, 20000),
    "mismatch-ignored": (MismatchIgnored, 2000),
    "dispute-forgotten": (DisputeForgotten, 2000),
    "seconds-unheard": (SecondsUnheard, 2000),
    "sums-believed": (SumsBelieved, 2000),
    "slices-believed": (SlicesBelieved, 2000),
    "first-step-blind": (FirstStepBlind, 20000),
    "no-closer-look": (NoCloserLook, 2000),
    "first-state-counts": (FirstStateCounts, 2000),
    "culprits-kept": (CulpritsKept, 2000),
    "accusations-ignored": (AccusationsIgnored, 2000),
    "accuser-believed": (AccuserBelieved, 20000),
    "held-orders-at-once": (HeldOrdersAtOnce, 20000),
    "writer-not-followed": (WriterNotFollowed, 2000),
    **SAVES_BROKEN,
    **HOSTS_BROKEN,
    **VACANCIES_BROKEN,
    **JOINS_BROKEN,
    **STEPS_BROKEN,
    **LEVELS_BROKEN,
    **WORK_BROKEN,
    **TURNS_BROKEN,
}
