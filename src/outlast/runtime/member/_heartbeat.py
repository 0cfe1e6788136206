"""What a member tells the coordinator of itself while it trains: heartbeats, who answers a ping, what it waits for."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

from outlast.checkpoint.threads import begin
from outlast.core.phases import Phase
from outlast.core.protocol import StepTime
from outlast.core.protocol import messages as m
from outlast.runtime.member._parts_meter import PartsMeter
from outlast.runtime.member._usual_step import UsualStep
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.view.port import ViewPort

__all__ = ["Pace", "ping", "stalled"]

_ANSWERS_S = 0.25  # how long answers to a ping are collected before they are reported


class Pace:
    """What heartbeats say of progress: losses, a running mean of the time of a step in a view of as many members as now
    (`step_s`), and the times of the newest steps, each divided by use. The training thread alone measures."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress, self._clock = progress, clock
        self._usual = UsualStep()
        self.resumed = False  # the newest commit was the first in its view
        self._losses: list[tuple[int, float]] = []
        self._committed_at_s = self._held_s = 0.0
        self._join: Literal["", "made by others", "made"] = ""  # this process came by joining: its newest step
        # Seconds without a view, microbatches of a step redone, and since when all wait in the newest view, or 0.
        self._change: tuple[float, float, float] | None = None
        self._longest = (0.0, Phase.IDLE)
        self._lock = threading.Lock()
        self._told = 0
        self.parts = PartsMeter(clock)

    @property
    def step_s(self) -> float:
        """How long a step takes now; 0 before the first one."""
        return self._usual.seconds

    def passed(self, phase: Phase, seconds: float) -> None:
        """A phase is over; the longest since the last commit is where a step that takes too long was held up."""
        self.parts.passed(phase, seconds)
        if seconds > self._longest[0]:
            self._longest = (seconds, phase)

    def formed(self, left_at_s: float, redone: float) -> None:
        """A view works. `left_at_s`: when the one before it was left, 0 if there was none; `redone`: the part of a
        step that is computed again."""
        now = self._clock()
        self._committed_at_s = self._committed_at_s or now
        before_s, _, waits_since_s = self._change or (0.0, 0.0, 0.0)  # a step may see several views come and go
        since_s = waits_since_s or left_at_s
        without_s = now - max(since_s, self._committed_at_s) if since_s else 0.0
        self._change = (before_s + max(0.0, without_s), redone, 0.0)

    def waits(self) -> None:
        """In the view that has just formed nobody computes: until the next one has, it is as if there were none. Before
        this process's first step the run has yet to begin."""
        without_s, redone, _ = self._change or (0.0, 0.0, 0.0)
        self._change = (without_s, redone, self._clock())
        if not self._usual.members:
            self._committed_at_s = 0.0

    def committed(self, step: int, members: int, held_s: float = 0.0) -> None:
        """The step was committed now, in a view of so many members; `held_s`: what saves have cost so far."""
        now = self._clock()
        self.parts.committed(members)
        if self._join == "made by others":
            self._join, self._change = "made", (0.0, 0.0, 0.0)
            if members > 1:  # others know better how long its first step took, if any of them was there before
                self._committed_at_s = now
                self._usual.changed(members)
                self.progress.commit(StepTime(step=step, end_s=now, took_s=0.0, first=True))
                return
        took_s, held_s, self._held_s = now - self._committed_at_s, held_s - self._held_s, held_s
        held_s = min(held_s, took_s)
        rest_s = took_s - held_s
        own_s, outage_s, redone_s = rest_s, 0.0, 0.0
        untold = self._change is None and self._join == "made" and members > 1 and not self._usual.known
        if self._change is not None:
            own_s, outage_s, redone_s = self._around_change(rest_s, members, *self._change[:2])
        elif rest_s > self._usual.surely_s:
            own_s = self._usual.seconds
        time_ = StepTime(
            step=step,
            end_s=now,
            took_s=took_s,
            held_s=held_s,
            stalled_s=rest_s - own_s - outage_s - redone_s,
            outage_s=outage_s,
            redone_s=redone_s,
            phase=self._longest[1],
            members=members,
            first=self._change is not None,
        )
        if self._change is None:
            self._usual.learn(rest_s, members)
        else:
            self._usual.changed(members)
        self.resumed, self._change = self._change is not None, None
        self._committed_at_s, self._longest = now, (0.0, Phase.IDLE)
        # All of it would count as work here, also what was none: others know what is usual.
        self.progress.commit(StepTime(step=step, end_s=now, took_s=0.0, members=members) if untold else time_)

    def _around_change(self, rest_s: float, members: int, without_s: float, redone: float) -> tuple[float, ...]:
        """(the step's own time, of the outage, of what was computed again), of a step with a change of view in it."""
        usual_s, seen_s = self._usual.seconds, max(0.0, rest_s - without_s)
        if not self._usual.known and (not usual_s or seen_s <= self._usual.limit_s):
            usual_s = seen_s
        all_s = usual_s * max(1.0, self._usual.members / members)  # as long as who is left takes for the work of all
        if self._usual.known:
            all_s = max(usual_s, self._usual.expected_s(members))
        if not redone:  # which they have done; a joiner's first step is computed by the others
            usual_s = all_s
        own_s = min(rest_s, usual_s) if without_s else rest_s
        redone_s = min(rest_s - own_s, redone * all_s)
        return own_s, rest_s - own_s - redone_s, redone_s

    def replayed(self) -> None:
        """A step that others made was applied here now."""
        self.parts.dropped()
        self._join = "made by others"

    def steps(self, again: bool = False) -> tuple[StepTime, ...]:
        """Times of the steps since the last call, or (`again`) of all that are still known."""
        with self._lock:
            told, self._told = 0 if again else self._told, self.progress.num_commits
            return self.progress.commits(told)

    def record(self, step: int, loss: float) -> None:
        """JSON has no other numbers than finite ones; of these the verdict tells."""
        if math.isfinite(loss):
            with self._lock:
                self._losses.append((step, loss))

    def take(self) -> tuple[tuple[int, float], ...]:
        """The losses since the last call."""
        with self._lock:
            losses, self._losses = self._losses, []
            return tuple(losses)


def ping(mesh: Mesh, tell: Callable[[tuple[str, ...]], None]) -> None:
    """Ping all; a timer tells who answered. Counted from the pings: who was busy until now reaches everybody. Where
    there is no thread for the timer nothing is reported: peers whose pings are answered here say that they are."""
    mesh.ping()

    timer = threading.Timer(_ANSWERS_S, lambda: tell(tuple(sorted(mesh.answered))))
    timer.daemon = True
    with contextlib.suppress(RuntimeError, MemoryError):
        begin(timer)


def stalled(port: ViewPort, phase: Phase, missing: tuple[str, ...], waited_s: float, deadline_s: float) -> None:
    """A wait takes longer than its deadline."""
    mesh = port.mesh  # not the member's view: that may be the next one already, and nobody is missed in it
    if mesh is not None:
        message = m.Stalled(
            member=port.env.me,
            view=mesh.view.id,
            phase=phase,
            missing=missing,
            waited_s=waited_s,
            deadline_s=deadline_s,
        )
        port.tell_coordinator([message])
