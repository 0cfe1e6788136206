"""A joiner's life: wait to be served, receive the snapshot, replay outcomes, be at most one step behind for ever.

The class is called `Spare`: a spare is a joiner that never stops. It runs on the training thread of a process that is
in no view. What it holds is complete at every moment: a state at a step, and pieces of the next outcomes. What follows
from that is decided by `core/protocol/step/catching_up.py`, which the adversary runs as well; here it is carried out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from outlast.core.phases import Phase
from outlast.core.protocol import Member, ServeId, View
from outlast.core.protocol.step.catching_up import CatchingUp, DonorStream
from outlast.runtime.host.environment import Environment
from outlast.runtime.joining._idle_test import IdleTest
from outlast.runtime.joining.inflow import Inflow
from outlast.runtime.joining.other_lanes import OtherLanes
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.warm_memory import at_low_priority
from outlast.runtime.transport.connections import Arrivals
from outlast.runtime.view.port import CoordinatorLink

__all__ = ["Spare"]


class Spare:
    """A replica that is in no view: takes in what its donors send, and does what `CatchingUp` makes of it."""

    def __init__(
        self,
        env: Environment,
        engine: Engine,
        link: CoordinatorLink,
        member: Member,
        lock: threading.RLock,
        enter: Callable[..., None],
        donors: Arrivals,
        others: OtherLanes | None = None,
    ) -> None:
        self.engine, self.member, self.enter = engine, member, enter
        inflow = Inflow(engine, enter, donors, link.wake_fd, env.config.replicas)
        self.lanes = JoiningLanes(inflow, others if others is not None else OtherLanes(), link, enter)
        self.course = CatchingUp(member, lock, self.lanes, env.config.ack_s)
        self._test = IdleTest(engine.device, link, env.me)

    @property
    def late(self) -> bool:
        """Whether the roll call is told of an outcome as if it were applied here."""
        return self.course.late

    def idle(self, timeout_s: float) -> None:
        """Wait for the coordinator's word; streams are read meanwhile."""
        self.lanes.inflow.take_in(min(timeout_s, 1.0))

    def follow(self) -> None:
        """One turn of following: take in what arrived, replay what is complete, say when caught up."""
        inflow = self.lanes.inflow
        self.course.begin_turn()
        if inflow.loaded:
            inflow.take_in(1.0)
        else:  # nobody waits for me before I have a state, however large: who trains has the processor first
            at_low_priority(lambda: inflow.take_in(1.0))
        self.course.advance()
        self.enter(Phase.IDLE)
        if self.member.state == "ready":
            self._test.turn()
        self.course.give_up_if_orphaned(time.monotonic())

    def drain(self, view: View) -> None:
        """Before joining a view: everything that was sent up to it. Ends when each stream said so or ended; of who is
        not in the view also after a while, since his host may have fallen silent. Raises ViewAbandoned.

        With a robust rule rows decide in which views may be computed at all, so there who is switched into a view takes
        its share from the first step; else it is late (`CatchingUp.drained`)."""
        inflow, others = self.lanes.inflow, self.lanes.others
        inflow.touched = True  # from here on others may read what lies there
        late = self.member.switched and self.engine.robust is None
        others.drain(view, self.member.switched)
        self.course.begin_drain(time.monotonic())
        while waits_s := self.course.drain_s(view, time.monotonic()):
            inflow.take_in(waits_s)
            if inflow.loaded:  # at once: its members wait for what is left when the last has sent the last word
                self.course.replay(late)
        others.drained(view, lambda: self.member.over(view.id))
        self.course.drained(view, late=late)

    def live(self) -> None:
        """The loop is in the step whose outcome was left for it: apply it."""
        self.enter(Phase.JOIN_REPLAY)
        self.lanes.others.live()
        self.engine.live(self.enter)
        self.course.live()

    def close(self) -> None:
        self.lanes.inflow.streams.close()


class JoiningLanes:
    """What has arrived in the lanes of a joining replica: its lead's own, and what its other ranks say of theirs. The
    runtime's `JoinerPort`. `applied`: told of each outcome."""

    def __init__(self, inflow: Inflow, others: OtherLanes, link: CoordinatorLink, enter: Callable[..., None]) -> None:
        self.inflow, self.others, self._link, self._enter = inflow, others, link, enter
        self.applied: Callable[[], None] = lambda: None

    @property
    def serving(self) -> ServeId:
        return self.inflow.serving

    @property
    def loaded(self) -> bool:
        return self.inflow.loaded

    @property
    def steps(self) -> Collection[int]:
        return self.inflow.steps

    @property
    def streams(self) -> Sequence[DonorStream]:
        return self.inflow.streams.incoming

    def serve(self, serving: ServeId) -> None:
        self.others.serve(serving)
        self.inflow.serve(serving)

    def snapshot(self) -> Literal["incomplete", "unfit", "whole"]:
        """The snapshot is complete when the shares tile the state, in each lane."""
        shares = self.inflow.tiles()
        if not shares or not self.others.whole(self.inflow.serving):
            return "incomplete"
        steps = {shares[0][0].committed, *self.others.steps()}
        return "whole" if self.inflow.fit(shares) and len(steps) == 1 else "unfit"

    def load(self) -> int:
        self.others.load(self.inflow.serving)
        self.inflow.load(self.inflow.tiles())
        self.inflow.take_in(0.0)  # donors went on meanwhile: what I knew of them is as old as the load is long
        return self.inflow.committed

    def outcome(self, step: int) -> Literal["incomplete", "whole", "last"]:
        pieces = self.inflow.complete(step)
        if pieces is None or not self.others.has(step):
            return "incomplete"
        return "last" if pieces.last else "whole"

    def replay(self, step: int, *, late: bool) -> None:
        """It takes its place in `out`, and is applied by the next one, or by `Spare.live`."""
        self.others.replay(step)
        self.inflow.apply(step)
        self.applied()

    def keep_live(self) -> None:
        streams = self.inflow.streams
        streams.incoming = [stream for stream in streams.incoming if not stream.ended]

    def over(self) -> None:
        self.others.over()
        self.inflow.over()

    def ready(self) -> None:
        self._enter(Phase.JOIN_READY)

    def say(self, messages: Sequence[Any]) -> None:
        self._link.send(messages)
