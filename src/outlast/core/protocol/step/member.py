"""A member's side of the protocol: what to do next, and when a step may be decided.

Two callers share it (the driver holds a lock): the link to the coordinator calls `told`, `lost` and `renewed` at any
moment; the training thread asks `next()` and reports what came of it. Nothing here computes, sends or waits, so the
same object runs over sockets and under the adversary. Numbers in comments are those of docs/explanation/rules.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from outlast.core.protocol import messages as m
from outlast.core.protocol.disputes import Commitment
from outlast.core.protocol.rebuild import rebuilt, rebuilt_order
from outlast.core.protocol.step.audits import Audits
from outlast.core.protocol.step.roll import plan_of, resolve
from outlast.core.protocol.tree import Node, cover, leaves_of, parent
from outlast.core.protocol.types import Header, Order, RollEntry, ServeId, StepPlan, View, ViewId
from outlast.errors import ProtocolViolation, ViewAbandoned

__all__ = ["Compute", "Exchange", "Follow", "Form", "HandOver", "Leave", "Member", "Merge", "Todo", "Wait"]


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to do until the coordinator says more. `why` is for progress reports."""

    why: Literal["no view", "left", "lease", "done", "departed", "rows"]


class Follow(msgspec.Struct, frozen=True, kw_only=True):
    """A joiner or spare: receive and replay; not in any view."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Connect to the view's members and call the roll."""

    view: View


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """Step `step` is decided at `donor` and not at `behind`: give, take, or (neither) go on."""

    step: int
    donor: str
    behind: tuple[str, ...]


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """Compute one microbatch's gradient."""

    step: int
    microbatch: int
    orphan: bool


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """All my microbatches are held: exchange. `nodes`: partial sums of each member, in view order."""

    step: int
    view: View
    nodes: tuple[tuple[Node, ...], ...]


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """All steps are done: pass the closing barrier, then say `finished`."""

    view: View


Todo = Wait | Follow | Form | HandOver | Compute | Exchange | Leave
Merge = tuple[Node, Node, Node]  # left and right child, and their parent


class Member:
    """See the module. `until`: steps after which this member is done; None while unknown."""

    def __init__(
        self, me: str, num_microbatches: int, *, committed: int = 0, until: int | None = None, num_rows: int = 1
    ) -> None:
        self.me, self.num_microbatches, self.num_rows, self.until = me, num_microbatches, num_rows, until
        self.state: Literal["fresh", "joining", "ready", "member"] = "fresh"
        self.epoch = 0
        self.committed = committed
        self.stable = 0  # steps that every member of some view committed (11)
        self.view: View | None = None
        self.left: ViewId | None = None  # every view up to this one is over for me
        self.formed = False
        self.plan: StepPlan | None = None
        self.held: set[Node] = set()  # partial sums of step `committed`
        self.keeps_output = False  # raw output, scalars and verdict of step committed-1 (10)
        self.decided = self._voided = False
        self.done = False
        self.closed: str | None = None
        self.ended: m.Ended | None = None  # training has, and who writes since then
        self.evicted: m.Evict | None = None
        self.serve: tuple[str, ...] = ()  # donors that the coordinator promised this joiner
        self.serve_id: ServeId = (0, 0)  # which attempt that is; streams carry it
        self.leaving = False
        self.switched = False  # into this view by an order: all its members have committed the same steps
        self.contacts: dict[str, str] = {}
        self.hosts: dict[str, str] = {}  # member -> the agent that it runs under
        self.held_back = False  # a robust rule must not be used in this view: stay in it, compute nothing
        self.store = ""
        self.lease_until_s = math.inf
        self.heard = 0  # orders of this view known without a gap
        self.audits = Audits(me)
        self._orders: dict[int, Order] = {}
        self._carried_out = 0
        self._agreed = 0
        self.switching = False  # whether the step that was decided last is its view's last
        self._decided_in: ViewId | None = None
        self._at: ViewId | None = None  # the view that the training thread was last told to act in
        self._handing: HandOver | None = None

    # --- from the coordinator's link -----------------------------------------------------------------------------
    def told(self, message: m.FromCoordinator) -> list[m.ToCoordinator]:
        """React to the coordinator; returns what to answer. Older epochs are ignored (1)."""
        epoch = message.epoch
        if isinstance(message, m.Install):
            epoch = max(epoch, message.view.id.epoch)
        elif isinstance(message, m.Amend):
            epoch = max(epoch, message.delta.id.epoch)
        if 0 < epoch < self.epoch:
            return []
        self.epoch = max(epoch, self.epoch)
        if isinstance(message, m.Install):
            return self._install(message)
        elif isinstance(message, m.Amend):
            return self._amended(message)
        elif isinstance(message, m.Notify):
            return self._notified(message)
        elif isinstance(message, m.Take):
            return self._take(message)
        elif isinstance(message, m.BeginServe):
            self._start_again("joining", message.donors, message.serve)
        elif isinstance(message, m.Rejoin):
            self._start_again("fresh", (), (0, 0))
        elif isinstance(message, m.Evict):
            self.evicted = message
        elif isinstance(message, m.Close):
            self.closed = message.reason or "closed"
            self.leaving |= message.reason == m.DEPARTED
        elif isinstance(message, m.Ended):
            self.closed, self.ended = "finished", message
        return []

    def _install(self, message: m.Install) -> list[m.ToCoordinator]:
        view = message.view
        if (self.view is not None and view.id <= self.view.id) or self.me not in view.members:
            return []
        if not view.start and self.state not in ("ready", "member"):
            return [m.Rejoin(member=self.me, view=view.id)]  # there is no state here to act with
        self._enter(view, switched=False)
        self.contacts, self.store = dict(message.addresses), message.store
        self.hosts.update(message.hosts)
        return []

    def _amended(self, message: m.Amend) -> list[m.ToCoordinator]:
        install = rebuilt(self.view, self.contacts, message)
        if install is not None:
            return self._install(install)
        return [m.Whole(member=self.me, view=message.delta.id)] if self._newer(message.delta.id) else []

    def _start_again(self, state: Literal["fresh", "joining"], donors: tuple[str, ...], serve: ServeId) -> None:
        """Whatever is here counts for nothing; a snapshot replaces it (18)."""
        self.state, self.serve, self.serve_id = state, donors, serve
        self.view, self.formed, self.plan = None, False, None
        self.held.clear()
        self._voided = self.decided
        self.keeps_output = self.decided = False

    def _enter(self, view: View, *, switched: bool) -> None:
        self.view, self.formed, self.plan, self.switched = view, False, None, switched
        self.state = "member"
        self.done = self.held_back = False
        self._orders.clear()
        self._carried_out = self.heard = 0

    def _notified(self, message: m.Notify) -> list[m.ToCoordinator]:
        """The view is over. From here no exchange of it is decided, so the answer may be given at once (2)."""
        if self.left is None or message.view > self.left:
            self.left = message.view
        return [m.Left(member=self.me, view=message.view, cause=message.cause)]

    def _take(self, message: m.Take) -> list[m.ToCoordinator]:
        order = message.order
        if message.delta is not None:
            found = rebuilt_order(self.view, message)
            if found is None:
                return [m.Whole(member=self.me, view=message.delta.id)] if self._newer(message.delta.id) else []
            order = found
        if self.view is not None and order.view == self.view.id:
            self._orders.setdefault(order.number, order)
            while self.heard + 1 in self._orders:
                self.heard += 1
        elif order.next is not None and self.me in order.next.members and self._newer(order.next.id):
            if self.state != "ready":
                return [m.Rejoin(member=self.me, view=order.next.id)]
            self._enter(order.next, switched=True)
        self.contacts.update(message.addresses)
        self.hosts.update(message.hosts)
        if order.next is not None:
            self.store = message.store
        return []

    def _newer(self, view: ViewId) -> bool:
        return (self.view is None or view > self.view.id) and (self.left is None or view > self.left)

    def renewed(self, until_s: float) -> None:
        """The lease runs to `until_s`: `lease_s` after the *sending* of a heartbeat that the coordinator answered
        (counted from the answer's arrival, a late answer would outlast the coordinator's own count)."""
        self.lease_until_s = max(until_s, self.lease_until_s) if self.lease_until_s < math.inf else until_s

    def leave(self) -> list[m.ToCoordinator]:
        """I was asked to go (SIGTERM)."""
        self.leaving = True
        return [m.Leaving(member=self.me)]

    def rejoin(self) -> list[m.ToCoordinator]:
        """A joiner's stream broke or has a gap: ask to be served again."""
        if self.state not in ("joining", "ready"):
            return []
        self._start_again("fresh", (), (0, 0))
        return [m.Rejoin(member=self.me)]

    def lost(
        self, suspects: Sequence[str], cause: str, now_s: float, stale: Sequence[str] = ()
    ) -> list[m.ToCoordinator]:
        """The view that `next` last named cannot go on (`suspects`: peers whose connection ended without a goodbye;
        `stale`: members whose state counts for nothing): leave it at once, unasked. Nothing to say if it is over
        already; a newer view is not touched."""
        found = self.audits.reports(self.view) if self.view is not None else []
        if self.view is None or self.view.id != self._at or self.over(self.view.id):
            return found
        self.left = self.view.id
        left = m.Left(
            member=self.me, view=self.view.id, cause=cause, suspects=tuple(suspects), stale=tuple(stale), at_s=now_s
        )
        return [*found, left]

    def over(self, view: ViewId) -> bool:
        """Whether this view is over for me: left, or a newer one was installed."""
        return (self.left is not None and view <= self.left) or self.view is None or self.view.id != view

    def hello(self, agent: str, facts: dict[str, str], address: str, store: str, device: str = "") -> m.Hello:
        """Who I am and what I am in the middle of."""
        left = self.view is not None and self.over(self.view.id)
        return m.Hello(
            member=self.me,
            agent=agent,
            epoch=self.epoch,
            view=self.view,
            left=left,
            formed=self.formed,
            heard=self.heard,
            committed=self.committed,
            state=self.state,
            done=self.done,
            leaving=self.leaving,
            serve=self.serve_id,
            facts=facts,
            address=address,
            store=store,
            device=device,
        )

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
            return Wait(why="rows")
        return self._next_of_step(view)

    def _next_of_step(self, view: View) -> Todo:
        assert self.plan is not None
        have = set(leaves_of(self.held))
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
        )

    def called(self, entries: Sequence[RollEntry], now_s: float = 0.0) -> list[m.ToCoordinator]:
        """The roll is complete: take the plan that follows from it. A stale member ends the view."""
        view = self._acting()
        if [entry.member for entry in entries] != list(view.members) or any(e.view != view.id for e in entries):
            raise ProtocolViolation(f"roll call of view {view.id} answered by {[e.member for e in entries]}")
        plan = resolve(self.audits.sound(entries), self.num_microbatches, self.num_rows)
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
        if leaf in leaves_of(self.held):
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
        if any((h.step, h.view) != (self.committed, view.id) for h in headers):
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
        view = self.view
        if view is None or view.id != self._decided_in or self.over(view.id):
            return []
        due = self._carry_out(self._agreed)
        if self.view is view:
            self.plan = plan_of(view.members, self.committed, self.num_microbatches, self.num_rows)
        return due

    def _carry_out(self, agreed: int) -> list[Order]:
        due = [self._orders[n] for n in range(self._carried_out + 1, agreed + 1)]
        self._carried_out = max(agreed, self._carried_out)
        for order in due:
            if order.next is not None:
                self._enter(order.next, switched=True)
                break
        return due

    @property
    def carried_out(self) -> int:
        """Number of the newest order carried out in this view."""
        return self._carried_out

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
