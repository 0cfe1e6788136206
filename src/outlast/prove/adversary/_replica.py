"""A replica: the real `Member`, carried through everything that it asks for, with expressions in place of tensors.

The training thread is `run`: it asks `next()`, begins what that says and goes on whenever something arrived. The link
to the coordinator (`told`, `heartbeat_answered`) acts at any moment, also while the training thread computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.core.protocol import (
    Compute,
    Exchange,
    Follow,
    Form,
    HandOver,
    Leave,
    RollEntry,
    View,
    Wait,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.verdict import StateDifference, StepEvidence, same_states
from outlast.errors import StateDiverged
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._exchange import Exchanging
from outlast.prove.adversary._guards import MASK
from outlast.prove.adversary._held_back import HeldBack
from outlast.prove.adversary._mesh import SimulatedMesh
from outlast.prove.adversary._rounds import SimulatedRounds
from outlast.prove.adversary._script import go_on
from outlast.prove.adversary._seat import SimulatedSeat

__all__ = ["SimulatedReplica"]


_ROLL, _OUTCOME, _FINAL = "R", "O", "F"


class SimulatedReplica(SimulatedSeat):
    """See the module."""

    def _begin(self) -> bool:
        """Ask what to do; False: nothing."""
        member = self.member
        todo = member.next(self.kernel.now)
        if member.ended is not None:
            return go_on(self, member.ended)
        if member.closed is not None or member.evicted is not None:
            return self.leave_run()
        if isinstance(todo, Compute | Exchange) and self.saves is not None and self._at_boundary != todo.step:
            self._at_boundary = todo.step
            assert self.mesh is not None
            self.saves.boundary(self.mesh.view, member.committed)
            self.world.point("took", self)
        if isinstance(todo, Compute):
            self.occupy(self.world.scenario.compute_s, self._computed, todo.step, todo.microbatch)
        elif isinstance(todo, Exchange):
            self._begin_exchange(todo)
        elif isinstance(todo, Form):
            self._begin_form(todo.view)
        elif isinstance(todo, HandOver):
            self._begin_hand_over(todo)
        elif isinstance(todo, Leave):
            self._begin_leave()
        elif isinstance(todo, Wait) and todo.why == "rows":
            self._awaited, self._doing = (), HeldBack(self, self.donor).advance
        else:
            if self.mesh is not None and member.over(self.mesh.view.id):
                self.close_view()
            if isinstance(todo, Follow):
                self.spare.follow()
            return False
        return True

    # --- a new view ----------------------------------------------------------------------------------------------
    def _begin_form(self, view: View) -> None:
        self.close_view()
        self.donor.flush(view)
        self.spare.course.begin_drain(self.kernel.now)
        self.mesh = SimulatedMesh(self.world, self.name, view)
        self._awaited = ((_ROLL, 0, 0),)
        self._entry: RollEntry | None = None
        self._doing = self._form
        self.world.point("form", self)
        self.world.oracle.entered(self, view)
        if view.start and self.saves is not None:
            self.saves.resume(self.member)
            self.world.point("resume", self)
        for source, key, payload in self.early.pop(view.id, ()):
            self.from_peer(view.id, source, key, payload)
        for peer in self.mesh.peers if self.mesh is not None else ():
            if frozenset((self.name, peer)) in self.world.network.no_path:
                self.kernel.after(0.01, self, self.peer_lost, view.id, peer)

    def _form(self) -> bool:
        mesh = self.in_view()
        view = mesh.view
        if self._entry is None:
            if not self.spare.drained(view):
                return False
            at_once = view.start or self.member.committed >= self.world.scenario.num_steps
            late, outcome = self.spare.course.late, hash((*self.out, self.norm))
            self._entry = self.member.roll(self.state & MASK if at_once and not late else 0, outcome, late=late)
            mesh.broadcast((_ROLL, 0, 0), self._entry)
        if self._rounds is None:
            if not mesh.whole((_ROLL, 0, 0)):
                return False
            rolls = mesh.take((_ROLL, 0, 0)) | {self.name: self._entry}
            self._roll = [rolls[name] for name in view.members]
            self._rounds = SimulatedRounds(self, same_states(self._seat, self.guards, self._found(view), self._roll))
        if not self._rounds.advance():
            return False
        self._rounds, entries = None, self._roll
        answers = self.member.called(entries, self.kernel.now)
        self.sums = {node: total for node, total in self.sums.items() if node in self.member.held}
        self.audit.keep(self.sums)
        self.world.oracle.called(self, view, entries)
        self.world.point("called", self)
        if answers:
            self.say(*answers)
            self.close_view()
        elif self.spare.settling(view):
            self._doing = None
            return False
        elif self.member.formed:
            self.formed(view)
        return True

    def formed(self, view: View) -> None:
        self._compared, self._at_boundary = view.start, -1
        self.member.held_back = self.member.num_rows > 1 and len(view.members) < self.world.scenario.rows_from
        self.say(m.Formed(member=self.name, view=view.id, step=self.member.committed))
        self.donor.formed(view)

    def _begin_hand_over(self, todo: HandOver) -> None:
        self._handing = todo
        self._awaited = ((_OUTCOME, todo.step, 0),) if self.name in todo.behind else ()
        self._doing = self._hand_over

    def _hand_over(self) -> bool:
        mesh, todo = self.in_view(), self._handing
        key = (_OUTCOME, todo.step, 0)
        if todo.donor == self.name:
            outcome = self.world.variant.handed(self.out, self.norm)
            for name in todo.behind:
                mesh.send(name, key, outcome)
            self.world.point("handover", self)
        elif self.name in todo.behind:
            got = mesh.buffers.get(key)
            if not got:
                return False
            self._doing = None
            self.occupy(self.world.scenario.optimizer_s, self._taken, mesh.view, got[todo.donor])
            return False
        self.member.handed_over()
        self.formed(mesh.view)
        return True

    def _taken(self, view: View, outcome: algebra.Outcome) -> None:
        self.apply(outcome)
        try:
            self.member.handed_over()
        finally:
            self.world.oracle.applied(self, "hand-over")
        self.formed(view)

    # --- a step --------------------------------------------------------------------------------------------------
    def _computed(self, step: int, microbatch: int) -> None:
        self.sums[microbatch, microbatch + 1] = self.audit.computed(step, microbatch)
        for left, right, node in self.member.computed(microbatch):
            self.sums[node] = algebra.add(self.audit.taken(left), self.audit.taken(right))

    def state_told(self) -> tuple[int, int]:
        if len(self._roll) == 1 and self.state in self.world.spoilt_states:  # nobody is there who could see it
            self.state = algebra.chain(self.member.committed, self.member.num_microbatches, self.member.num_rows)
        self.guards.told = self.state & MASK
        if not self._compared:
            return -1, self.guards.told
        return (0, self.guards.told) if self.guards.policy is not None else (0, 0)

    def _begin_exchange(self, todo: Exchange) -> None:
        self.world.variant.before_exchange(self.out)
        self._exchange = Exchanging(self, self.audit, self.guards, todo)
        self._doing = self._advance_exchange

    def _advance_exchange(self) -> bool:
        ex = self._exchange
        assert ex is not None
        if self._rounds is None:
            if not ex.advance():
                return False
            found = self._found(ex.todo.view, None if self._compared else self._roll, ex)
            self._rounds = SimulatedRounds(self, self.world.variant.course(self._seat, self.guards, ex.headers, found))
        if not self._rounds.advance():
            return False
        self._rounds, self._compared = None, True
        self.in_view()
        self._decide(ex)
        return True

    def _found(
        self, view: View, entries: Sequence[RollEntry] | None = None, ex: Exchanging | None = None
    ) -> StepEvidence:
        return StepEvidence(
            view=view,
            entries=entries,
            parts=lambda: (("state", self.state & MASK),),
            said=ex.said if ex is not None else None,
            look_again=ex.look_again if ex is not None else lambda _: {},
            rows=ex if ex is not None and self.member.num_rows > 1 else None,
            diverged=_diverged,
        )

    def _decide(self, ex: Exchanging) -> None:
        self.member.decide(ex.headers, self.kernel.now)
        self.norm = self.world.variant.norm(ex.norms)
        self.world.oracle.decided(self, ex.todo.view, ex.todo.step, ex.headers)
        self._exchange, self._saving = None, [header.save for header in ex.headers]
        self.world.point("decide", self)
        self.donor.decided(ex.todo.view, ex.todo.step)
        self.occupy(self.world.scenario.optimizer_s, self._commit, ex.todo.view)

    def _commit(self, view: View) -> None:
        self.apply((tuple(self.out), self.norm))
        self.say(*self.member.audits.reports(view))
        due = self.member.commit()
        if self.saves is not None:
            self.saves.votes.decided(view.id, self.member.committed, self._saving)
        self.world.oracle.applied(self, "commit")
        self.world.point("commit", self)
        for order in due:
            if order.kind == "serve":
                self.donor.serve(order, view.members.index(self.name), len(view.members))

    def apply(self, outcome: algebra.Outcome) -> None:
        spoilt, self.state = self.state in self.world.spoilt_states, algebra.apply(self.state, outcome)
        if spoilt:
            self.world.spoilt_states.add(self.state)
        self.out, self.norm = list(outcome[0]), outcome[1]
        self.sums.clear()
        self.audit.made.clear()

    def stable(self, view: View) -> None:
        if self.saves is not None:
            self.saves.stable(view.id, self.member.stable)

    def save_vote(self, step: int) -> int:
        return self.saves.vote(step) if self.saves is not None else 0

    def _begin_leave(self) -> None:
        assert self.mesh is not None
        key = (_FINAL, self.member.committed, 0)
        self.mesh.broadcast(key, None)
        self._awaited = (key,)
        self._doing = self._leave

    def _leave(self) -> bool:
        mesh = self.in_view()
        if not mesh.whole((_FINAL, self.member.committed, 0)):
            return False
        self.say(*self.member.finished())
        self.world.oracle.scattered(self, mesh.view)
        return True


def _diverged(view: View, found: StateDifference) -> StateDiverged:
    return StateDiverged(f"states differ in view {view.id}: {found.text}")
