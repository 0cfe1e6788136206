"""Where this member's steps go, summed as phases pass, and told now and then: see `core.step_parts`.

The training thread measures; heartbeats take what is due, from a thread of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from outlast.core.phases import Phase
from outlast.core.step_parts import PART_OF, PARTS, StepParts
from outlast.runtime.transport.pair_waits import PairWaits

__all__ = ["PartsMeter"]

_EVERY_S = 10.0  # at most so often, and in a large view each member only once in as many seconds as it has members
_FIRST_S = 0.5  # sooner at first, so that a short run is told of as well


class PartsMeter:
    """Counts what the time of a step was used for. A step's parts are counted when it is committed, so they add up to
    whole steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.waits = PairWaits()
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._open: dict[str, float] = dict.fromkeys(PARTS, 0.0)  # of the step under way
        self._steps = 0
        self._batches = (0, 0.0)
        self._due_s, self._pause_s = 0.0, _FIRST_S
        self._told: StepParts | None = None
        self._lock = threading.Lock()

    def passed(self, phase: Phase, seconds: float) -> None:
        """A phase is over."""
        part = PART_OF.get(phase)
        if part is not None:
            self._open[part] += seconds

    def computed(self, seconds: float) -> None:
        """A microbatch of a step took so long, from fetching its samples to the end of its backward."""
        self._batches = self._batches[0] + 1, self._batches[1] + seconds

    def dropped(self) -> None:
        """What was measured since the last commit belongs to no step of this member's."""
        self._open = dict.fromkeys(PARTS, 0.0)

    def committed(self, members: int) -> None:
        """A step is done; now and then it is time to tell."""
        self._steps += 1
        for part, seconds in self._open.items():
            self._seconds[part] += seconds
        self.dropped()
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, max(_EVERY_S, float(members)))
            self.tell()

    def tell(self) -> None:
        """With the next heartbeat."""
        if self._steps:
            told = StepParts(
                steps=self._steps, seconds=dict(self._seconds), waits=self.waits.told(), batches=self._batches
            )
            with self._lock:
                self._told = told

    def take(self) -> StepParts | None:
        """What is due, once."""
        with self._lock:
            told, self._told = self._told, None
        return told
