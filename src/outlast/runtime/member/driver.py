"""One member of a run: carries out what `core/protocol.Member` decides, over real sockets.

`resume()` forms views, calls rolls, hands outcomes over and follows as a spare until there is a microbatch to compute
or a step to exchange; `exchange()` takes a step to its commit. Every wait ends on an event: a peer's frame, the
coordinator's word, or a deadline. An exception between verdict and commit leaves this object unusable (rule 12).
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from outlast.core.phases import OWNED, Phase
from outlast.core.policy import Culprit, Ruling
from outlast.core.policy._deadline import Durations, deadline
from outlast.core.protocol import (
    Compute,
    Exchange,
    Follow,
    Form,
    HandOver,
    Leave,
    Member,
    Plan,
    RollEntry,
    View,
    Wait,
    cover,
    plan_of,
)
from outlast.core.protocol import messages as m
from outlast.errors import Evicted, SignatureMismatch, StepMisuse, ViewAbandoned
from outlast.runtime.checks.loop_habits import compare_settings
from outlast.runtime.checks.row_admission import admit, examine, wait_for_rows
from outlast.runtime.checks.state_comparison import Comparison, compare
from outlast.runtime.checks.verdict_round import confer, expel, report
from outlast.runtime.exchange.plane import Plane, Reduction, Task
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.host.environment import Environment
from outlast.runtime.joining.donor import Donor
from outlast.runtime.joining.joiner import Spare
from outlast.runtime.member._heartbeat import Pace, ping, stalled
from outlast.runtime.member._plane_choice import make_plane
from outlast.runtime.member.link import MemberLink, SoloLink
from outlast.runtime.saving.resume import begin
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.run_facts import device_name
from outlast.runtime.training.script_files import script_files
from outlast.runtime.transport.connections import Listener, PeersLost
from outlast.runtime.transport.frames import Heartbeat
from outlast.runtime.transport.mesh import Final, Head, Mesh, Roll

if TYPE_CHECKING:
    from outlast.runtime.checks.audits import Auditing
    from outlast.runtime.saving.member_saves import Saves

__all__ = ["Replica"]


class Replica:
    """See the module."""

    def __init__(self, env: Environment, engine: Engine, facts: dict[str, str]) -> None:
        self.env, self.engine, self.facts = env, engine, facts
        self._files = script_files() if env.coordinator is not None else {}
        self.device = device_name(engine.layout.device)
        self.member = Member(env.me, engine.num_leaves, num_rows=engine.num_rows)
        self.lock = threading.RLock()
        self.probe, self.progress = env.probe, env.progress
        self._store: Any = None
        if env.exchange == "c10d" and engine.layout.device.type == "cuda":
            from outlast.runtime.exchange.c10d_plane import open_store

            self._store, env.store = open_store()
        self.listener = Listener(env.run_id, env.me, env.secret, alone=env.coordinator is None)
        self.link = self._make_link()
        self.spare = Spare(env, engine, self.link, self.member, self.lock, self.enter, self.listener.feeds)
        self.mesh: Mesh | None = None
        self.plane: Plane | None = None
        self.memories: dict[str, Memory] = {}
        self.donor = Donor(env, engine, self.member, self.enter)
        self.durations: dict[Phase, Durations] = defaultdict(Durations)
        self._phase, self._since_ns = Phase.IDLE, 0
        self._left_at_s = 0.0
        self._last_plan: Plan | None = None
        self._entries: list[RollEntry] = []
        self.comparison: Comparison | None = None  # of states, in a view's first step
        self._compared = True
        self.heads: tuple[list[Any], tuple[bytes, ...]] | None = None  # complete headers of a step not yet concluded
        self.findings: list[Culprit] = []  # what I found when I looked closer
        self.pace = Pace(env.progress, env.config.replicas if env.coordinator is not None else 1)
        self.spare.applied = self.pace.replayed
        self._departed = self._retired = False
        self.saves: Saves | None = None  # the run's checkpoints, if it keeps any

    def _make_link(self) -> MemberLink | SoloLink:
        env = self.env
        if env.coordinator is not None and env.config.lease_s < math.inf:
            self.member.lease_until_s = 0.0  # until the first heartbeat was answered
        if env.coordinator is None:
            return SoloLink(self.member, self.lock)
        return MemberLink(
            env.coordinator, env.secret, self.member, self.lock, hello=self._hello, beat=self._beat, asked=self._asked,
            heartbeat_s=env.config.heartbeat_s, lease_s=env.config.lease_s,
        )  # fmt: skip

    # --- what others see -----------------------------------------------------------------------------------------
    def enter(self, phase: Phase, microbatch: int = -1, bucket: int = -1) -> None:
        """Publish where I am, learn how long the last phase took, and pass the fault point."""
        step = self.member.committed
        allowed = deadline(self.durations[phase], self.env.config.stall_floor_s) if phase in OWNED else 0.0
        now = self.progress.enter(phase, step, microbatch, bucket, 0.0 if allowed == float("inf") else allowed)
        if self._since_ns:
            took_s = (now - self._since_ns) / 1e9
            self.durations[self._phase].observe(took_s)
            self.pace.passed(self._phase, took_s)
        self._phase, self._since_ns = phase, now
        if self.probe.faults:
            self.probe(phase, step, microbatch, bucket)

    def patience(self, phase: Phase) -> float:
        # Half: who hangs in a group that forms is to be found before the coordinator tries another group with it.
        return min(deadline(self.durations[phase], self.env.config.stall_floor_s), self.env.config.formation_s / 2)

    def _hello(self) -> m.Hello:
        facts = self.facts | self._files
        return self.member.hello(self.env.agent, facts, self.listener.address, self.env.store, self.device)

    def _beat(self, again: bool = False) -> Heartbeat:
        with self.lock:
            view = self.member.view
            return Heartbeat(
                sender=self.env.me, sent_s=time.monotonic(), view=(view.id.epoch, view.id.n) if view else (0, 0),
                committed=self.member.committed, stable=self.member.stable, losses=self.pace.take(),
                step_s=self.pace.step_s, until=self.member.until or 0, sent_messages=self.link.sent,
                certified=self.member.audits.certificate, steps=self.pace.steps(again), refused=self.listener.refused,
            )  # fmt: skip

    def _asked(self, probe: m.Probe) -> None:
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
                        wait_for_rows(self)
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
        if self._phase not in (Phase.IDLE, Phase.DEPART):
            self.enter(Phase.IDLE)

    def _raise_if_refused(self) -> None:
        told = self.member.evicted
        if told is None:
            return
        where = f"replica {self.env.me}"
        if told.remedy == "facts":
            raise SignatureMismatch(
                f"this replica differs from its run: {told.reason}", where=where, did="it was refused; the run goes on",
                remedy="start every replica with the same script, data and environment, or bitwise = false; put a file "
                "that was changed back, or stop the run and start it again: it resumes",
            )  # fmt: skip
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
        self._since_ns = 0  # an interrupted wait teaches no deadline
        if not self._left_at_s:
            self._left_at_s = now
        self.enter(Phase.LEAVE)
        suspects = reason.suspects if isinstance(reason, PeersLost) else ()
        with self.lock:
            answers = self.member.lost(suspects, str(reason.message), now)
        self.link.send(answers)
        self._close_view()

    def _close_view(self) -> None:
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
        self.spare.drain(view.id)
        if view.start:
            begin(self)
        self.enter(Phase.CONNECT)
        self.mesh = Mesh(
            self.listener, view, dict(self.member.contacts), self.engine.memory.region, wake_fd=self.link.wake_fd,
            abandoned=lambda: self._over(view), patience=self.patience,
            on_stall=functools.partial(stalled, self), probe=self.probe,
        )  # fmt: skip
        self.mesh.form()
        self._remember_peers(view)
        self.enter(Phase.ROLL_CALL)
        # Where a step follows, states are compared while it computes.
        at_once = view.start or self.member.committed >= (self.member.until or math.inf)
        joined = self.engine.late is not None
        fingerprint = self.engine.fingerprint() if at_once and not joined else 0
        with self.lock:
            entry = self.member.roll(fingerprint, self.engine.outcome(), late=self.spare.late, joined=joined)
        self.mesh.broadcast(Roll(entry))
        rolls = self.mesh.collect(Roll, -1, 0, Phase.ROLL_CALL)
        entries = [entry if name == self.env.me else rolls[name].entry for name in view.members]
        compare(self.mesh, view, entries, self.engine.parts, functools.partial(expel, self))
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
        self.plane = make_plane(self, self.mesh)
        if formed:
            self._formed(view, plan)

    def _over(self, view: View) -> bool:
        mesh = self.mesh
        if mesh is not None and mesh.ping_wanted:
            ping(self, mesh)
        return self.member.over(view.id) or self.member.evicted is not None or self.member.closed is not None

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

    def _formed(self, view: View, plan: Plan) -> None:
        """The view works: tell the coordinator, feed the spares, expect my share of the data."""
        now = time.monotonic()
        recomputed = 0
        if self._last_plan is not None and self._last_plan.step == plan.step:
            dead = [name for name in self._last_plan.leaves if name not in view.members]
            lost = {leaf for name in dead for leaf in self._last_plan.leaves[name]}
            recomputed = len(lost.intersection(leaf for part in plan.orphans.values() for leaf in part))
        formed = m.Formed(
            member=self.env.me, view=view.id, step=plan.step, recomputed=recomputed, left_at_s=self._left_at_s,
            formed_at_s=now,
        )  # fmt: skip
        self.link.send([formed])
        self.pace.formed(self._left_at_s, recomputed / self.engine.num_leaves)
        self._left_at_s = 0.0
        self._last_plan = plan
        self.comparison, self._compared = None, view.start
        if view.start:  # they were compared in the roll call
            self.member.audits.compared(plan.step)
        if self.engine.robust is not None:
            admit(self, view, plan)
        self.donor.formed(view)
        first, share = list(plan.orphans[self.env.me]), self._standard_share(view)
        self.engine.samples.expect(lambda step: first if step == plan.step else share, self.member.committed)
        config = self.env.config
        awaited = bool(config.spares) or (bool(config.max_restarts) and len(view.members) < config.replicas)
        self.engine.expect_joiners(view.members.index(self.env.me), len(view.members) if awaited else 0)

    def _standard_share(self, view: View) -> list[int]:
        return list(plan_of(view.members, 0, self.engine.num_leaves, self.engine.num_rows).leaves[self.env.me])

    # --- a step --------------------------------------------------------------------------------------------------
    def begun(self, step: int) -> None:
        """The loop is inside the step, as all members' loops are or will be: what it made of the state until here is
        the step's. In a view's first one states are compared from here on."""
        self.engine.begun(step)
        if not self._compared and self.member.view is not None:
            self._compared = True
            self.comparison = self.engine.compare(self.member.view, self._entries)

    def task(self, todo: Exchange | None = None) -> Task:
        """The exchange of the current step, perhaps before the last microbatch. ViewAbandoned if the view is over."""
        with self.lock:
            view, plan = self.member.standing()
        nodes = tuple(cover(plan.leaves[n], self.engine.num_leaves, self.engine.num_rows) for n in view.members)
        slots = self.engine.sums.slots if todo is not None else self.engine.sums.after()
        mine = nodes[view.members.index(self.env.me)]
        return Task(
            step=self.member.committed, nodes=nodes, slots=tuple(slots[node] for node in mine),
            num_leaves=self.engine.num_leaves, scale=self.engine.scale(self.member.committed),
            with_norms=self.engine.with_norms, on_scattered=self._scattered,
            sent=self.engine.sums.sent if self.engine.sums.printing and self.engine.robust is None else None,
            checks=self.engine.checks,
            on_reduced=self.engine.corruption.after_reduction if self.engine.corruption is not None else None,
        )  # fmt: skip

    def _scattered(self) -> None:
        with self.lock:
            self.member.scattered()
        if self.saves is not None and self.mesh is not None:
            self.saves.stable(self.mesh.view.id, self.member.stable)

    def exchange(self, todo: Exchange, begun: bool) -> Reduction:
        """The step's gradients, reduced and gathered. Raises ViewAbandoned if the view ends first."""
        plane, mesh = self.plane, self.mesh
        if plane is None or mesh is None:
            raise ViewAbandoned("the view is closed")
        if not begun:
            plane.begin(self.task(todo))
            for bucket in range(len(self.engine.layout.buckets)):
                plane.offer(bucket)
        return plane.finish()

    def collect_heads(self, todo: Exchange, found: Reduction, auditing: Auditing) -> None:
        """Everybody's header (`conclude` follows). ViewAbandoned if the view ends or an audit holds it."""
        plan, plane, mesh = self.member.plan, self.plane, self.mesh
        if plan is None or plane is None or mesh is None:
            raise ViewAbandoned("the view is closed")
        evidence = self.engine.evidence(plan.leaves[self.env.me], found.norms, found.fingerprint)
        with self.lock:
            save = self.saves.vote(todo.step) if self.saves is not None else 0
            header = self.member.header(
                **evidence,
                state=self.comparison.told() if self.comparison is not None else self.engine.sample(todo.step),
                settings=self.engine.loop.digest(self.engine.loop.settings),
                guard=self.engine.guards.note(todo.step),
                save=save,
                audit=auditing.evidence(found),
            )
        self.enter(Phase.HEADER)
        mesh.broadcast(Head(header, self.engine.end_buffers))
        heads = mesh.collect(Head, todo.step, 0, Phase.HEADER)
        headers = [header if name == self.env.me else heads[name].header for name in todo.view.members]
        compare_settings(mesh, headers, self.engine.loop)
        if self.comparison is not None:
            self.comparison.judge(mesh, headers, self.engine.parts, functools.partial(expel, self))
            self.comparison = None
            self.member.audits.compared(todo.step)
        auditing.judge(headers)
        if self.engine.robust is not None:
            examine(self, plane, headers)
        buffers = next((b for b in (self.engine.end_buffers, *(h.buffers for h in heads.values())) if b), ())
        self.heads = headers, buffers

    def conclude(self, todo: Exchange) -> None:
        """From complete headers to the commit. Raises ViewAbandoned if the view ends before the step is decided."""
        if self.mesh is None or self.heads is None:
            raise ViewAbandoned("the view is closed")
        (headers, buffers), self.heads = self.heads, None
        ruling = confer(self, self.mesh, headers)
        with self.lock:
            self.member.decide(headers, time.monotonic())
        self._apply(todo, headers, buffers, ruling)
        report(self, ruling)
        self.pace.committed(todo.step, len(todo.view.members), self.saves.held_s if self.saves is not None else 0.0)
        if self.pace.resumed:  # how long nobody trained is known now
            self.link.beat()

    def _apply(self, todo: Exchange, headers: list[Any], buffers: tuple[bytes, ...], ruling: Ruling | None) -> None:
        """From the verdict to the commit (rule 12)."""
        self.enter(Phase.VERDICT)
        meta = self.engine.conclude(headers, buffers, ruling)
        early = self.engine.robust is None  # a joiner then applies the outcome while I do: the next view waits for it
        if early:
            self.donor.feed(todo.view, meta)
        self.engine.apply(meta, self.enter)
        with self.lock:
            due = self.member.commit()
        if self.saves is not None:
            self.saves.decided(todo.view, self.member.committed, [header.save for header in headers])
        self.enter(Phase.COMMIT)
        self.pace.record(meta.step, meta.loss)
        self._last_plan = self.member.plan or self._last_plan
        if not early:
            self.donor.feed(todo.view, meta)
        for order in due:
            self.donor.carry_out(order, todo.view)

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
        with self.lock:
            answers = self.member.finished()
        self.link.beat()
        self.link.send(answers)

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
        self.spare.close()
        self.listener.close()

    def close(self) -> None:
        """Leave nothing behind."""
        self.retire()
        self.link.close()
