"""The learned deadline of a phase: three times its 99.9th percentile, never below a floor, none before three samples.

A `Durations` belief is updated at every pass of the phase, in constant time and memory (protocol, 19): the largest of
each of a few recent windows stands for the tail, so that a slow first step is forgotten but a rare pause is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Durations", "deadline"]

_WINDOW = 256
_WINDOWS = 8


@dataclass(slots=True)
class Durations:
    """How long a phase took, lately. `observe` is O(1); `tail` bounds the 99.9th percentile from above.

    With 8 windows of 256 samples the largest kept sample is exceeded with probability about 1/2000 by the next one.
    """

    count: int = 0
    tail: float = 0.0
    _current: float = 0.0
    _in_window: int = 0
    _maxima: list[float] = field(default_factory=list)

    def observe(self, seconds: float) -> None:
        self.count += 1
        self._in_window += 1
        if seconds > self._current:
            self._current = seconds
            self.tail = max(self.tail, seconds)
        if self._in_window == _WINDOW:
            self._maxima = [*self._maxima[-(_WINDOWS - 2) :], self._current]
            self._current, self._in_window, self.tail = 0.0, 0, max(self._maxima)


def deadline(belief: Durations, floor_s: float) -> float:
    """Seconds of silence allowed in the phase; inf before three samples."""
    return math.inf if belief.count < 3 else max(floor_s, 3.0 * belief.tail)
