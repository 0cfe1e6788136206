"""One member of a run: carries out what `core/protocol.Member` decides, over real sockets.

`resume()` forms views, calls rolls, hands outcomes over and follows as a spare until there is a microbatch to compute
or a step to exchange; `exchange()` takes a step to its commit. Every wait ends on an event: a peer's frame, the
coordinator's word, or a deadline. An exception between verdict and commit leaves this object unusable (rule 12).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from outlast.core.phases import Phase
from outlast.core.protocol import (
    Compute,
    Exchange,
    Follow,
    Form,
    HandOver,
    Leave,
    Member,
    RollEntry,
    StepPlan,
    View,
    Wait,
    plan_of,
)
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.errors import Evicted, SignatureMismatch, StepMisuse, ViewAbandoned
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.checks.row_admission import admit, wait_for_rows
from outlast.runtime.checks.state_comparison import Comparison
from outlast.runtime.checks.verdict_round import compare_roll
from outlast.runtime.exchange.plane import Plane
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.host.environment import Environment
from outlast.runtime.joining.donor import Donor, lane_address, lanes_address
from outlast.runtime.joining.joiner import Spare
from outlast.runtime.member._heartbeat import Pace, ping, stalled
from outlast.runtime.member._phase_clock import PhaseClock
from outlast.runtime.member._plane_choice import make_plane
from outlast.runtime.member._rank_reports import failure_of, stall_of
from outlast.runtime.member._sibling_lanes import SiblingLanes
from outlast.runtime.member._siblings import LanedPlane, Siblings
from outlast.runtime.member.link import MemberLink, SoloLink
from outlast.runtime.saving.member_saves import Saves
from outlast.runtime.saving.resume import begin
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.run_facts import device_name
from outlast.runtime.training.script_files import script_files
from outlast.runtime.transport.connections import Listener, PeersLost
from outlast.runtime.transport.frames import Heartbeat
from outlast.runtime.transport.mesh import Final, Mesh, Roll
from outlast.runtime.transport.rank_words import ExpectLeaves, RankFailed
from outlast.runtime.view.rounds import LANES, Channel, round_of
from outlast.tensors import combine

__all__ = ["Replica"]

T = TypeVar("T")


class Replica:
    """See the module. What it does for others they know as `ViewPort`."""

    def __init__(self, env: Environment, engine: Engine, facts: dict[str, str], guards: Guarding) -> None:
        self.env, self.engine, self.facts, self.guards = env, engine, facts, guards
        self._files = script_files() if env.coordinator is not None else {}
        self.device = device_name(engine.layout.device)
        self.member = Member(env.me, engine.num_leaves, num_rows=engine.num_rows)
        self.lock = threading.RLock()
        self.probe, self.progress = env.probe, env.progress
        self._store: Any = None
        if env.exchange == "c10d" and engine.layout.device.type == "cuda":
            from outlast.runtime.exchange.c10d_plane import LOOPBACK, open_store

            self._store, env.store = open_store(env.address or LOOPBACK)
        self.listener = Listener(env.run_id, env.me, env.secret, alone=env.coordinator is None, network=env.address)
        self.link = self._make_link()
        self.siblings = Siblings(
            env.pipes, self.link.wake_fd, self._own_ranks_stalled, lambda: self.patience(self.clock.phase)
        )
        for pipe in env.pipes:
            pipe.on_failed = self._rank_failed
            pipe.on_stalled = lambda said: self.link.send([stall_of(env.me, said)])
        self.siblings.meet(facts)
        lanes = SiblingLanes(self.siblings) if self.siblings.some else None
        self.spare = Spare(env, engine, self.link, self.member, self.lock, self.enter, self.listener.feeds, lanes)
        self.mesh: Mesh | None = None
        self.plane: Plane | None = None
        self.memories: dict[str, Memory] = {}
        self.donor = Donor(env, engine, self.member, self.enter, self.siblings.tell)
        self._left_at_s = 0.0
        self.last_plan: StepPlan | None = None
        self._entries: list[RollEntry] = []
        self.comparison: Comparison | None = None  # of states, in a view's first step
        self._compared = True
        self.disguise: Callable[[Plane], Plane] = lambda plane: plane  # tests have a replica lie
        self.pace = Pace(env.progress, env.config.replicas if env.coordinator is not None else 1)
        self.clock = PhaseClock(env.progress, env.config, self.pace.passed)
        self.spare.applied = self.pace.replayed
        engine.on_stop = self._stop_after
        self.on_formed: Callable[[], None] = lambda: None  # told of each view that works
        self._departed = self._retired = False
        self.saves: Saves | None = None  # the run's checkpoints, if it keeps any

    def _make_link(self) -> MemberLink | SoloLink:
        env = self.env
        if env.coordinator is not None and env.config.lease_s < math.inf:
            self.member.lease_until_s = 0.0  # until the first heartbeat was answered
        if env.coordinator is None:
            return SoloLink(self.member, self.lock)
        return MemberLink(
            env.coordinator,
            env.secret,
            self.member,
            self.lock,
            hello=self._hello,
            beat=self._beat,
            asked=self._asked,
            heartbeat_s=env.config.heartbeat_s,
            lease_s=env.config.lease_s,
            run=env.run_id,
        )

    def _rank_failed(self, failed: RankFailed) -> None:
        self.siblings.reported = True
        self.link.send([failure_of(self.env.me, self.member.committed, failed)])

    @property
    def view(self) -> View | None:
        """The newest view that this replica was told."""
        return self.member.view

    # --- what others see -----------------------------------------------------------------------------------------
    def enter(self, phase: Phase, microbatch: int = -1, bucket: int = -1) -> None:
        """Publish where I am, learn how long the last phase took, and pass the fault point."""
        step = self.member.committed
        self.clock.enter(phase, step, microbatch, bucket)
        if self.probe.faults:
            self.probe(phase, step, microbatch, bucket)

    def everyone(self, mine: T, phase: Phase) -> dict[str, T]:
        """See `ViewPort`."""
        if self.mesh is None:
            raise ViewAbandoned("the view is closed")
        return self.mesh.everyone(mine, phase)

    def on(self, channel: Channel[T], step: int, mine: T, phase: Phase, turn: int = 0) -> dict[str, T]:
        """See `ViewPort`."""
        if self.mesh is None:
            raise ViewAbandoned("the view is closed")
        return round_of(self.mesh, channel, step, mine, phase, turn)

    def tell_coordinator(self, messages: Iterable[Any]) -> None:
        """See `ViewPort`."""
        self.link.send(messages)

    def patience(self, phase: Phase) -> float:
        """How long to wait for others in a phase before they are named."""
        return self.clock.patience(phase)

    def _hello(self) -> m.Hello:
        facts = self.facts | self._files
        address = lanes_address([self.listener.address, *self.siblings.addresses])
        return self.member.hello(self.env.agent, facts, address, self.env.store, self.device)

    def _beat(self, again: bool = False) -> Heartbeat:
        with self.lock:
            view = self.member.view
            return Heartbeat(
                sender=self.env.me,
                sent_s=time.monotonic(),
                view=(view.id.epoch, view.id.n) if view else (0, 0),
                committed=self.member.committed,
                stable=self.member.stable,
                losses=self.pace.take(),
                step_s=self.pace.step_s,
                until=self.member.until or 0,
                sent_messages=self.link.sent,
                certified=self.member.audits.certificate,
                steps=self.pace.steps(again),
                parts=self.pace.parts.take(),
                refused=self.listener.refused,
            )

    def _asked(self, probe: m.ProbePaths) -> None:
        """The coordinator wants to know which paths work: asks the training thread to ping, if it waits or once it
        does."""
        mesh = self.mesh
        if mesh is not None and mesh.view.id == probe.view:
            mesh.ping_wanted = True

    # --- until there is work -------------------------------------------------------------------------------------
    def resume(self) -> Compute | Exchange | Leave | Wait | None:
        """Whatever it takes until a microbatch, an exchange or the end is next. None: the run has closed for me. Wait:
        there is time for the loop to go through the step that it has yet to go through."""
        while True:
            with self.lock:
                todo = self.member.next(time.monotonic())
                self._raise_if_refused()
                if self.member.closed is not None:
                    return None
            try:
                if isinstance(todo, Compute | Exchange | Leave):
                    return todo
                if isinstance(todo, Wait) and todo.why == "rows" and self.engine.late is not None:
                    return todo
                if isinstance(todo, Wait):
                    self._depart_if_told(todo)
                    self._abandon_if_over()
                    self._idle()
                    if todo.why == "rows":
                        wait_for_rows(self, self.donor)
                    else:
                        self.spare.idle(self.patience(Phase.CONNECT))
                elif isinstance(todo, Follow):
                    self.spare.follow()
                elif isinstance(todo, Form):
                    self._form(todo.view)
                else:
                    self._hand_over(todo)
            except ViewAbandoned as reason:
                self.abandon(reason)

    def _idle(self) -> None:
        """Waiting for somebody's word is nobody's silence."""
        if self.clock.phase not in (Phase.IDLE, Phase.DEPART):
            self.enter(Phase.IDLE)

    def _raise_if_refused(self) -> None:
        told = self.member.evicted
        if told is None:
            return
        where = f"replica {self.env.me}"
        if told.remedy == "facts":
            raise SignatureMismatch(
                f"this replica differs from its run: {told.reason}",
                where=where,
                did="it was refused; the run goes on",
                remedy="start every replica with the same script, data and environment, or bitwise = false; put a file "
                "that was changed back, or stop the run and start it again: it resumes",
            )
        raise Evicted(told.reason, where=where, did="the run went on without it", remedy="outlast why says more")

    def _depart_if_told(self, todo: Wait) -> None:
        if todo.why == "departed" and not self._departed:
            self._departed = True
            self.enter(Phase.DEPART)
            self._close_view()  # it ends as planned: nothing to report, the view after it is not to be disturbed
            self.donor.close()  # a joiner admitted by the same view waits for the last word

    def _abandon_if_over(self) -> None:
        if self.mesh is not None and self.member.over(self.mesh.view.id):
            self.abandon(ViewAbandoned("told to leave"))

    def abandon(self, reason: ViewAbandoned) -> None:
        """Leave the view: peers hear a goodbye, the coordinator hears why unless it already knows."""
        now = time.monotonic()
        self.clock.interrupted()
        if not self._left_at_s:
            self._left_at_s = now
        self.enter(Phase.LEAVE)
        suspects = reason.suspects if isinstance(reason, PeersLost) else ()
        with self.lock:
            answers = self.member.lost(suspects, str(reason.message), now)
        self.link.send(answers)
        self._close_view()

    def _close_view(self) -> None:
        if self.mesh is not None:
            self.siblings.drop()
        if self.plane is not None:
            self.plane.close()
        if self.mesh is not None:
            self.mesh.close()
        self.plane = self.mesh = None

    # --- a new view ----------------------------------------------------------------------------------------------
    def _form(self, view: View) -> None:
        self._close_view()
        if not self._left_at_s and not view.start:
            self._left_at_s = time.monotonic()
        self.donor.flush(view)
        self.spare.drain(view)
        if view.start:
            begun = self.siblings.begin_run(view)
            begin(self.env, self.engine, view, self.saves)
            begun(self.member.committed)
        self.enter(Phase.CONNECT)
        self.mesh = Mesh(
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
        self.mesh.waits = self.pace.parts.waits
        self.mesh.form()
        self._remember_peers(view)
        self.enter(Phase.ROLL_CALL)
        # Where a step follows, states are compared while it computes.
        at_once = view.start or self.member.committed >= (self.member.until or math.inf)
        joined = self.engine.late is not None
        fingerprint = self.engine.fingerprint() if at_once and not joined else 0
        if self.siblings.some:  # later its ranks may have ended, as their lead is about to
            whole = view.start
            fingerprint = combine([fingerprint, *self.siblings.fingerprints(self.mesh)]) if whole else 0
        with self.lock:
            entry = self.member.roll(fingerprint, self.engine.outcome(), late=self.spare.late, joined=joined)
        entries = [roll.entry for roll in self.everyone(Roll(entry), Phase.ROLL_CALL).values()]
        compare_roll(self, self.guards, view, entries, self.engine.parts)
        self._entries = entries
        with self.lock:
            answers = self.member.called(entries, time.monotonic())
            self.engine.sums.keep(sorted(self.member.held))
            formed = self.member.formed
            plan = None if answers else self.member.standing()[1]
        if plan is None:
            self.link.send(answers)
            self._close_view()
            return
        self.plane = self.disguise(self._make_plane(self.mesh))
        if formed:
            self._formed(view, plan)

    def _make_plane(self, mesh: Mesh) -> Plane:
        """The lane of this rank; and the replica's others, where it has more than one."""
        if not self.siblings.some:
            return make_plane(self, self.engine, mesh, self.memories, self._store)
        lanes = self.on(LANES, -1, self.siblings.addresses, Phase.ROLL_CALL)
        self.siblings.form(mesh.view, lanes, sorted(self.member.held))
        own = make_plane(self, self.engine, mesh, self.memories, self._store)
        return LanedPlane(own, self.siblings, self.engine, mesh)

    def _own_ranks_stalled(self, waited_s: float) -> None:
        """This replica's lanes are not complete yet: have its own ranks looked at as well."""
        self._stalled(self.clock.phase, (self.env.me,), waited_s)

    def _over(self, view: View) -> bool:
        mesh = self.mesh
        if mesh is not None and mesh.ping_wanted:
            ping(self, mesh)
        return self.member.over(view.id) or self.member.evicted is not None or self.member.closed is not None

    def _stalled(self, phase: Phase, missing: tuple[str, ...], waited_s: float) -> None:
        stalled(self, phase, missing, waited_s, self.patience(phase))

    def _remember_peers(self, view: View) -> None:
        for name, region in self.listener.regions.items():
            if name not in self.memories:
                self.memories[name] = Memory(self.engine.layout, self.engine.memory.num_slots, region)

    def _hand_over(self, todo: HandOver) -> None:
        assert self.plane is not None
        with self.lock:
            view, _ = self.member.standing()
        if todo.donor == self.env.me:
            self.enter(Phase.HAND_OVER_SEND)
            joined = any(entry.joined for entry in self._entries if entry.member in todo.behind)
            self.siblings.joined = joined
            self.plane.give(todo.step, self.engine.told(joined=joined), todo.behind)
        elif self.env.me in todo.behind:
            self.enter(Phase.HAND_OVER_RECEIVE)
            joined = self.engine.late is not None
            self.engine.settle(self.enter)
            meta = self.engine.heard(self.plane.take(todo.step, todo.donor))
            if not joined:
                self.engine.live(self.enter)
            self.pace.record(meta.step, meta.loss)
            self.pace.formed(self._left_at_s, 0.0)
            self.pace.committed(meta.step, len(self.mesh.view.members) if self.mesh is not None else 1)
        with self.lock:
            self.member.handed_over()
            view, plan = self.member.standing()
        self._formed(view, plan)

    def _formed(self, view: View, plan: StepPlan) -> None:
        """The view works: tell the coordinator, feed the spares, expect my share of the data."""
        now = time.monotonic()
        recomputed = 0
        if self.last_plan is not None and self.last_plan.step == plan.step:
            dead = [name for name in self.last_plan.leaves if name not in view.members]
            lost = {leaf for name in dead for leaf in self.last_plan.leaves[name]}
            recomputed = len(lost.intersection(leaf for part in plan.orphans.values() for leaf in part))
        formed = m.Formed(
            member=self.env.me,
            view=view.id,
            step=plan.step,
            recomputed=recomputed,
            left_at_s=self._left_at_s,
            formed_at_s=now,
        )
        self.link.send([formed])
        self.pace.formed(self._left_at_s, recomputed / self.engine.num_leaves)
        self._left_at_s = 0.0
        self.last_plan = plan
        self.comparison, self._compared = None, view.start
        if view.start:  # they were compared in the roll call
            self.member.audits.compared(plan.step)
        if self.engine.robust is not None:
            admit(self, self.engine.robust, view, plan)
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
        return list(plan_of(view.members, 0, self.engine.num_leaves, self.engine.num_rows).leaves[self.env.me])

    # --- before a step (`step.py`), and after the last -----------------------------------------------------------
    def begun(self, step: int) -> None:
        """The loop is inside the step, as all members' loops are or will be: what it made of the state until here is
        the step's. In a view's first one states are compared from here on."""
        self.engine.begun(step)
        if not self._compared and self.member.view is not None:
            self._compared = True
            self.engine.restore_buffers()
            self.comparison = Comparison(self._entries, self.engine.state, self.engine.moving)
            self.engine.frozen.append(self.comparison)

    def finish(self, todo: Leave) -> None:
        """The closing barrier: everybody committed the last step."""
        if self.mesh is None:
            raise ViewAbandoned("the view is closed")
        if self.saves is not None:
            self.saves.last()
        self.enter(Phase.FINAL)
        self.mesh.broadcast(Final(self.member.committed))
        self.mesh.collect(Final, self.member.committed, 0, Phase.FINAL)
        if self.saves is not None:
            self.enter(Phase.IDLE)
            self.saves.settle_last(todo.view.id, lambda: self._over(todo.view))
            self.saves.check_end()
        self.pace.parts.tell()
        with self.lock:
            answers = self.member.finished()
        self.link.beat()
        self.link.send(answers)

    def _stop_after(self, steps: int) -> None:
        """Some member's loop has asked that training ends: all have it from the same step's outcome."""
        with self.lock:
            self.member.until = min(steps, self.member.until or steps)

    def leave_early(self) -> None:
        """The loop ends before `until`: every replica must end at the same step."""
        with self.lock:
            self.member.until = self.member.committed
        while (todo := self.resume()) is not None:
            if not isinstance(todo, Leave):
                raise StepMisuse("the loop ended while others train on", where=f"replica {self.env.me}")
            self.close_barrier(todo)

    def close_barrier(self, todo: Leave) -> None:
        """`finish`, in this view or after the next one has formed."""
        try:
            self.finish(todo)
        except ViewAbandoned as reason:
            self.abandon(reason)

    def retire(self) -> None:
        """Training is over for this replica: keep nothing but the link to the coordinator."""
        if self._retired:
            return
        self._retired = True
        if not self._departed:  # else the agent reads from the phase that it left as planned
            self.progress.enter(Phase.IDLE)
        self.donor.close()
        self._close_view()
        if self.saves is not None:
            self.saves.close()
        self.link.forget_saves()
        self.siblings.end(self.member.done)
        self.spare.close()
        self.listener.close()

    def close(self) -> None:
        """Leave nothing behind."""
        self.retire()
        self.link.close()
