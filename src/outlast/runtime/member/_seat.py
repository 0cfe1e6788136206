"""A member's place in its run: what it holds, what others know it by, and how it leaves a view.

Role: sockets, streams, the link, the clock and the training state of one replica, put together once; nothing here
decides what comes next (`driver.py`) or how a view forms (`_forming.py`). Its locks: `lock` is held while the pure
`member` is asked or told, by whichever thread.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from outlast.core.phases import Phase
from outlast.core.protocol import (
    Member,
    RollEntry,
    StepPlan,
    View,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.verdict import PartRows
from outlast.errors import ViewAbandoned
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.checks.lane_checks import rows_of_ranks
from outlast.runtime.checks.state_comparison import Comparison
from outlast.runtime.exchange.plane import Plane
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.host.environment import Environment
from outlast.runtime.joining.donor import Donor
from outlast.runtime.joining.joiner import Spare
from outlast.runtime.member._heartbeat import Pace, ping, stalled
from outlast.runtime.member._phase_clock import PhaseClock
from outlast.runtime.member._rank_reports import failure_of, path_of
from outlast.runtime.member._sibling_checks import SiblingChecks
from outlast.runtime.member._sibling_lanes import SiblingLanes
from outlast.runtime.member._siblings import Siblings
from outlast.runtime.member.link import MemberLink, SoloLink
from outlast.runtime.saving.member_saves import Saves
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.run_facts import device_name
from outlast.runtime.training.script_files import script_files
from outlast.runtime.transport.connections import Listener, PeersLost
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.endpoints import lanes_address
from outlast.runtime.transport.frames import Heartbeat
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.rank_path_words import LaneAnswers, LaneStalled, ProbeLane
from outlast.runtime.transport.rank_words import RankFailed
from outlast.runtime.view.rounds import Channel, round_of

__all__ = ["MemberSeat", "T"]

T = TypeVar("T")


class MemberSeat:
    """Holds what a member has, and leaves a view. What it does for others they know as `ViewPort`."""

    def __init__(self, env: Environment, engine: Engine, facts: dict[str, str], guards: Guarding) -> None:
        self.env, self.engine, self.facts, self.guards = env, engine, facts, guards
        self._files = script_files() if env.coordinator is not None else {}
        self.device = device_name(engine.device)
        by_host = env.config.fault_domain == "host"
        self.member = Member(env.me, engine.num_leaves, num_rows=engine.num_rows, rows_by_host=by_host)
        self.lock = threading.RLock()
        self.probe, self.progress = env.probe, env.progress
        self._store: Any = None
        if env.exchange != "shm" and engine.layout.device.type == "cuda":
            from outlast.runtime.exchange.c10d_plane import LOOPBACK, open_store

            self._store, env.store = open_store(env.address or LOOPBACK)
        self.listener = Listener(
            env.run_id, env.me, env.secret, alone=env.coordinator is None, network=env.address, tls=env.tls
        )
        self.link = self._make_link()
        self.siblings = Siblings(
            env.pipes, self.link.wake_fd, self._own_ranks_stalled, lambda: self.patience(self.clock.phase)
        )
        for pipe in env.pipes:
            pipe.on_failed = functools.partial(self._rank_failed, pipe.place)
            pipe.on_path = functools.partial(self._lane_said, pipe.place)
            pipe.on_noted = lambda said: self.link.send([said])
        self.siblings.meet(facts)
        if self.siblings.some:
            self.link.on_told = lambda: self.siblings.hear_of_end(self.member.over)
            guards.others = SiblingChecks(self.siblings)
        lanes = SiblingLanes(self.siblings) if self.siblings.some else None
        self.spare = Spare(env, engine, self.link, self.member, self.lock, self.enter, self.listener.feeds, lanes)
        self.mesh: Mesh | None = None
        self.plane: Plane | None = None
        self.memories: dict[str, Memory] = {}
        self.donor = Donor(env, engine, self.member, self.enter, self.siblings.tell)
        self._left_at_s = 0.0
        self._told: m.Formed | None = None  # what the coordinator was told of the newest view that formed
        self.last_plan: StepPlan | None = None
        self._entries: list[RollEntry] = []
        self.comparison: Comparison | None = None  # of states, in a view's first step
        self._compared = True
        self.disguise: Callable[[Plane], Plane] = lambda plane: plane  # tests have a replica lie
        self.pace = Pace(env.progress)
        self.clock = PhaseClock(env.progress, env.config, self.pace.passed)
        self.spare.lanes.applied = self.pace.replayed
        engine.on_stop = self._stop_after
        self.on_formed: Callable[[], None] = lambda: None  # told of each view that works
        self._departed = self._retired = False
        self.saves: Saves | None = None  # the run's checkpoints, if it keeps any

    def _make_link(self) -> MemberLink | SoloLink:
        env = self.env
        if env.coordinator is not None and env.config.lease_s < math.inf:
            self.member.lease_until_s = 0.0  # until the first heartbeat was answered
        if env.coordinator is None:
            return SoloLink(self.member, self.lock)
        folder = env.run_dir if env.config.record != "sqlite" else None
        place = CoordinatorPlace(env.coordinator, folder, env.run_id)
        self.listener.followed = lambda at, epoch: epoch >= self.member.epoch and place.followed(at, epoch)
        return MemberLink(
            place,
            env.secret,
            self.member,
            self.lock,
            hello=self._hello,
            beat=self._beat,
            asked=self._asked,
            heartbeat_s=env.config.heartbeat_s,
            lease_s=env.config.lease_s,
            run=env.run_id,
            refused=lambda reason: self.listener.mesh.refuse(reason, "the coordinator"),
            tls=env.tls,
        )

    def _rank_failed(self, place: int, failed: RankFailed) -> None:
        self.siblings.all_there(but=place)
        self.tell_of(failed)

    def tell_of(self, failed: RankFailed) -> None:
        """Another rank's script has raised: the coordinator is told that."""
        self.link.send([failure_of(self.env.me, self.member.committed, failed)])
        self.siblings.reported = True

    def parts(self) -> PartRows:
        """Fingerprints of the tensors of this replica's state, of all its ranks."""
        return rows_of_ranks([tuple(self.engine.parts()), *self.guards.others.rows(-1)])

    @property
    def view(self) -> View | None:
        """The newest view that this replica was told."""
        return self.member.view

    # --- what others see -----------------------------------------------------------------------------------------
    def enter(self, phase: Phase, microbatch: int = -1, bucket: int = -1) -> None:
        """Publish where I am, learn how long the last phase took, and pass the fault point."""
        step = self.member.committed
        self.clock.enter(phase, step, microbatch, bucket)
        if self.probe.faults:
            self.probe(phase, step, microbatch, bucket)

    def everyone(self, mine: T, phase: Phase) -> dict[str, T]:
        """See `ViewPort`."""
        if self.mesh is None:
            raise ViewAbandoned("the view is closed")
        return self.mesh.everyone(mine, phase)

    def on(self, channel: Channel[T], step: int, mine: T, phase: Phase, turn: int = 0) -> dict[str, T]:
        """See `ViewPort`."""
        if self.mesh is None:
            raise ViewAbandoned("the view is closed")
        return round_of(self.mesh, channel, step, mine, phase, turn)

    def tell_coordinator(self, messages: Iterable[Any]) -> None:
        """See `ViewPort`."""
        self.link.send(messages)

    def patience(self, phase: Phase) -> float:
        """How long to wait for others in a phase before they are named."""
        return self.clock.patience(phase)

    def _hello(self) -> m.Hello:
        facts = self.facts | self._files
        address = lanes_address([self.listener.address, *self.siblings.addresses])
        hello = self.member.hello(self.env.agent, facts, address, self.env.store, self.device)
        return msgspec.structs.replace(hello, told=self._told if self.member.formed else None)

    def _beat(self, again: bool = False) -> Heartbeat:
        with self.lock:
            view = self.member.view
            return Heartbeat(
                sender=self.env.me,
                sent_s=time.monotonic(),
                view=(view.id.epoch, view.id.n) if view else (0, 0),
                committed=self.member.committed,
                stable=self.member.stable,
                losses=self.pace.take(),
                step_s=self.pace.step_s,
                until=self.member.until or 0,
                sent_messages=self.link.sent,
                certified=self.member.audits.certificate,
                steps=self.pace.steps(again),
                parts=self.pace.parts.take(),
                refused=self.listener.refused,
            )

    def _asked(self, probe: m.ProbePaths) -> None:
        """The coordinator wants to know which paths work: asks the training thread to ping, if it waits or once it
        does."""
        mesh = self.mesh
        if mesh is not None and mesh.view.id == probe.view:
            mesh.ping_wanted = True
        self.siblings.tell(ProbeLane(probe.view))

    def _lane_said(self, place: int, said: LaneStalled | LaneAnswers) -> None:
        self.link.send([path_of(self.env.me, place, said)])

    def _stop_after(self, steps: int) -> None:
        """Some member's loop has asked that training ends: all have it from the same step's outcome."""
        with self.lock:
            self.member.until = min(steps, self.member.until or steps)

    # --- leaving a view ------------------------------------------------------------------------------------------
    def abandon(self, reason: ViewAbandoned) -> None:
        """Leave the view: peers hear a goodbye, the coordinator hears why unless it already knows."""
        now = time.monotonic()
        self.clock.interrupted()
        if not self._left_at_s:
            self._left_at_s = now
        self.enter(Phase.LEAVE)
        suspects = reason.suspects if isinstance(reason, PeersLost) else ()
        with self.lock:
            answers = self.member.lost(suspects, str(reason.message), now)
        self.link.send(answers)
        self._close_view()

    def _close_view(self) -> None:
        if self.mesh is not None:
            self.siblings.drop()
        if self.plane is not None:
            self.plane.close()
        if self.mesh is not None:
            self.mesh.close()
        self.plane = self.mesh = None

    def _over(self, view: View) -> bool:
        mesh = self.mesh
        if mesh is not None and mesh.ping_wanted:
            ping(mesh, lambda reached: self._lane_said(0, LaneAnswers(mesh.view.id, reached)))
        return self.member.over(view.id) or self.member.evicted is not None or self.member.closed is not None

    def _stalled(self, phase: Phase, missing: tuple[str, ...], waited_s: float) -> None:
        stalled(self, phase, missing, waited_s, self.patience(phase))

    def _own_ranks_stalled(self, waited_s: float) -> None:
        """This replica's lanes are not complete yet: have its own ranks looked at as well."""
        self._stalled(self.clock.phase, (self.env.me,), waited_s)
