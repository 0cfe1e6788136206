"""The deadline of a phase, learned from how long it usually takes: `DeadlinePolicy.decide` of a `Durations` belief.

One object decides in the run (a phase, a process, a host), under the adversary and for the plan's hangs. A belief is
updated at every pass of the phase, in constant time and memory (protocol, 19): the largest of each of a few recent
windows stands for the tail, so that a slow first step is forgotten but a rare pause is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outlast.errors import ConfigError

__all__ = ["DeadlineDecision", "DeadlinePolicy", "DeadlineState", "Durations"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineState:
    """Now: whether anybody waits, and seconds that are allowed at most, learned or not."""

    awaited: bool = True
    longest_s: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineDecision:
    """Seconds of silence that are allowed (inf: without end), and whether the belief was enough to learn them from."""

    allowed_s: float
    learned: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlinePolicy:
    """`times` the tail, and no less than `floor_s`, once a phase has been passed `passes` times."""

    floor_s: float
    times: float = 3.0
    passes: int = 3

    def __post_init__(self) -> None:
        if not self.floor_s >= 0 or not self.times >= 1 or self.passes < 1:
            raise ConfigError(
                f"deadlines of {self.times} times, at least {self.floor_s} s, after {self.passes} passes",
                remedy="one or more times and passes, zero or more seconds",
            )

    def decide(self, belief: Durations, state: DeadlineState) -> DeadlineDecision:
        """How long it may be silent. For whom nobody waits, what is learned counts for nothing."""
        learned = belief.count >= self.passes
        own_s = max(self.floor_s, self.times * belief.tail) if learned and state.awaited else math.inf
        return DeadlineDecision(allowed_s=min(own_s, state.longest_s), learned=learned)
