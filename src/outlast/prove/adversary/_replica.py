"""A replica: the real `Member`, carried through everything that it asks for, with expressions in place of tensors.

The training thread is `run`: it asks `next()`, begins what that says and goes on whenever something arrived. The link
to the coordinator (`told`, `heartbeat_answered`) acts at any moment, also while the training thread computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outlast.core.protocol import (
    Compute,
    Exchange,
    Follow,
    Form,
    HandOver,
    Header,
    Leave,
    RollEntry,
    Said,
    View,
    Wait,
    rows_spoilt,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.effects import Act, Course
from outlast.core.protocol.step.forming import RollFacts
from outlast.core.protocol.step.verdict import StateDifference, StepEvidence
from outlast.errors import StateDiverged
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._exchange import Exchanging
from outlast.prove.adversary._guards import MASK
from outlast.prove.adversary._host_exchange import HostExchange, in_two_levels
from outlast.prove.adversary._mesh import SimulatedMesh
from outlast.prove.adversary._rounds import Acts, SimulatedRounds
from outlast.prove.adversary._saves import SimulatedSaves
from outlast.prove.adversary._script import go_on
from outlast.prove.adversary._seat import SimulatedSeat

__all__ = ["SimulatedReplica"]


_OUTCOME = "O"


class SimulatedReplica(SimulatedSeat):
    """Carries out what the real member asks for, in virtual time."""

    def _begin(self) -> bool:
        """Ask what to do; False: nothing."""
        member = self.member
        todo = member.next(self.kernel.now)
        if member.ended is not None:
            return go_on(self, member.ended)
        if member.closed is not None or member.evicted is not None:
            return self.leave_run()
        if isinstance(todo, (Compute, Exchange)):
            return self._begin_of_step(todo)
        if isinstance(todo, Form):
            self._begin_form(todo.view)
        elif isinstance(todo, HandOver):
            self._begin_hand_over(todo)
        elif isinstance(todo, Leave):
            self._begin_leave()
        elif isinstance(todo, Wait) and todo.why == "held back" and member.view is not None:
            self._begin_turn(member.view)
        else:
            if self.mesh is not None and member.over(self.mesh.view.id):
                self.close_view()
            if isinstance(todo, Follow):
                self.spare.follow()
            return False
        return True

    def _begin_of_step(self, todo: Compute | Exchange) -> bool:
        """A microbatch or the exchange; before the first of a step, the save that is due."""
        member = self.member
        if self.saves is not None and self._at_boundary != todo.step:
            self._at_boundary = todo.step
            assert self.mesh is not None
            view = self.mesh.view
            self.saves.boundary(view, member.committed)
            self.world.point("took", self)
            if self.saves.stopping(view, member.committed):
                return self._begin_stop(self.saves, view)
        if self.mesh is not None:
            self.world.oracle.begins(self, self.mesh.view, todo.step)
        if isinstance(todo, Compute):
            self.occupy(self.world.scenario.compute_s, self._computed, todo.step, todo.microbatch)
        else:
            self._begin_exchange(todo)
        return True

    def _carry_out(self, course: Course[Any], acts: Acts, then: Callable[[Any], bool]) -> None:
        """Begin a course; `then` takes what it comes to, and says whether that is all."""
        rounds = SimulatedRounds(self, course, acts)
        self._awaited = ()

        def go() -> bool:
            if not rounds.advance():
                return False
            return then(rounds.result)

        self._doing = go

    def _begin_turn(self, view: View) -> None:
        found = StepEvidence(view=view, parts=self._parts, diverged=_diverged, entries=self._roll)
        variant, seat, state = self.world.variant, self._seat, lambda: self.state & MASK
        course = variant.take_orders(seat, self.guards, found, state, self.donor.carry_out)
        self._carry_out(course, {"rest": self._rest}, lambda _: True)
        self.world.point("held", self)

    def _rest(self, _: Act) -> bool:
        self.in_view()
        self._forgive()
        return self.member.heard != self.member.carried_out

    # --- a new view ----------------------------------------------------------------------------------------------
    def _begin_form(self, view: View) -> None:
        acts: Acts = {
            "part": lambda _: self._part(view),
            "drain": lambda _: self.spare.drained(view),
            "begin": self._resume,
            "read newer": self._read_newer,
            "connect": lambda _: self._connect(view),
            "keep": lambda act: self._keep(view, act.entries),
        }
        found = StepEvidence(view=view, parts=self._parts, diverged=_diverged)
        course = self.world.variant.form(self._seat, self.guards, found, self._roll_facts)
        self._carry_out(course, acts, self._called)

    def _part(self, view: View) -> None:
        self.close_view()
        self.donor.flush(view)
        self.spare.course.begin_drain(self.kernel.now)
        self.world.point("form", self)
        self.world.oracle.entered(self, view)

    def _resume(self, _: Act) -> None:
        if self.saves is not None:
            self.saves.resume(self.member)
            self.world.point("resume", self)

    def _read_newer(self, _: Act) -> None:
        if self.saves is not None and self.saves.read_newer(self.member):
            self.spare.course.read_elsewhere()
            self.sums.clear()
            self.world.oracle.applied(self, "reading what is newer")
        self.world.point("resume", self)

    def _connect(self, view: View) -> None:
        if view.start and self.saves is not None:
            self.world.oracle.resumed(self, self.member.committed)
        mesh = self.mesh = SimulatedMesh(self.world, self.name, view)
        for source, key, payload in self.early.pop(view.id, ()):
            self.from_peer(view.id, source, key, payload)
        for peer in mesh.peers:
            if frozenset((self.name, peer)) in self.world.network.no_path:
                self.kernel.after(0.01, self, self.peer_lost, view.id, peer)

    def _roll_facts(self) -> RollFacts:
        outcome = hash((*self.out, self.norm))
        return RollFacts(outcome=outcome, state=lambda: self.state & MASK, late=self.spare.course.late, joined=False)

    def _keep(self, view: View, entries: Sequence[RollEntry]) -> None:
        self._roll = list(entries)
        self.sums = {node: total for node, total in self.sums.items() if node in self.member.held}
        self.audit.keep(self.sums)
        self.world.oracle.called(self, view, entries)
        self.world.point("called", self)

    def _called(self, goes_on: bool) -> bool:
        if not goes_on:
            self.close_view()
            return True
        view = self.in_view().view
        if self.spare.settling(view):
            self._doing = None
            return False
        if self.member.formed:
            self.formed(view)
        return True

    def formed(self, view: View) -> None:
        self._compared, self._at_boundary = view.start, -1
        self.spare.came_in = False
        self.member.held_back = view.held or self._waits_for_rows(view)
        self.say(m.Formed(member=self.name, view=view.id, step=self.member.committed))
        self.donor.formed(view)

    def _waits_for_rows(self, view: View) -> bool:
        num, rows, plan = self.member.num_microbatches, self.member.num_rows, self.member.plan
        if rows == 1 or plan is None:
            return False
        spoilt = rows_spoilt(self.member.places(), (plan.leaves, self.member.usual_plan(view).leaves), num, rows)
        return self.world.scenario.admission().decide(spoilt).action == "wait"

    def _begin_hand_over(self, todo: HandOver) -> None:
        self._handed = False
        course = self.world.variant.hand_over(self._seat, todo)
        self._carry_out(course, {"give": lambda _: self._give(todo), "take": lambda _: self._take(todo)}, self._done)

    def _done(self, _: None) -> bool:
        self.formed(self.in_view().view)
        return True

    def _give(self, todo: HandOver) -> None:
        mesh = self.in_view()
        outcome = self.world.variant.handed(self.out, self.norm)
        for name in todo.behind:
            mesh.send(name, (_OUTCOME, todo.step, 0), (outcome, self.copies.step == todo.step))
        self.world.point("handover", self)

    def _take(self, todo: HandOver) -> bool:
        """What was applied stays applied though the view be over."""
        if not self._handed:
            mesh, key = self.in_view(), (_OUTCOME, todo.step, 0)
            self._awaited = (key,)
            if got := mesh.buffers.get(key):
                self.occupy(self.world.scenario.optimizer_s, self._taken, *got[todo.donor])
        return self._handed

    def _taken(self, outcome: algebra.Outcome, with_copy: bool) -> None:
        if self.spare.came_in and not with_copy:
            what = f"{self.name}, which came in by replaying, was handed step {self.member.committed} alone"
            self.world.oracle.violated("Bits", f"{what}, without what the loops had made of their state")
        self.copies.step = self.member.committed  # it may have to hand this on
        self.apply(outcome)
        self._handed = True
        self.world.oracle.applied(self, "hand-over", self.member.committed + 1)

    # --- a step --------------------------------------------------------------------------------------------------
    def _computed(self, step: int, microbatch: int) -> None:
        self.sums[microbatch, microbatch + 1] = self.audit.computed(step, microbatch)
        for left, right, node in self.member.computed(microbatch):
            self.sums[node] = algebra.add(self.audit.taken(left), self.audit.taken(right))

    def _forgive(self) -> None:
        """What befell my state counts for nothing where nobody is there who could see it."""
        if len(self._roll) == 1 and self.state in self.world.spoilt_states:
            self.state = algebra.chain(self.member.committed, self.member.num_microbatches, self.member.num_rows)

    def state_told(self) -> tuple[int, int]:
        self._forgive()
        self.guards.told = self.state & MASK
        if not self._compared:
            return -1, self.guards.told
        return (0, self.guards.told) if self.guards.policy is not None else (0, 0)

    def _begin_exchange(self, todo: Exchange) -> None:
        self.world.variant.before_exchange(self.out)
        ex = Exchanging(self, self.audit, todo, self._evidence)
        acts: Acts = {"exchange": self._exchange_of(ex), "audit": ex.audit, "look closer": lambda _: None}
        course = self.world.variant.step(self._seat, self.guards, todo, ex)
        self._carry_out(course, acts, lambda decided: self._decided(ex, decided[0]))

    def _exchange_of(self, ex: Exchanging) -> Callable[[Act], bool]:
        """In two levels where the fleet spans hosts, and the runtime would (`runtime/member/_plane_choice.py`)."""
        if not self.world.scenario.two_levels:
            return ex.exchange
        places = [self.member.hosts.get(name, "") for name in ex.members]
        if not in_two_levels(places):
            return ex.exchange
        return HostExchange(self, ex.todo, places, ex.own_norms, ex.scattered).exchange

    def _evidence(self, ex: Exchanging, commitments: Said | None) -> StepEvidence:
        return StepEvidence(
            view=ex.todo.view,
            parts=self._parts,
            diverged=_diverged,
            entries=None if self._compared else self._roll,
            said=commitments,
            look_again=ex.look_again,
            rows=ex if self.member.num_rows > 1 else None,
        )

    def _parts(self) -> tuple[tuple[str, int]]:
        return (("state", self.state & MASK),)

    def _decided(self, ex: Exchanging, headers: Sequence[Header]) -> bool:
        self._compared = True
        self.norm = self.world.variant.norm(ex.norms)
        self.world.oracle.decided(self, ex.todo.view, ex.todo.step, headers)
        self._saving = [header.save for header in headers]
        self.world.point("decide", self)
        self.donor.decided(ex.todo.view, ex.todo.step)
        self.occupy(self.world.scenario.optimizer_s, self._commit, ex.todo.view)
        return True

    def _commit(self, view: View) -> None:
        self.apply((tuple(self.out), self.norm))
        self.say(*self.member.audits.reports())
        due = self.member.commit()
        if self.saves is not None:
            self.saves.votes.decided(view.id, self.member.committed, self._saving)
        self.world.oracle.applied(self, "commit")
        self.world.point("commit", self)
        for order in due:
            self.donor.carry_out(order, view)

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

    def _begin_stop(self, saves: SimulatedSaves, view: View) -> bool:
        """The run stops with what was just saved."""
        self._passed = False

        def stopped(_: Any) -> bool:
            self.in_view()
            return saves.stopped(view, self.member.committed)

        self._carry_out(self.world.variant.settle(self._seat), {"settle the end": self._settle_end}, stopped)
        return True

    def _begin_leave(self) -> None:
        self._passed = False
        acts: Acts = {
            "save the end": self._save_end,
            "settle the end": self._settle_end,
            "say how far": lambda _: True,  # heartbeats are of leases alone here
        }
        self._carry_out(self.world.variant.leave(self._seat), acts, lambda _: True)

    def _save_end(self, _: Act) -> bool:
        view = self.in_view().view
        return self.saves is None or self.saves.last(view, self.member.committed)

    def _settle_end(self, _: Act) -> bool:
        view = self.in_view().view
        if not self._passed:
            self._passed = True
            self.world.oracle.scattered(self, view)
        return self.saves is None or self.saves.settled(view, self.member.committed)


def _diverged(view: View, found: StateDifference) -> StateDiverged:
    return StateDiverged(f"states differ in view {view.id}: {found.text}")
