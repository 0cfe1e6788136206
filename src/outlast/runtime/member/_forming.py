"""How a member comes into a view: connections, the roll call, what is handed over, and the first words in it.

The order is that of the courses in `core/protocol/step/forming.py`; here is what each of their acts does. Raises
ViewAbandoned where the view ends meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from outlast.core.phases import Phase
from outlast.core.protocol import (
    HandOver,
    RollEntry,
    StepPlan,
    View,
)
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.forming import RollFacts, form, hand_over
from outlast.core.protocol.step.verdict import StepEvidence
from outlast.runtime.checks.row_admission import admit
from outlast.runtime.checks.state_comparison import diverged
from outlast.runtime.exchange.plane import Plane
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.member._laned_plane import LanedPlane
from outlast.runtime.member._plane_choice import make_plane
from outlast.runtime.member._seat import MemberSeat
from outlast.runtime.saving.resume import begin, newer, take_up
from outlast.runtime.transport.endpoints import lane_address
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.rank_words import ExpectLeaves
from outlast.runtime.view.courses import Acts, carry_out, seat_of
from outlast.runtime.view.rounds import LANES
from outlast.tensors import combine

__all__ = ["Forming"]


class Forming(MemberSeat):
    """Brings a member into a view."""

    def _form(self, view: View) -> None:
        acts: Acts = {
            "part": lambda _: self._part(view),
            "drain": lambda _: self.spare.drain(view),
            "begin": lambda _: self._begin(view),
            "read newer": lambda _: self._read_newer(),
            "connect": lambda _: self._connect(view),
            "keep": lambda act: self._keep(act.entries),
        }
        found = StepEvidence(view=view, parts=self.parts, diverged=diverged)
        course = form(seat_of(self), self.guards, found, self._roll_facts)
        if not carry_out(self, course, acts):
            self._close_view()
            return
        with self.lock:
            formed, plan = self.member.formed, self.member.standing()[1]
        assert self.mesh is not None
        self.plane = self._make_plane(self.mesh)
        if formed:
            self._formed(view, plan)

    def _part(self, view: View) -> None:
        self._close_view()
        if not self._left_at_s and not view.start:
            self._left_at_s = time.monotonic()
        self.donor.flush(view)

    def _begin(self, view: View) -> None:
        begun = self.siblings.begin_run(view)
        begin(self.env, self.engine, view, self.saves)
        begun(self.member.committed)

    def _read_newer(self) -> None:
        """Nobody brings what the view before held, and a checkpoint is said to be newer than what I have. Ranks of one
        replica may find different ones whole, and only the first view of a run can end for that: there mine counts."""
        if self.saves is None or self.siblings.some:
            return
        loaded = newer(self.saves, self.member.committed)
        if loaded is None:
            return
        step = take_up(self.saves, loaded)
        self.spare.course.read_elsewhere()
        with self.lock:
            self.member.replayed(step)
            self.member.stable = step

    def _keep(self, entries: Sequence[RollEntry]) -> None:
        self._entries = list(entries)
        with self.lock:
            self.engine.sums.keep(sorted(self.member.held))

    def _connect(self, view: View) -> None:
        """Connections to all members of the view."""
        self.enter(Phase.CONNECT)
        self.mesh = mesh = Mesh(
            self.listener,
            view,
            {name: lane_address(address, 0) for name, address in self.member.contacts.items()},
            self.engine.memory.region,
            wake_fd=self.link.wake_fd,
            abandoned=lambda: self._over(view),
            patience=self.patience,
            on_stall=self._stalled,
            probe=self.probe,
            awaited_s=self.clock.awaited_s,
            on_awaited=lambda missing: self.link.send([hm.Awaited(member=self.env.me, missing=missing)]),
        )
        mesh.waits = self.pace.parts.waits
        mesh.form()
        self._remember_peers()
        self.enter(Phase.ROLL_CALL)

    def _roll_facts(self) -> RollFacts:
        joined, late = self.engine.late is not None, self.spare.late
        return RollFacts(outcome=self.engine.outcome(), state=self._fingerprint, late=late, joined=joined)

    def _fingerprint(self) -> int:
        """The fingerprint of the whole state, over all ranks; 0 at the end, where the others of a replica may have
        ended as their lead is about to."""
        mesh, view = self.mesh, self.member.view
        if not self.siblings.some or mesh is None:
            return self.engine.fingerprint()
        whole = view is not None and view.start
        return combine([self.engine.fingerprint(), *self.siblings.fingerprints(mesh)]) if whole else 0

    def _make_plane(self, mesh: Mesh) -> Plane:
        """The lane of this rank; and the replica's others, where it has more than one."""
        if not self.siblings.some:
            return self.disguise(make_plane(self, self.engine, mesh, self.memories, self._store))
        lanes = self.on(LANES, -1, self.siblings.addresses, Phase.ROLL_CALL)
        self.siblings.form(mesh.view, lanes, sorted(self.member.held))
        own = make_plane(self, self.engine, mesh, self.memories, self._store)
        return LanedPlane(own, self.siblings, self.engine, mesh, self.disguise)

    def _remember_peers(self) -> None:
        for name, region in self.listener.regions.items():
            if name not in self.memories:
                self.memories[name] = Memory(self.engine.layout, self.engine.memory.num_slots, region)

    def _hand_over(self, todo: HandOver) -> None:
        acts: Acts = {"give": lambda _: self._give(todo), "take": lambda _: self._take(todo)}
        carry_out(self, hand_over(seat_of(self), todo), acts)
        with self.lock:
            view, plan = self.member.standing()
        self._formed(view, plan)

    def _give(self, todo: HandOver) -> None:
        assert self.plane is not None
        self.enter(Phase.HAND_OVER_SEND)
        joined = any(entry.joined for entry in self._entries if entry.member in todo.behind)
        self.siblings.joined = joined
        self.plane.give(todo.step, self.engine.told(joined=joined), todo.behind)

    def _take(self, todo: HandOver) -> None:
        assert self.plane is not None
        self.enter(Phase.HAND_OVER_RECEIVE)
        joined = self.engine.late is not None
        self.engine.settle(self.enter)
        meta = self.engine.heard(self.plane.take(todo.step, todo.donor), joined=joined)
        if not joined:
            self.engine.live(self.enter)
        self.pace.record(meta.step, meta.loss)
        self.pace.formed(self._left_at_s, 0.0)
        self.pace.committed(meta.step, len(self.mesh.view.members) if self.mesh is not None else 1)

    def _formed(self, view: View, plan: StepPlan) -> None:
        """The view works: tell the coordinator, feed the spares, expect my share of the data."""
        now = time.monotonic()
        recomputed = 0
        if self.last_plan is not None and self.last_plan.step == plan.step:
            dead = [name for name in self.last_plan.leaves if name not in view.members]
            lost = {leaf for name in dead for leaf in self.last_plan.leaves[name]}
            recomputed = len(lost.intersection(leaf for part in plan.orphans.values() for leaf in part))
        formed = self._told = m.Formed(
            member=self.env.me,
            view=view.id,
            step=plan.step,
            recomputed=recomputed,
            left_at_s=self._left_at_s,
            formed_at_s=now,
        )
        if not view.start:  # when the steps before it were committed is told with it, not later: who leaves may not
            self.link.beat()
        self.link.send([formed])
        self.pace.formed(self._left_at_s, recomputed / self.engine.num_leaves)
        self._left_at_s = 0.0
        self.last_plan = plan
        self.comparison, self._compared = None, view.start
        if view.start:  # they were compared in the roll call
            self.member.audits.compared(plan.step)
        if self.engine.robust is not None:
            admit(self, self.engine.robust, view, plan)
        if self.member.held_back:
            self.pace.waits()
        self.donor.formed(view)
        self.on_formed()
        first, share = list(plan.orphans[self.env.me]), self._standard_share(view)
        self.engine.expect(first, share, plan.step, self.member.committed)
        config = self.env.config
        awaited = bool(config.spares) or (bool(config.max_restarts) and len(view.members) < config.replicas)
        index, donors = view.members.index(self.env.me), len(view.members) if awaited else 0
        self.engine.expect_joiners(index, donors)
        since = self.member.committed
        self.siblings.expect(ExpectLeaves(tuple(first), tuple(share), plan.step, since, index, donors))

    def _standard_share(self, view: View) -> list[int]:
        return list(self.member.usual_plan(view).leaves[self.env.me])
