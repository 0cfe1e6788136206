"""A replica: the real `Member`, carried through everything that it asks for, with expressions in place of tensors.

The training thread is `run`: it asks `next()`, begins what that says and goes on whenever something arrived. The link
to the coordinator (`told`, `heartbeat_answered`) acts at any moment, also while the training thread computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from outlast.core.protocol import (
    Compute,
    Exchange,
    Follow,
    Form,
    HandOver,
    Leave,
    Member,
    Node,
    RollEntry,
    View,
    ViewId,
    Wait,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.verdict import Seat, StateDifference, StepEvidence, same_states
from outlast.errors import Evicted, GuardStop, ProtocolViolation, StateDiverged, ViewAbandoned
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._audit import Auditor
from outlast.prove.adversary._donor import SimulatedDonor
from outlast.prove.adversary._exchange import Exchanging
from outlast.prove.adversary._guards import MASK
from outlast.prove.adversary._held_back import HeldBack
from outlast.prove.adversary._hosts import Dialler
from outlast.prove.adversary._mesh import SimulatedMesh
from outlast.prove.adversary._network import Dialled
from outlast.prove.adversary._rounds import SimulatedRounds
from outlast.prove.adversary._saves import SaveWord, SimulatedSaves
from outlast.prove.adversary._script import go_on
from outlast.prove.adversary._spare import SimulatedJoiner
from outlast.prove.adversary._surroundings import Owner, Supervisor, Surroundings

__all__ = ["SimulatedReplica"]

_SCATTER, _ROLL, _OUTCOME, _FINAL, _BYE = "S", "R", "O", "F", "bye"


class SimulatedReplica(Dialler, Owner):
    """See the module."""

    def __init__(self, world: Surroundings, name: str, agent: Supervisor) -> None:
        super().__init__(world, name)
        scenario, self.agent = world.scenario, agent
        self.member: Member = world.variant.member(
            name, scenario.num_microbatches, until=scenario.num_steps, num_rows=scenario.num_rows
        )
        self.lease_until_s = math.inf  # as granted, whatever the member makes of it
        if scenario.lease_s < math.inf:
            self.lease_until_s = self.member.lease_until_s = -1.0  # until the first heartbeat is answered
        self.state, self.norm = algebra.INITIAL, 0
        self.sums: dict[Node, algebra.Gradient] = {}
        self.out: list[int] = [0] * (algebra.BUCKETS * algebra.BLOCKS)
        self.mesh: SimulatedMesh | None = None
        self.abandoned: dict[ViewId, SimulatedMesh] = {}
        self.early: dict[ViewId, list[tuple[str, Any, Any]]] = {}
        self.donor = SimulatedDonor(self)
        self.spare, self.audit = SimulatedJoiner(self), Auditor(self, agent.name)
        self.saves = SimulatedSaves(self) if scenario.save_every else None
        self.guards = world.variant.guards(scenario.guarded)
        self._seat = Seat(
            me=name, host=agent.name, device="", member=self.member, lock=nullcontext(), now_s=lambda: self.kernel.now
        )
        self._roll: list[RollEntry] = []
        self._saving: list[int] = []  # votes of the step that is being applied
        self._at_boundary = -1  # the step whose boundary was looked at, in this view
        self._compared = True  # whether the view's states are
        self.busy = self.hung = self._running = False
        self.slowness = 1.0
        self.exit: Literal["signal", "finished", "exception"] = "signal"  # how it ends, as its agent sees it
        self.progress_at = self.kernel.now
        self._awaited: tuple[Any, ...] = ()
        self._doing: Callable[[], bool] | None = None
        self._exchange: Exchanging | None = None
        self._rounds: SimulatedRounds | None = None
        self.dial()
        self.kernel.after(scenario.stall_s, self, self._watch)
        if scenario.lease_s < math.inf:
            self._beat()

    @property
    def in_mesh(self) -> bool:
        return self.mesh is not None

    # --- the link to the coordinator -----------------------------------------------------------------------------
    def greeting(self) -> m.Hello:
        facts = {"checkpoints": "kept"} if self.saves is not None else {}
        return self.member.hello(self.agent.name, facts, self.name, self.name)

    def told(self, link: Dialled, message: Any) -> None:
        if link.broken:
            return
        if isinstance(message, m.Welcome) and self.world.scenario.lease_s < math.inf:
            self.say(self.kernel.now)
        if isinstance(message, m.ProbePaths):
            return self._probed(message)
        if isinstance(message, SaveWord):
            return self.saves.told(message) if self.saves is not None else None
        answers = self.member.told(message)
        self.world.oracle.told(self, message)
        self.say(*answers)
        self.run()

    def heartbeat_answered(self, link: Dialled, sent_at_s: float) -> None:
        if not link.broken:
            self.lease_until_s = max(self.lease_until_s, sent_at_s + self.world.scenario.lease_s)
            self.member.renewed(sent_at_s + self.world.scenario.lease_s)
            self.run()

    def _beat(self) -> None:
        if self.link is not None:
            self.say(self.kernel.now)
        self.kernel.after(self.world.scenario.lease_s / 4, self, self._beat)

    def _probed(self, probe: m.ProbePaths) -> None:
        if self.mesh is not None and self.mesh.view.id == probe.view:
            reached = tuple(name for name in self.mesh.peers if self.world.reaches(self.name, name))
            self.say(m.Rows(member=self.name, view=probe.view, reached=reached))

    def _watch(self) -> None:
        """Say who is waited for, as long as the training thread waits for peers; and look after a joiner's streams."""
        stall_s = self.world.scenario.stall_s
        self.kernel.after(stall_s, self, self._watch)
        if self.member.view is None:
            self.spare.give_up_if_orphaned()
        mesh, waited_s = self.mesh, self.kernel.now - self.progress_at
        if self.busy or self._doing is None or waited_s < stall_s or mesh is None:
            return
        self.run()
        missing = tuple(self._missing())
        if missing and self.mesh is mesh:
            me, view = self.name, mesh.view.id
            self.say(m.Stalled(member=me, view=view, phase=0, missing=missing, waited_s=waited_s, deadline_s=stall_s))

    def awaiting(self, *keys: Any) -> None:
        self._awaited = keys

    def _missing(self) -> list[str]:
        mesh = self.mesh
        assert mesh is not None
        waiting = [key for key in self._awaited if not mesh.whole(key)]
        return [name for name in mesh.peers if any(name not in mesh.buffers.get(key, ()) for key in waiting)]

    # --- the training thread -------------------------------------------------------------------------------------
    def run(self) -> None:
        """Go as far as possible."""
        if self._running:
            return
        self._running = True
        try:
            while not self.busy and not self.ended:
                if self._doing is None and not self._begin():
                    return
                if self._doing is None:
                    continue
                try:
                    done = self._doing()
                except ViewAbandoned:
                    self._abandon()
                    done = True
                if not done:
                    return
                self._doing = None
                self.progress_at = self.kernel.now
        except ProtocolViolation as violation:
            self.world.oracle.violated("Protocol", f"{self.name}: {violation.message}")
        except (Evicted, GuardStop, StateDiverged) as error:
            self._raised(error)
        finally:
            self._running = False

    def _raised(self, error: Evicted | GuardStop | StateDiverged) -> None:
        """What leaves the loop ends the process; the coordinator hears of it."""
        if not isinstance(error, Evicted):
            self.world.oracle.diverged(self)
        step, words = self.member.committed, error.message
        self.say(m.Failed(member=self.name, step=step, microbatch=-1, error=words, alike=error.code, code=5))
        self.exit = "exception"
        self.leave_run()

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

    def occupy(self, seconds: float, then: Callable[..., None], *args: Any) -> None:
        """The training thread is busy, whatever arrives. That it begins is progress, as entering a phase is."""
        self.busy, self.progress_at = True, self.kernel.now
        delay = seconds * (0.5 + self.kernel.rng.random()) * self.slowness
        self.kernel.after(delay, self, self._free, then, args)

    def _free(self, then: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.hung:
            return
        self.busy, self.progress_at = False, self.kernel.now
        try:
            then(*args)
        except ViewAbandoned:
            self._abandon()
        except ProtocolViolation as violation:
            self.world.oracle.violated("Protocol", f"{self.name}: {violation.message}")
        self.run()

    def occupy_beside(self, step: int, leaf: int) -> None:
        """Compute a microbatch that another replica owns."""
        self.occupy(self.world.scenario.compute_s, self.audit.beside, step, leaf)

    def in_view(self) -> SimulatedMesh:
        """The mesh that is waited on. Raises ViewAbandoned if there is nothing to wait for."""
        mesh = self.mesh
        closed = self.member.evicted is not None or self.member.closed is not None
        if mesh is None or closed or self.member.over(mesh.view.id) or mesh.suspects or mesh.parted:
            raise ViewAbandoned("the view is over")
        return mesh

    def _abandon(self) -> None:
        """Leave: the coordinator hears why unless it knows, peers hear a goodbye."""
        suspects = self.mesh.suspects if self.mesh is not None else []
        self.say(*self.member.lost(suspects, "peers were lost", self.kernel.now))
        self._doing = self._exchange = self._rounds = None
        self.close_view()

    def close_view(self) -> None:
        self.spare.settle()
        mesh, self.mesh = self.mesh, None
        if mesh is not None:
            mesh.close()
            self.abandoned[mesh.view.id] = mesh

    def leave_run(self) -> bool:
        """Exit as told: there is nothing to do any more."""
        self.close_view()
        self.world.replica_ended(self)
        return False

    # --- from peers ----------------------------------------------------------------------------------------------
    def from_peer(self, view: ViewId, source: str, key: Any, payload: Any) -> None:
        cut = self.world.network.cut_meshes
        if cut and (view, frozenset((source, self.name))) in cut:
            return
        mesh = self.mesh
        if mesh is None or mesh.view.id != view:
            old = self.abandoned.get(view)
            if old is not None:
                if key[0] == _SCATTER:
                    new = mesh.buffers if mesh is not None else None
                    self.world.variant.late_write(old.buffers, new, key, source, payload)
            elif self.member.left is None or view > self.member.left:
                self.early.setdefault(view, []).append((source, key, payload))
            return
        if key[0] == _BYE:
            mesh.parted = True
            self.run()
            return
        got = mesh.buffers.setdefault(key, {})
        got[source] = payload
        if len(got) == len(mesh.peers) or key[0] == _OUTCOME:
            self.run()

    def peer_lost(self, view: ViewId, peer: str) -> None:
        """The connection to a peer ended without a goodbye."""
        if self.mesh is not None and self.mesh.view.id == view and not self.mesh.parted:
            self.mesh.suspects.append(peer)
            self.run()

    def from_donor(self, serial: int, donor: str, kind: str, payload: Any) -> None:
        self.spare.receive(serial, donor, kind, payload)
        self.run()

    # --- a new view ----------------------------------------------------------------------------------------------
    def _begin_form(self, view: View) -> None:
        self.close_view()
        self.donor.flush(view)
        self._drain_until_s = self.kernel.now + self.world.scenario.drain_s
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
        if not self.spare.drained(view.id):
            self.kernel.after(self.world.scenario.drain_s, self, self.run)

    def _form(self) -> bool:
        mesh = self.in_view()
        view = mesh.view
        if self._entry is None:
            if not self.spare.drained(view.id) and self.kernel.now < self._drain_until_s:
                return False
            self.spare.finish(self.member.switched and self.kernel.rng.random() < 0.7)
            at_once = view.start or self.member.committed >= self.world.scenario.num_steps
            late, outcome = self.spare.last is not None, hash((*self.out, self.norm))
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
        for name in view.attached:
            feed = self.donor.feed_to(name)
            if view.members[0] == self.name and self.member.keeps_output and self.member.committed:
                feed.put("outcome", (self.member.committed - 1, 0, 1, (tuple(self.out), self.norm)))

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
        members = ex.todo.view.members
        self.member.decide(ex.headers, self.kernel.now)
        self.norm = self.world.variant.norm(ex.norms)
        self.world.oracle.decided(self, ex.todo.view, ex.todo.step, ex.headers)
        self._exchange, self._saving = None, [header.save for header in ex.headers]
        self.world.point("decide", self)
        portion = (ex.todo.step, members.index(self.name), len(members), (tuple(self.out), self.norm))
        for feed in self.donor.feeds.values():  # a joiner applies it while I do
            feed.put("outcome", portion)
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
