"""One step of a member, on one page and in order: from its first microbatch to the commit.

    microbatches      mine, and orphans of the dead; each folded into partial sums, the last one's buckets offered
    exchange          all-to-all, reduce my slices, all-gather
    audits            fingerprints of what second replicas computed, drawn after everybody has committed to its own
    headers           one round: losses, norms, fingerprints, votes; states and slices are compared by them
    a closer look     only where the headers show something that cannot be right
    verdict           the same on every member; whoever is to go is gone by now
    outcome           to joiners, to the optimizer, into the protocol's state

Every wait in here ends with ViewAbandoned when the view does, up to the verdict; sums survive it, and the step goes on
in the next view. An exception between verdict and commit leaves the process unusable (rule 12). What comes before a
step (views, rolls, hand-overs) is `driver.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.policy import Ruling
from outlast.core.protocol import Compute, Exchange, Header, Node, Said, View, cover
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.deciding import decide_step
from outlast.core.protocol.step.verdict import RowEvidence, StepEvidence
from outlast.errors import ViewAbandoned
from outlast.runtime.checks.audits import Auditing
from outlast.runtime.checks.checked_sums import watched
from outlast.runtime.checks.entrance import Entrance
from outlast.runtime.checks.inspection import Inspection
from outlast.runtime.checks.loop_habits import compare_settings
from outlast.runtime.checks.reproducibility import Repeat
from outlast.runtime.checks.state_comparison import diverged
from outlast.runtime.exchange.plane import ExchangeTask, Plane, Reduction
from outlast.runtime.member.driver import Replica
from outlast.runtime.training.losses import missing_backward, second_backward
from outlast.runtime.training.metrics import metric_outside
from outlast.runtime.training.samples import skipped
from outlast.runtime.transport.peer_messages import HeaderSaid
from outlast.runtime.transport.rank_words import LaneTask
from outlast.runtime.view.courses import Acts, go_through, seat_of

__all__ = ["StepCourse"]


class StepCourse:
    """The steps of one replica. `audit`, `critical`: as of `Auditing`."""

    def __init__(self, replica: Replica, audit: float | str = 0.0, critical: Sequence[str] = ()) -> None:
        self.replica, self.engine, guards = replica, replica.engine, replica.guards
        self.repeat = Repeat(replica, self.engine, guards.others)
        self.audit = Auditing(replica, self.engine, guards, lambda: replica.pace.step_s, audit, critical)
        self.inspection = Inspection(replica, self.engine, guards, guards.others)
        self.entrance = Entrance(replica.env, self.engine, self._prepared)
        self._begun: Plane | None = None  # the view's plane in which the current step's exchange has begun
        self._current: Compute | None = None
        self._loss: float | None = None
        self._exchanged_s = 0.0  # under the backward of the microbatch under way: no part of how fast this one computes

    # --- microbatches --------------------------------------------------------------------------------------------
    def batches(self, step: int, closed: Callable[[], None]) -> Iterator[Any]:
        """Batches until the step is committed, each to see one backward. `closed`: the run is over for this replica; it
        raises."""
        yield from self._batches(step, closed)
        self.replica.siblings.end_step(step)

    def _batches(self, step: int, closed: Callable[[], None]) -> Iterator[Any]:
        replica, engine = self.replica, self.engine
        if step == 0:
            yield from self.repeat.batches(self.repeat.rounds(computed=False))
        while True:
            if engine.late is not None and engine.late.step == step:
                if not replica.siblings.some:  # a forward of one rank alone would wait for the others
                    yield from self.entrance.batches()
                replica.spare.live()
            if replica.member.committed != step:
                return
            todo = replica.resume()
            if todo is None:
                closed()
            if replica.member.committed != step:
                continue
            replica.begun(step)
            if isinstance(todo, Compute):
                if engine.is_empty(step, todo.microbatch):
                    engine.skip(step, todo.microbatch)
                    self._computed(todo)
                    continue
                yield from self._one(todo)
            elif isinstance(todo, Exchange):
                if step == 0:
                    yield from self.repeat.batches(self.repeat.rounds(computed=True))
                yield from self._exchange(todo)

    def _one(self, todo: Compute) -> Iterator[Any]:
        replica = self.replica
        if todo.orphan:
            replica.enter(Phase.RECOMPUTE, todo.microbatch)
        replica.siblings.compute(todo.step, todo.microbatch, self._ahead(todo), printing=self.engine.sums.printing)
        began_s, self._exchanged_s = time.monotonic(), 0.0
        batch = self._prepared(todo.step, todo.microbatch)
        self._current, self._loss = todo, None
        self.engine.metrics.begin(self.engine.mine(todo.microbatch))
        with watched(replica, self.engine, todo.step, todo.microbatch):
            yield batch
        if self._loss is None:
            raise missing_backward(todo.step, todo.microbatch)
        replica.pace.parts.computed(time.monotonic() - began_s - self._exchanged_s)
        self._computed(todo)

    def _prepared(self, step: int, microbatch: int) -> Any:
        self.replica.enter(Phase.LOAD, microbatch)
        batch = self.engine.prepare(step, microbatch)
        self.replica.enter(Phase.BODY, microbatch)
        return batch

    def backward(self, loss: Tensor) -> None:
        """The loop's backward: of a check that is under way, else of the step's own microbatch."""
        beside = (self.repeat, self.audit, self.inspection, self.entrance)
        next((each.backward for each in beside if each.active), self._into_the_step)(loss)

    def metric(self, name: str, value: Any, weight: Any) -> None:
        """A number of the microbatch under way; of a check beside the step it is forgotten."""
        todo = self._current
        if any(each.active for each in (self.repeat, self.audit, self.inspection, self.entrance)):
            return
        if todo is None:
            raise metric_outside(name)
        share = self.engine.samples.sizes(todo.step)[self.engine.mine(todo.microbatch)] if weight is None else weight
        self.engine.metrics.put(self.engine.mine(todo.microbatch), name, value, share)

    def _into_the_step(self, loss: Tensor) -> None:
        todo, replica = self._current, self.replica
        if todo is None or self._loss is not None:
            raise second_backward()
        replica.enter(Phase.BACKWARD, todo.microbatch)
        self.engine.begin(todo.step, todo.microbatch, self._announcer(todo))
        self.engine.state.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
        replica.enter(Phase.MERGE, todo.microbatch)
        value = float(loss.detach())
        self.engine.end(todo.step, todo.microbatch, value)
        self._loss = value
        replica.enter(Phase.BODY, todo.microbatch)

    def _announcer(self, todo: Compute) -> Callable[[int], None] | None:
        """For the last microbatch before an exchange: offer each bucket as soon as it is folded. Never raises."""
        plane = self.replica.plane
        if plane is None or not self._is_last(todo):
            return None
        self._begun = plane
        trouble: list[ViewAbandoned] = []

        def announce(bucket: int) -> None:
            began_s = time.monotonic()
            if not trouble:
                try:
                    if bucket == 0:
                        plane.begin(self._task())
                    plane.offer(bucket)
                except ViewAbandoned as reason:  # recorded: acted on after the backward (13)
                    trouble.append(reason)
                if self.replica.siblings.some:  # what follows is FSDP's again, which may wait for the other ranks
                    self.replica.clock.enter(Phase.BACKWARD, todo.step, todo.microbatch)
            self._exchanged_s += time.monotonic() - began_s

        return announce

    def _is_last(self, todo: Compute) -> bool:
        """Whether an exchange follows, as far as the view that stands says."""
        replica = self.replica
        try:
            with replica.lock:
                _, plan = replica.member.standing()
                held = {leaf for lo, hi in replica.member.held for leaf in range(lo, hi)}
        except ViewAbandoned:
            return False
        mine = plan.leaves[replica.env.me]
        return mine[-1:] == (todo.microbatch,) and len(set(mine) - held) <= 1

    def _ahead(self, todo: Compute) -> LaneTask | None:
        """What this replica's other ranks begin under this microbatch's backward, as I do (`_announcer`)."""
        if not self.replica.siblings.some or self.replica.plane is None or not self._is_last(todo):
            return None
        try:
            engine = self.engine
            return LaneTask(todo.step, self._nodes()[1], engine.with_norms, engine.sums.printing)
        except ViewAbandoned:
            return None

    def _computed(self, todo: Compute) -> None:
        self.audit.computed(todo.microbatch)
        with self.replica.lock:
            self.replica.member.computed(todo.microbatch)
        self._current = None

    # --- from all microbatches to the commit ---------------------------------------------------------------------
    def _exchange(self, todo: Exchange) -> Iterator[Any]:
        """The order is that of `decide_step`; here is what each of its acts does, then the optimizer and the commit."""
        replica = self.replica
        begun, self._begun = self._begun, None
        deciding = _Deciding(self, todo, begun is not None and begun is replica.plane)
        acts: Acts = {
            "exchange": lambda _: deciding.exchange(),
            "audit": lambda act: self.audit.batches(todo.step, act.leaves),
            "look closer": lambda act: self._look_closer(act.headers),
        }
        try:
            self.repeat.conclude()
            self.engine.loop.check()
            self.audit.begin()
            course = decide_step(seat_of(replica), replica.guards, todo, deciding)
            headers, ruling = yield from go_through(replica, course, acts)
            self._apply(todo, headers, deciding.buffers, ruling)
            self._committed(todo, ruling)
            self.audit.report()
        except ViewAbandoned as reason:
            self.replica.abandon(reason)

    def _look_closer(self, headers: Sequence[Header]) -> Iterator[Any]:
        """Headers were compared as far as they can be without computing anything again."""
        replica = self.replica
        self.entrance.conclude()
        if replica.guards.suspects(headers):
            yield from self.inspection.batches(headers)
            replica.enter(Phase.HEADER)
        self.engine.samples.bad.judge(row for header in headers for row in header.bad)

    def reduced(self, todo: Exchange, begun: bool) -> Reduction:
        """The step's gradients, reduced and gathered; `begun`: under the last microbatch's backward."""
        plane = self.replica.plane
        if plane is None or self.replica.mesh is None:
            raise ViewAbandoned("the view is closed")
        if not begun:
            plane.begin(self._task(todo))
            for bucket in range(len(self.engine.layout.buckets)):
                plane.offer(bucket)
        return plane.finish()

    def _task(self, todo: Exchange | None = None) -> ExchangeTask:
        """The exchange of the current step, perhaps before the last microbatch. ViewAbandoned if the view is over."""
        replica, engine = self.replica, self.engine
        view, nodes = self._nodes()
        slots = engine.sums.slots if todo is not None else engine.sums.after()
        mine = nodes[view.members.index(replica.env.me)]
        flips = engine.step_checks.flips
        return ExchangeTask(
            step=replica.member.committed,
            nodes=nodes,
            slots=tuple(slots[node] for node in mine),
            num_leaves=engine.num_leaves,
            scale=engine.scale(replica.member.committed),
            with_norms=engine.with_norms,
            on_scattered=self._scattered,
            sent=engine.sums.sent if engine.sums.printing and engine.robust is None else None,
            checks=engine.checks,
            on_reduced=flips.after_reduction if flips.active else None,
        )

    def _nodes(self) -> tuple[View, tuple[tuple[Node, ...], ...]]:
        """The view, and each member's partial sums. ViewAbandoned if it is over."""
        engine = self.engine
        with self.replica.lock:
            view, plan = self.replica.member.standing()
        return view, tuple(cover(plan.leaves[n], engine.num_leaves, engine.num_rows) for n in view.members)

    def _scattered(self) -> None:
        """All have offered sums of this step: so all have committed the one before."""
        replica = self.replica
        with replica.lock:
            replica.member.scattered()
        if replica.saves is not None and replica.mesh is not None:
            replica.saves.stable(replica.mesh.view.id, replica.member.stable)

    def _apply(
        self, todo: Exchange, headers: Sequence[Header], buffers: tuple[bytes, ...], ruling: Ruling | None
    ) -> None:
        """From the verdict to the commit (rule 12)."""
        replica, engine = self.replica, self.engine
        replica.enter(Phase.VERDICT)
        meta = engine.conclude(headers, buffers, ruling)
        early = engine.robust is None  # a joiner then applies the outcome while I do: the next view waits for it
        feed = replica.donor.feeding(todo.view)
        replica.donor.keep(feed, meta)
        if early:
            replica.donor.feed(feed, meta)
        checks = engine.step_checks
        checks.tries = (checks.rehearsal or checks.averages) is not None and replica.member.is_last()
        replica.siblings.apply(meta, feed, tries=checks.tries)  # the commit point: every lane is complete (37)
        engine.apply(meta, replica.enter)
        with replica.lock:
            due = replica.member.commit()
        if replica.saves is not None:
            replica.saves.decided(todo.view, replica.member.committed, [header.save for header in headers])
        replica.enter(Phase.COMMIT)
        replica.pace.record(meta.step, meta.loss)
        replica.last_plan = replica.member.plan or replica.last_plan
        if not early:
            replica.donor.feed(feed, meta)
        for order in due:
            replica.donor.carry_out(order, todo.view)

    def _report_skipped(self) -> None:
        """Samples that everybody skips from here on; every member says so, and the first counts."""
        meta, samples = self.engine.meta, self.engine.samples
        if meta is not None and meta.bad:
            samples.tell(skipped(meta.step, meta.bad, samples.bad))

    def _committed(self, todo: Exchange, ruling: Ruling | None) -> None:
        """Tell what is worth telling, and how long the step took."""
        replica = self.replica
        if ruling is not None and ruling.verdict.evidence:  # every member tells it, and the first counts
            told = m.Judged(member=replica.env.me, step=ruling.evidence.step, verdict=ruling.verdict)
            replica.tell_coordinator([told])
        self._report_skipped()
        held_s = replica.saves.held_s if replica.saves is not None else 0.0
        replica.pace.committed(todo.step, len(todo.view.members), held_s)
        if replica.pace.resumed:  # how long nobody trained is known now
            replica.link.beat()


class _Deciding:
    """The step as `decide_step` asks for it. `buffers`: the module buffers after microbatch 0, once all have spoken."""

    def __init__(self, course: StepCourse, todo: Exchange, begun: bool) -> None:
        self.course, self.todo, self._begun = course, todo, begun
        self._found = Reduction()
        self.buffers: tuple[bytes, ...] = ()

    def exchange(self) -> None:
        self._found = self.course.reduced(self.todo, self._begun)

    def header(self) -> HeaderSaid:
        replica, engine, found, step = self.course.replica, self.course.engine, self._found, self.todo.step
        plan, comparison = replica.member.plan, replica.comparison
        if plan is None or replica.mesh is None:
            raise ViewAbandoned("the view is closed")
        evidence = engine.evidence(plan.leaves[replica.env.me], found.norms, found.fingerprint, found.others)
        with replica.lock:
            save = replica.saves.vote(step) if replica.saves is not None else 0
            header = replica.member.header(
                **evidence,
                state=replica.siblings.with_theirs(
                    comparison.told() if comparison is not None else replica.guards.agreement.fingerprint(step)
                ),
                settings=engine.loop.digest_of_all(compared=comparison is not None),
                guard=replica.guards.note(step, replica.siblings.notes),
                save=save,
                audit=self.course.audit.evidence(found),
            )
        replica.enter(Phase.HEADER)
        return HeaderSaid(header, engine.end_buffers)

    def heard(self, said: Mapping[str, HeaderSaid], commitments: Said | None) -> tuple[list[Header], StepEvidence]:
        replica, engine = self.course.replica, self.course.engine
        headers = [head.header for head in said.values()]
        compare_settings(replica, headers, engine.loop)
        comparison, replica.comparison = replica.comparison, None
        plane = replica.plane
        if plane is None:
            raise ViewAbandoned("the view is closed")
        self.buffers = next((b for b in (engine.end_buffers, *(head.buffers for head in said.values())) if b), ())
        return headers, StepEvidence(
            view=self.todo.view,
            parts=replica.parts,
            diverged=diverged,
            entries=comparison.entries if comparison is not None else None,
            said=commitments,
            look_again=plane.look_again,
            rows=cast(RowEvidence, plane) if engine.robust is not None else None,  # as every plane of rules is
            culprits=self.course.inspection.taken,
        )
