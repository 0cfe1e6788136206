"""A replica's process in the simulated world: its link, its peers, and a training thread that does one thing at a time.

What there is to do, and how a view forms, is `_replica.py`'s. Decides nothing: `core.protocol.Member` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

from outlast.core.protocol import (
    Member,
    Node,
    RollEntry,
    ViewId,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.effects import Seat
from outlast.errors import Evicted, GuardStop, ProtocolViolation, StateDiverged, ViewAbandoned
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._audit import Auditor
from outlast.prove.adversary._donor import SimulatedDonor
from outlast.prove.adversary._hosts import Dialler
from outlast.prove.adversary._mesh import SimulatedMesh
from outlast.prove.adversary._network import Dialled
from outlast.prove.adversary._saves import SaveWord, SimulatedSaves
from outlast.prove.adversary._spare import SimulatedJoiner
from outlast.prove.adversary._surroundings import Owner, Supervisor, Surroundings

__all__ = ["SimulatedSeat"]


_BYE = "bye"
_WRITTEN = frozenset({"S", "host sums", "home"})  # received where it will be read
_AT_ONCE = frozenset({"O", "offered"})  # looked at though others have yet to send theirs


class SimulatedSeat(Dialler, Owner):
    """Holds what a simulated replica has: its link, its peers, and what it is doing. A subclass knows what there is to
    do."""

    def __init__(self, world: Surroundings, name: str, agent: Supervisor) -> None:
        super().__init__(world, name)
        scenario, self.agent = world.scenario, agent
        self.member: Member = world.variant.member(
            name,
            scenario.num_microbatches,
            until=scenario.num_steps,
            num_rows=scenario.num_rows,
            rows_by_host=scenario.rows_by_host,
        )
        self.lease_until_s = math.inf  # as granted, whatever the member makes of it
        if scenario.lease_s < math.inf:
            self.lease_until_s = self.member.lease_until_s = -1.0  # until the first heartbeat is answered
        self.state, self.norm = algebra.INITIAL, 0
        self.sums: dict[Node, algebra.Gradient] = {}
        self.out: list[int] = list(algebra.EMPTY)
        self.shown: list[int] = list(algebra.EMPTY)
        self.mesh: SimulatedMesh | None = None
        self.abandoned: dict[ViewId, SimulatedMesh] = {}
        self.early: dict[ViewId, list[tuple[str, Any, Any]]] = {}
        self.copies = world.variant.copies()
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
        self._passed = False  # whether the barrier after the last step is
        self._handed = False  # whether what a donor handed over is applied
        self.busy = self.hung = self._running = False
        self.slowness = 1.0
        self.exit: Literal["signal", "finished", "exception"] = "signal"  # how it ends, as its agent sees it
        self.progress_at = self.kernel.now
        self._awaited: tuple[Any, ...] = ()
        self._doing: Callable[[], bool] | None = None
        self.dial()
        self.kernel.after(scenario.stall_s, self, self._watch)
        if scenario.lease_s < math.inf:
            self._beat()

    @property
    def in_mesh(self) -> bool:
        return self.mesh is not None

    # --- the link to the coordinator -----------------------------------------------------------------------------
    def greeting(self) -> m.Hello:
        facts = {"microbatches": str(self.member.num_microbatches)}
        facts |= {"checkpoints": "kept"} if self.saves is not None else {}
        facts |= self.world.scenario.host_facts()
        return self.member.hello(self.agent.name, facts, self.name, self.name)

    def told(self, link: Dialled, message: Any) -> None:
        if link.broken:
            return
        if isinstance(message, m.Welcome) and self.world.scenario.lease_s < math.inf:
            self.say(self.kernel.now)
        if isinstance(message, m.ProbePaths):
            return self._probed(message)
        if isinstance(message, SaveWord):
            if self.saves is not None:
                self.saves.told(message)
            return self.run()
        answers = self.member.told(message)
        self.world.oracle.told(self, message)
        self.say(*answers)
        self.run()

    def heartbeat_answered(self, link: Dialled, epoch: int, sent_at_s: float) -> None:
        if not link.broken:
            until_s = sent_at_s + self.world.scenario.lease_s
            if self.member.answered(epoch, until_s):
                self.lease_until_s = max(self.lease_until_s, until_s)
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
        self.kernel.after(self.world.scenario.stall_s, self, self._watch)
        if self.member.view is None:
            self.spare.give_up_if_orphaned()
        mesh, waited_s = self.mesh, self.kernel.now - self.progress_at
        if self.busy or self._doing is None or mesh is None:
            return
        allowed_s = self.world.scenario.allowed_s()
        if waited_s < allowed_s:
            return
        self.run()
        missing = tuple(self._missing())
        if missing and self.mesh is mesh:
            me, view = self.name, mesh.view.id
            self.say(m.Stalled(member=me, view=view, phase=0, missing=missing, waited_s=waited_s, deadline_s=allowed_s))

    def awaiting(self, *keys: Any) -> None:
        self._awaited = keys

    def _missing(self) -> list[str]:
        mesh = self.mesh
        assert mesh is not None
        return mesh.missing(self._awaited)

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
        if isinstance(error, Evicted):
            self.world.oracle.evicted(self.name)
        else:
            self.world.oracle.diverged(self)
        step, words = self.member.committed, error.message
        now_s = self.kernel.now
        self.say(
            m.Failed(member=self.name, step=step, microbatch=-1, error=words, alike=error.code, code=5, at_s=now_s)
        )
        self.exit = "exception"
        self.leave_run()

    def _begin(self) -> bool:
        """Ask what to do, and begin it; False: nothing."""
        raise NotImplementedError

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
        self._doing = None
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
                if key[0] in _WRITTEN:
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
        if len(got) == len(mesh.expected.get(key, mesh.peers)) or key[0] in _AT_ONCE:
            self.run()

    def peer_lost(self, view: ViewId, peer: str) -> None:
        """The connection to a peer ended without a goodbye."""
        if self.mesh is not None and self.mesh.view.id == view and not self.mesh.parted:
            self.mesh.suspects.append(peer)
            self.run()

    def from_donor(self, serial: int, donor: str, kind: str, payload: Any) -> None:
        self.spare.receive(serial, donor, kind, payload)
        self.run()
