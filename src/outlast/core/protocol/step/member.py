"""A member's side of the protocol: what to do next, and when a step may be decided.

Two callers share it (the driver holds a lock): the link to the coordinator calls `told`, `lost` and `renewed` at any
moment; the training thread asks `next()` and reports what came of it. Nothing here computes, sends or waits, so the
same object runs over sockets and under the adversary. Numbers in comments are those of docs/explanation/rules.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outlast.core.protocol import messages as m
from outlast.core.protocol.disputes import Commitment
from outlast.core.protocol.step._link_half import LinkHalf
from outlast.core.protocol.step.roll import plan_of, resolve
from outlast.core.protocol.step.todo import Compute, Exchange, Follow, Form, HandOver, Leave, Todo, Wait
from outlast.core.protocol.tree import Node, cover, parent
from outlast.core.protocol.types import Header, Order, RollEntry, StepPlan, View
from outlast.errors import ProtocolViolation, ViewAbandoned

__all__ = ["Member", "Merge"]


Merge = tuple[Node, Node, Node]  # left and right child, and their parent


class Member(LinkHalf):
    """Decides what a member does next, and when a step is decided. `until`: steps after which this member is done; None
    while unknown."""

    # --- the training thread -------------------------------------------------------------------------------------
    def next(self, now_s: float = 0.0) -> Todo:
        """What to do next. What the caller then reports belongs to this view; if another was installed meanwhile the
        report raises ViewAbandoned."""
        view = self.view
        self._at = view.id if view is not None else None
        if view is None:
            return Wait(why="no view") if self.state == "fresh" else Follow()
        if self.over(view.id):
            return Wait(why="left")
        if self.me not in view.members:
            return Wait(why="departed")
        if not self.formed:
            plan = self.plan
            if plan is None or not plan.behind:
                return Form(view=view)
            assert plan.donor is not None
            self._handing = HandOver(step=plan.step - 1, donor=plan.donor, behind=plan.behind)
            return self._handing
        if self.until is not None and self.committed >= self.until:
            return Wait(why="done") if self.done else Leave(view=view)
        if now_s > self.lease_until_s:
            return Wait(why="lease")
        if self.held_back:
            return Wait(why="held back")
        return self._next_of_step(view)

    def _next_of_step(self, view: View) -> Todo:
        assert self.plan is not None
        have = {leaf for lo, hi in self.held for leaf in range(lo, hi)}
        orphan = self.plan.orphans != self.plan.leaves
        for leaf in self.plan.leaves[self.me]:
            if leaf not in have:
                return Compute(step=self.committed, microbatch=leaf, orphan=orphan)
        nodes = tuple(cover(self.plan.leaves[name], self.num_microbatches, self.num_rows) for name in view.members)
        return Exchange(step=self.committed, view=view, nodes=nodes)

    def roll(self, fingerprint: int, outcome: int, *, late: bool = False, joined: bool = False) -> RollEntry:
        """What I say in the roll call (5). `late`: see `replayed`; `joined`: not yet a member like the others."""
        view = self._acting()
        return RollEntry(
            member=self.me,
            view=view.id,
            committed=self.committed,
            held=tuple(sorted(self.held)),
            keeps_output=self.keeps_output,
            fingerprint=fingerprint,
            outcome=outcome,
            audit=self.audits.stand(self.plan, self.committed),
            late=late,
            joined=joined,
            copied=self.copied,
        )

    def called(self, entries: Sequence[RollEntry], now_s: float = 0.0) -> list[m.ToCoordinator]:
        """The roll is complete: take the plan that follows from it. A stale member ends the view."""
        view = self._acting()
        if [entry.member for entry in entries] != list(view.members) or any(e.view != view.id for e in entries):
            raise ProtocolViolation(f"roll call of view {view.id} answered by {[e.member for e in entries]}")
        plan = resolve(self.audits.sound(entries), self.num_microbatches, self.num_rows, view.work, self.places())
        if plan.stale:
            self.left = view.id
            return [m.Left(member=self.me, view=view.id, cause="stale member", stale=plan.stale, at_s=now_s)]
        self.plan = plan
        self.audits.called(entries)
        if self.me not in plan.behind:
            self._keep_only(plan)
        if not plan.behind:
            self.formed = True
        return []

    def _keep_only(self, plan: StepPlan) -> None:
        if self.audits.drop_unsound():
            self.held.clear()
        mine = set(plan.leaves[self.me])
        self.held = {n for n in self.held if mine.issuperset(range(*n)) and self.audits.keeps(n, plan)}

    def handed_over(self) -> None:
        """The hand-over of step plan.step - 1 is complete here: given, applied, or not my business (12).

        What was applied stays applied though the view be over; that is said by ViewAbandoned, after it was noted.
        """
        todo, self._handing = self._handing, None
        if todo is None:
            raise ProtocolViolation("a hand-over ended that was not begun")
        if self.me in todo.behind:
            self._advance()
        self._acting()
        self.formed = True

    def computed(self, leaf: int) -> list[Merge]:
        """The microbatch's gradient is held; returns the additions to carry out, in order."""
        node: Node = (leaf, leaf + 1)
        if any(lo <= leaf < hi for lo, hi in self.held):
            raise ProtocolViolation(f"microbatch {leaf} of step {self.committed} was computed twice")
        merges: list[Merge] = []
        while (up := parent(node, self.num_microbatches, self.num_rows)) is not None and up[1] in self.held:
            self.held.discard(up[1])
            merges.append((min(node, up[1]), max(node, up[1]), up[0]))
            node = up[0]
        self.held.add(node)
        return merges

    def scattered(self) -> None:
        """Everybody's sums of some bucket arrived: all members of this view committed the step before (10, 11)."""
        self._acting()
        self.stable = max(self.stable, self.committed)
        self.keeps_output = False

    def header(self, **evidence: Any) -> Header:
        """My header for this step."""
        view = self._acting()
        return Header(member=self.me, step=self.committed, view=view.id, heard=self.heard, **evidence)

    def audit(self, headers: Sequence[Header], said: Mapping[str, Commitment]) -> None:
        """Before `decide`: a mismatch holds the step. Raises ViewAbandoned, on every member alike (25, 26)."""
        view, plan = self.standing()
        self.audits.judge(plan, view, said, headers)

    def decide(self, headers: Sequence[Header], now_s: float = 0.0) -> None:
        """All headers and all buckets are complete: from here this step has one outcome here (11).

        Raises ViewAbandoned when the view ended meanwhile or the lease ran out: then nothing is decided, and the caller
        leaves the view (`lost`), because an exchange cannot be repeated in the same view.
        """
        view = self._acting()
        if now_s > self.lease_until_s:
            raise ViewAbandoned("the lease ran out before the step was decided")
        if [h.member for h in headers] != list(view.members):
            raise ProtocolViolation(f"headers of view {view.id} from {[h.member for h in headers]}")
        if any(h.step != self.committed or h.view != view.id for h in headers):
            raise ProtocolViolation(f"headers of different steps or views: {[(h.step, str(h.view)) for h in headers]}")
        self._agreed = min(h.heard for h in headers)
        # Kept here: the commit carries the orders out, and another view may be told before the step is handed on.
        self.switching = any(self._orders[n].next is not None for n in range(self._carried_out + 1, self._agreed + 1))
        self.decided, self._decided_in = True, view.id

    def commit(self) -> list[Order]:
        """The verdict is applied. Returns the orders to carry out now, in number order (6)."""
        if self._voided:  # told to start again between verdict and commit: this state counts for nothing
            self._voided = False
            return []
        if not self.decided:
            raise ProtocolViolation("a step was committed that was not decided")
        self._advance()
        self.copied = False
        view = self.view
        if view is None or view.id != self._decided_in or self.over(view.id):
            return []
        due = self._carry_out(self._agreed)
        if self.view is view:
            hosts = self.hosts if self.rows_by_host else {}  # in every step: nothing is called for it
            self.plan = plan_of(view.members, self.committed, self.num_microbatches, self.num_rows, view.work, hosts)
        return due

    def usual_plan(self, view: View) -> StepPlan:
        """The plan of an undisturbed step in a view, as of step 0."""
        return plan_of(view.members, 0, self.num_microbatches, self.num_rows, view.work, self.places())

    def places(self) -> Mapping[str, str]:
        """Where members are, if a robust rule's rows count by host; each for itself else."""
        return self.hosts if self.rows_by_host else {}

    def _carry_out(self, agreed: int) -> list[Order]:
        due = self._due(agreed)
        self._carried_out = max(agreed, self._carried_out)
        for order in due:
            if order.next is not None:
                self._enter(order.next, switched=True)
                break
        return due

    def _due(self, agreed: int) -> list[Order]:
        return [self._orders[n] for n in range(self._carried_out + 1, agreed + 1)]

    @property
    def carried_out(self) -> int:
        """Number of the newest order carried out in this view."""
        return self._carried_out

    def due(self, agreed: int) -> list[Order]:
        """What `carry_out` would carry out. Raises ViewAbandoned if the view is over."""
        self._acting()
        return self._due(agreed)

    def carry_out(self, agreed: int) -> list[Order]:
        """While the view is held back: all members have heard the orders up to `agreed`, and none computes."""
        self._acting()
        return self._carry_out(agreed)

    def _advance(self) -> None:
        self.committed += 1
        self.held.clear()
        self.audits.clear()
        self.keeps_output, self.decided = True, False

    def finished(self, fingerprint: str = "") -> list[m.ToCoordinator]:
        """The closing barrier is passed: every member committed the last step."""
        view = self._acting()
        self.stable, self.done = self.committed, True
        return [m.Done(member=self.me, view=view.id, steps=self.committed, fingerprint=fingerprint)]

    def replayed(self, committed: int, *, keeps_output: bool = False) -> None:
        """A joiner's state is the one at `committed`. `keeps_output`: it came by replaying an outcome, which is still
        here. A spare that is ahead of the survivors (the donor died) can then hand it over, where otherwise the
        survivors would count as stale and be thrown away. Who has been switched into a view may say this when it holds
        the last outcome, and apply that after the roll (`caught_up_late`): until then it is late."""
        self.committed, self.keeps_output = committed, keeps_output
        self.audits.clear()
        self.held.clear()  # a microbatch may have been finished after its step was given up

    def caught_up_late(self) -> None:
        """What `replayed` was told of is now applied here."""
        self.keeps_output = True

    def caught_up(self, committed: int) -> list[m.ToCoordinator]:
        """A joiner replayed up to `committed` and is at most one step behind (18)."""
        if committed != self.committed:
            self.replayed(committed)
        if self.state != "joining":
            return []
        self.state = "ready"
        return [m.Ready(member=self.me, step=committed, serve=self.serve_id)]

    def is_last(self) -> bool:
        """Whether I do what one member of the view should: not the writer, where there is another."""
        return self.view is not None and self.view.members[-1] == self.me

    def standing(self) -> tuple[View, StepPlan]:
        """The view I act in and what is computed in it; the next view may be told at any time, and has no plan yet."""
        view = self._acting()
        if self.plan is None:
            raise ViewAbandoned(f"view {view.id} has no plan")
        return view, self.plan

    def _acting(self) -> View:
        """The view I act in. Raises ViewAbandoned if it is over, or if a newer one came since `next`."""
        view = self.view
        if view is None or view.id != self._at or self.over(view.id):
            raise ViewAbandoned(f"view {view.id if view else None} is over")
        return view
