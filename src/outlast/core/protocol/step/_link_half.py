"""A member as the coordinator's link knows it: what it is told at any moment, and what it says of its own accord.

What a member knows is put together here, once. What its training thread does is `member.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from outlast.core.protocol import messages as m
from outlast.core.protocol.rebuild import rebuilt, rebuilt_order
from outlast.core.protocol.step.audits import Audits
from outlast.core.protocol.step.todo import HandOver
from outlast.core.protocol.tree import Node
from outlast.core.protocol.types import Order, ServeId, StepPlan, View, ViewId

__all__ = ["LinkHalf"]


class LinkHalf:
    """Knows what a member was told, and what it answers."""

    def __init__(
        self,
        me: str,
        num_microbatches: int,
        *,
        committed: int = 0,
        until: int | None = None,
        num_rows: int = 1,
        rows_by_host: bool = False,
    ) -> None:
        self.me, self.num_microbatches, self.num_rows, self.until = me, num_microbatches, num_rows, until
        self.rows_by_host = rows_by_host  # what a host's members compute counts together
        self.state: Literal["fresh", "joining", "ready", "member"] = "fresh"
        self.copied = False  # as in `RollEntry`
        self.unbegun = False  # told of a first view, and has not begun with what the run begins with
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
        self.held_back = False  # the view is held, or a robust rule must not be used in it: compute nothing there
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
        self.unbegun |= view.start  # until it has: the first view may be over before it was entered
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
        self.state, self.serve, self.serve_id, self.unbegun = state, donors, serve, False
        self.view, self.formed, self.plan, self.copied = None, False, None, True
        self.held.clear()
        self._voided = self.decided
        self.keeps_output = self.decided = False

    def _enter(self, view: View, *, switched: bool) -> None:
        self.view, self.formed, self.plan, self.switched = view, False, None, switched
        self.state = "member"
        self.done, self.held_back = False, view.held
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

    def answered(self, epoch: int, until_s: float) -> bool:
        """A coordinator of this epoch has answered a heartbeat, so the lease runs to `until_s`. Whether that counts: an
        older one's word prolongs nothing (1)."""
        if epoch < self.epoch:
            return False
        self.renewed(until_s)
        return True

    def leave(self) -> list[m.ToCoordinator]:
        """I was asked to go (SIGTERM). After the last step that is what I do anyway."""
        self.leaving = True
        return [] if self._ends else [m.Leaving(member=self.me)]

    @property
    def _ends(self) -> bool:
        """Whether I have made the last step in this view, and only its closing barrier is left."""
        return self.until is not None and self.committed >= self.until and self.formed and not self.done

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
        found = self.audits.reports()
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
            leaving=self.leaving and not self._ends,
            serve=self.serve_id,
            facts=facts,
            address=address,
            store=store,
            device=device,
        )
