"""A lane of a replica where its lead is not: exchanged, committed and handed on when the lead says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from outlast.core.phases import Phase
from outlast.core.protocol import Node, View, ViewId
from outlast.errors import ViewAbandoned
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.checks.state_comparison import Comparison
from outlast.runtime.exchange.plane import ExchangeTask, Plane, Reduction
from outlast.runtime.exchange.row_plane import OneRank, RowSteps
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.host.environment import Environment
from outlast.runtime.joining.donor import LaneDonor
from outlast.runtime.member._heartbeat import ping
from outlast.runtime.member._phase_clock import PhaseClock
from outlast.runtime.member._plane_choice import lane_plane
from outlast.runtime.member._sibling_checks import FollowedChecks
from outlast.runtime.member._siblings import LOOK_S
from outlast.runtime.saving.member_saves import Saves
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.run_facts import device_name
from outlast.runtime.training.step_checks import Meta
from outlast.runtime.transport import rank_words as say
from outlast.runtime.transport.connections import Listener, PeersLost
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.rank_check_words import LaneGrams, LookAgain, RowsChosen, SlicesSaid
from outlast.runtime.transport.rank_path_words import LaneAnswers, LaneStalled

__all__ = ["FollowedLane"]


class _LeadAsked(OneRank):
    """The other ranks of a replica, to the plane of one that is not its lead."""

    follows = True

    def __init__(self, lane: FollowedLane) -> None:
        self._lane = lane

    def ask(self, mine: list[bytes]) -> list[bytes]:
        return self._lane.choice(mine)


class FollowedLane:
    """This rank's part of the state, its mesh with the ranks of its place in other replicas, and what it does there."""

    def __init__(
        self, env: Environment, engine: Engine, guards: Guarding, audit: float | str = 0.0, critical: Sequence[str] = ()
    ) -> None:
        assert env.lead is not None
        self.env, self.engine, self.pipe, self.guards = env, engine, env.lead, guards
        self.device = device_name(engine.device)
        self.checks = FollowedChecks(self, engine, guards, self.pipe.send, audit, critical)
        self.saves: Saves | None = None
        self.listener = Listener(env.run_id, env.me, env.secret, network=env.address, tls=env.tls)
        self.mesh: Mesh | None = None
        self.plane: Plane | None = None
        self.memories: dict[str, Memory] = {}
        self.view: View | None = None
        self.clock = PhaseClock(env.progress, env.config)
        self.committed = 0
        self.donor = LaneDonor(env, engine, self.enter)
        self._begun: Plane | None = None  # in which an exchange has begun, under a backward
        self._joined = False
        self._told = b""  # of an outcome that was taken
        self._number = 0  # of the exchange that the lead waits for
        self.disguise: Callable[[Plane], Plane] = lambda plane: plane  # tests have a rank lie
        self._compares = False  # the state, in this view's first step, from when the loop is inside it
        self._comparison: Comparison | None = None

    def enter(self, phase: Phase, microbatch: int = -1, bucket: int = -1) -> None:
        """Publish where I am, and pass the fault point."""
        self.clock.enter(phase, self.committed, microbatch, bucket)
        if self.env.probe.faults:
            self.env.probe(phase, self.committed, microbatch, bucket)

    def _compare(self) -> None:
        """In a view's first step, from where the loop is inside it, fingerprint the whole of my part of the state, as
        the lead does of its own."""
        if self._compares and self.view is not None:
            self._compares = False
            self.engine.restore_buffers()
            self._comparison = Comparison((), self.engine.state, self.engine.moving)
            self.engine.frozen.append(self._comparison)

    # --- the lane of a view --------------------------------------------------------------------------------------
    def _form(self, word: say.FormLane) -> None:
        self._close()
        self.view, self._compares, self._comparison = word.view, word.compare, None
        self.enter(Phase.CONNECT)
        self.engine.sums.keep(word.held)
        mesh = self.mesh = Mesh(
            self.listener,
            word.view,
            word.addresses,
            self.engine.memory.region,
            wake_fd=self.pipe.wake_fd,
            abandoned=lambda: self._over(word.view),
            patience=self.clock.patience,
            on_stall=lambda phase, missing, waited_s: self._stalled(word.view, phase, missing, waited_s),
            probe=self.env.probe,
        )
        try:
            mesh.form()
            self.plane = self._plane_of(mesh)
        except ViewAbandoned:
            self._close()  # told when something is asked of this lane

    def _plane_of(self, mesh: Mesh) -> Plane:
        """Raises ViewAbandoned if its group does not form."""
        for name, region in self.listener.regions.items():
            if name not in self.memories:
                self.memories[name] = Memory(self.engine.layout, self.engine.memory.num_slots, region)
        plane = lane_plane(self.env, self.engine, mesh, self.memories, self._entered)
        if isinstance(plane, RowSteps):
            plane.ranks = _LeadAsked(self)
        return self.disguise(plane)

    def choice(self, mine: list[bytes]) -> list[bytes]:
        """Tell the lead my lane's part of the Gram matrices, and wait for the whole ones. Raises ViewAbandoned."""
        inbox = self.pipe.inbox
        self.pipe.send(LaneGrams(self._number, tuple(mine)))
        self.clock.enter(Phase.IDLE, self.committed)  # as whoever waits for the lead
        while not inbox or not isinstance(inbox[0], RowsChosen) or inbox[0].number != self._number:
            if inbox and isinstance(inbox[0], RowsChosen):
                inbox.popleft()  # of an exchange that a view's end has cut off
                continue
            if self.mesh is None:
                raise ViewAbandoned("the view is closed")
            self.mesh.rest(LOOK_S)
        return list(inbox.popleft().totals)

    def _stalled(self, view: View, phase: Phase, missing: tuple[str, ...], waited_s: float) -> None:
        """Say whom this lane waits for; the coordinator has them looked at. Who can say so does not hang itself."""
        self.env.progress.alive()
        said = LaneStalled(view.id, phase, missing, waited_s, self.clock.patience(phase))
        self.pipe.send(said)

    def _entered(self, phase: Phase, bucket: int) -> None:
        self.enter(phase, bucket=bucket)

    def _over(self, view: View) -> bool:
        mesh = self.mesh
        if mesh is not None and self.pipe.to_probe == view.id:
            self.pipe.to_probe = ViewId(0, 0)
            ping(mesh, lambda reached: self.pipe.send(LaneAnswers(view.id, reached)))
        return self.dropped or self.pipe.view_over >= view.id

    @property
    def dropped(self) -> bool:
        """Whether the lead has already said that the view, or the run, is over."""
        return any(isinstance(word, say.DropLane | say.EndRun) for word in tuple(self.pipe.inbox))

    def _drop(self, word: say.DropLane) -> None:
        self._close()

    def _close(self) -> None:
        self.clock.interrupted()
        if self.plane is not None:
            self.plane.close()
        if self.mesh is not None:
            self.mesh.close()
        self.plane = self.mesh = None

    def _reduce(self, word: say.ReduceLane) -> None:
        self._number = word.number
        try:
            found = self._reduced(word)
        except ViewAbandoned as reason:
            self._broken(word.number, reason)
            return
        engine, step = self.engine, word.task.step
        agreed = self._comparison.told() if self._comparison is not None else self.guards.agreement.fingerprint(step)
        told = engine.lane_evidence(found)
        self.pipe.send(
            say.LaneReduced(
                number=word.number,
                fingerprint=found.fingerprint,
                state=agreed[1],
                guard=self.guards.note(step),
                unlike=tuple(sorted(found.unlike)),
                false=tuple(sorted((*key, value) for key, value in found.false.items())),
                settings=engine.loop.digest(engine.loop.settings),
                can_save=self.saves is None or self.saves.ready(),
                **told,
            )
        )

    def _reduced(self, word: say.ReduceLane) -> Reduction:
        begun, self._begun = self._begun, None
        plane, engine = self.plane, self.engine
        if plane is None or self.mesh is None:
            raise ViewAbandoned("this lane did not form")
        self._compare()
        engine.loop.check()
        if begun is None or begun is not plane:
            plane.begin(self._exchange(self.mesh, word.task, engine.sums.slots))
            for bucket in range(len(engine.layout.buckets)):
                plane.offer(bucket)
        return plane.finish()

    def announcer(self, todo: say.ComputeLeaf) -> Callable[[int], None] | None:
        """For the last microbatch before an exchange: offer each bucket as soon as it is folded. Never raises."""
        plane, mesh, task = self.plane, self.mesh, todo.ahead
        if task is None or plane is None or mesh is None:
            return None
        self._begun = plane
        trouble: list[ViewAbandoned] = []

        def announce(bucket: int) -> None:
            if not trouble:
                try:
                    if bucket == 0:
                        plane.begin(self._exchange(mesh, task, self.engine.sums.after()))
                    plane.offer(bucket)
                except ViewAbandoned as reason:  # recorded: the view is over, as `finish` will find (13)
                    trouble.append(reason)
                self.clock.enter(Phase.BACKWARD, todo.step, todo.leaf)  # FSDP's again, which may wait for other ranks

        return announce

    def _exchange(self, mesh: Mesh, task: say.LaneTask, slots: Mapping[Node, int]) -> ExchangeTask:
        engine, mine = self.engine, task.nodes[mesh.view.members.index(self.env.me)]
        flips = engine.step_checks.flips
        return ExchangeTask(
            step=task.step, nodes=task.nodes, slots=tuple(slots[node] for node in mine),
            num_leaves=engine.num_leaves, scale=engine.scale(task.step), with_norms=task.with_norms,
            on_scattered=self._scattered, sent=engine.sums.sent if task.printing else None, checks=engine.checks,
            on_reduced=flips.after_reduction if flips.active else None,
        )  # fmt: skip

    def _broken(self, number: int, reason: ViewAbandoned) -> None:
        suspects: Sequence[str] = reason.suspects if isinstance(reason, PeersLost) else ()
        self._close()
        self.pipe.send(say.LaneBroken(number, tuple(suspects), str(reason.message)))

    def _scattered(self) -> None:
        """All in this lane have offered sums of this step: so all have committed the one before."""
        if self.saves is not None and self.mesh is not None:
            self.saves.stable(self.mesh.view.id, self.committed)

    # --- outcomes ------------------------------------------------------------------------------------------------
    def _apply(self, word: say.ApplyOutcome) -> None:
        meta = msgspec.msgpack.decode(word.meta, type=Meta)
        self.enter(Phase.VERDICT)
        self.engine.clip(meta)
        early = self.engine.robust is None  # as the lead does
        if word.feed is not None:
            self.donor.keep(word.feed, meta)
        if word.feed is not None and early:
            self.donor.feed(word.feed, meta)
        self.engine.step_checks.tries = word.tries
        self.engine.apply(meta, self.enter)
        if word.feed is not None and not early:
            self.donor.feed(word.feed, meta)
        self.committed, self._comparison = meta.step + 1, None
        self.enter(Phase.COMMIT)

    def _give(self, word: say.GiveOutcome) -> None:
        if self.plane is None:
            return
        self.enter(Phase.HAND_OVER_SEND)
        try:
            self.plane.give(word.step, self.engine.told(joined=word.joined), word.to)
        except ViewAbandoned as reason:
            self._broken(word.number, reason)

    def _take(self, word: say.TakeOutcome) -> None:
        self.enter(Phase.HAND_OVER_RECEIVE)
        try:
            if self.plane is None:
                raise ViewAbandoned("this lane did not form")
            if not self._told:  # else it was taken in another view, which ended before all lanes had it
                self._joined = self.engine.late is not None
                self.engine.settle(self.enter)
            self._told = self.plane.take(word.step, word.donor)
        except ViewAbandoned as reason:
            self._broken(word.number, reason)
            return
        self.pipe.send(say.LaneTaken(word.number))

    def _settle(self, word: say.SettleOutcome) -> None:
        told, self._told = self._told, b""
        meta = self.engine.heard(told, joined=self._joined)
        if not self._joined:
            self.engine.live(self.enter)
        self.committed = meta.step + 1

    def _live(self, word: say.LiveOutcome) -> None:
        self.enter(Phase.JOIN_REPLAY)
        self.engine.live(self.enter)

    def _look_again(self, word: LookAgain) -> None:
        try:
            found = self.plane.look_again(word.slices) if self.plane is not None else {}
        except ViewAbandoned as reason:
            self._broken(word.number, reason)
            return
        self.pipe.send(SlicesSaid(word.number, tuple((*key, *both) for key, both in found.items())))

    def _tell_state(self, word: say.AskFingerprint) -> None:
        self.pipe.send(say.FingerprintSaid(word.number, self.engine.fingerprint()))
