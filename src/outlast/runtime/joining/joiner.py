"""A joiner's life: wait to be served, receive the snapshot, replay outcomes, be at most one step behind for ever.

The class is called `Spare`: a spare is a joiner that never stops. It runs on the training thread of a process that is
in no view. What it holds is complete at every moment: a state at a step, and pieces of the next outcomes. What cannot
be completed any more is thrown away and asked for again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from outlast.core.phases import Phase
from outlast.core.protocol import Member, View
from outlast.errors import ViewAbandoned
from outlast.runtime.host.environment import Environment
from outlast.runtime.joining._idle_test import IdleTest
from outlast.runtime.joining.inflow import SILENT_S, Inflow
from outlast.runtime.joining.other_lanes import OtherLanes
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.warm_memory import at_low_priority
from outlast.runtime.transport.connections import Arrivals
from outlast.runtime.view.port import CoordinatorLink

__all__ = ["Spare"]

_ENOUGH = 8  # outcomes, half of what may wait in a donor before it gives a joiner up


class Spare:
    """See the module."""

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
        self.engine, self.link, self.member, self.lock, self.enter = engine, link, member, lock, enter
        self.inflow = Inflow(engine, enter, donors, link.wake_fd, env.config.replicas)
        self.others = others if others is not None else OtherLanes()
        self._test = IdleTest(engine.layout.device, link, env.me)
        self._grace_s = env.config.ack_s
        self._orphaned_at = 0.0
        self.applied: Callable[[], None] = lambda: None  # told of each outcome
        self._replayed = 0  # outcomes, since the state was loaded
        self.late = False  # the roll call is told of an outcome as if it were applied here

    def idle(self, timeout_s: float) -> None:
        """Wait for the coordinator's word; streams are read meanwhile."""
        self.inflow.take_in(min(timeout_s, 1.0))

    def follow(self) -> None:
        """One turn of following: take in what arrived, replay what is complete, say when caught up."""
        if self.member.serve_id != self.inflow.serving:
            self._restart()
        if self.inflow.loaded:
            self.inflow.take_in(1.0)
        else:  # nobody waits for me before I have a state, however large: who trains has the processor first
            at_low_priority(lambda: self.inflow.take_in(1.0))
        self._replay()
        self.enter(Phase.IDLE)
        if self.member.state == "ready":
            self._test.turn()
        self._give_up_if_orphaned()

    def _restart(self) -> None:
        """A new serving was ordered (or the old one called off)."""
        self.late = False
        self._orphaned_at = 0.0
        self.others.serve(self.member.serve_id)
        self.inflow.serve(self.member.serve_id)

    def _replay(self, late: bool = False) -> None:
        if not self.inflow.loaded:
            self._load()
            if not self.inflow.loaded:
                return
            self.inflow.take_in(0.0)  # donors went on meanwhile: what I knew of them is as old as the load is long
        replayed = self.member.committed
        while (pieces := self.inflow.complete(step := self.member.committed)) is not None and self.others.has(step):
            self.others.replay(step)
            self.inflow.apply(step)
            self.applied()
            self.late = late and pieces.last  # an older view's last step was not the last after all
            with self.lock:
                self.member.replayed(self.member.committed + 1, keeps_output=not self.late)
            self._replayed += 1
            if self.late:
                return
        if self.member.committed > replayed:
            self.enter(Phase.JOIN_READY)  # what follows is a wait for others, however long they take
        if self._near() and self.member.state == "joining":
            self.enter(Phase.JOIN_READY)
            with self.lock:  # served anew meanwhile: what is here is of the serving that was called off
                mine = self.member.serve_id == self.inflow.serving
                answers = self.member.caught_up(self.member.committed) if mine else []
            self.link.send(answers)

    def _near(self) -> bool:
        """Whether I am at most a step behind: by what is here, and by what my donors still have for me. Where steps
        are so short that something is always on its way, that lasts a few steps only."""
        coming = any(stream.coming for stream in self.inflow.streams.incoming if not stream.ended)
        return len(self.inflow.steps) <= 1 and (not coming or self._replayed >= _ENOUGH)

    def _load(self) -> None:
        """The snapshot is complete when the shares tile the state, in each lane."""
        shares = self.inflow.tiles()
        if not shares or not self.others.whole(self.inflow.serving):
            return
        steps = {shares[0][0].committed, *self.others.steps()}
        if not self.inflow.fit(shares) or len(steps) > 1:
            self._ask_again()
            return
        self.others.load(self.inflow.serving)
        self.inflow.load(shares)
        with self.lock:
            self.member.replayed(self.inflow.committed)
        self._replayed = 0

    def drain(self, view: View) -> None:
        """Before joining a view: everything that was sent up to it. Ends when each stream said so or ended; of who is
        not in the view also after a while, since his host may have fallen silent.

        The last outcome is left for `live`, as the loop goes through its step. Who is switched into the view by an
        order says so in the roll: then its members do not wait, in the first step, for gradients of this replica. With
        a robust rule rows decide in which views may be computed at all, so there it takes its share from the first."""
        self.inflow.touched = True  # from here on others may read what lies there
        late = self.member.switched and self.engine.robust is None
        self.others.drain(view, self.member.switched)
        until_s = time.monotonic() + (self._grace_s if self.member.switched else SILENT_S)
        while waits_s := self.inflow.unsaid_s(view, until_s):
            if self.member.over(view.id):
                break
            self.inflow.take_in(waits_s)
            if self.inflow.loaded:  # at once: its members wait for what is left when the last has sent the last word
                self._replay(late)
        self.others.drained(view, lambda: self.member.over(view.id))
        if self.inflow.loaded:
            self._replay(late)
        self.others.over()
        self.inflow.over()
        if self.member.over(view.id):
            raise ViewAbandoned("the view ended while the joiner caught up")

    def live(self) -> None:
        """The loop is in the step whose outcome was left for it: apply it."""
        self.enter(Phase.JOIN_REPLAY)
        self.others.live()
        self.engine.live(self.enter)
        late, self.late = self.late, False
        if late:
            with self.lock:
                self.member.caught_up_late()

    def _give_up_if_orphaned(self) -> None:
        """A stream that ended leaves a gap, unless a new view sends the outcome whole: then ask to be served anew."""
        if self.member.committed >= (self.member.until or math.inf):
            return  # the last step is here: nothing more comes, but an end, or a view should all its members die
        now = time.monotonic()
        behind = any(step > self.member.committed for step in self.inflow.steps)
        if not any(s.ended for s in self.inflow.streams.incoming) and not behind:
            self._orphaned_at = 0.0
        elif not self._orphaned_at:
            self._orphaned_at = now
        elif now - self._orphaned_at > self._grace_s:
            live = [s for s in self.inflow.streams.incoming if not s.ended]
            if behind or not live:
                self._ask_again()
            else:
                self.inflow.streams.incoming = live
                self._orphaned_at = 0.0

    def _ask_again(self) -> None:
        with self.lock:
            answers = self.member.rejoin()
        self.link.send(answers)
        if answers:  # else it was told a view, or to start again, meanwhile
            self._restart()

    def close(self) -> None:
        self.inflow.streams.close()
