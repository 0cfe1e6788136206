"""Where a rank is, in memory that its agent reads while user code holds the GIL, and after its death (protocol, 19).

One writer, the rank; readers take what they find and judge nothing here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from outlast.core.phases import Phase
from outlast.core.protocol import StepTime
from outlast.runtime.transport.regions import Region

__all__ = ["Progress"]

_WORDS = 16  # before the times of steps


_KEPT = 1024  # of the newest steps


_FIELDS = len(StepTime.__struct_fields__)


class Progress:
    """Where a rank is, in memory that its agent can read while user code holds the GIL (protocol, 19), and when it is
    dead: what it had committed is known to the step.

    Words: count of changes, phase, step, microbatch, bucket, since (monotonic ns), allowed (ns, 0 for no deadline),
    last sign of life (monotonic ns), count of commits; after them the times of the newest steps, in a ring. `clock_ns`:
    the monotonic clock of who writes.
    """

    SIZE = 8 * (_WORDS + _KEPT * _FIELDS)

    def __init__(self, region: Region, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.region, self._clock_ns = region, clock_ns
        self._words = memoryview(region.map).cast("q")

    def enter(self, phase: Phase, step: int = -1, microbatch: int = -1, bucket: int = -1, allowed_s: float = 0) -> int:
        """Publish the phase; returns the monotonic time in ns."""
        words, now = self._words, self._clock_ns()
        words[1], words[2], words[3], words[4] = phase, step, microbatch, bucket
        words[5] = words[7] = now
        words[6] = int(allowed_s * 1e9)
        words[0] += 1
        return now

    @property
    def changes(self) -> int:
        """How often a phase was entered: 0 until the process has reached `protect`."""
        return self._words[0]

    @property
    def joined(self) -> bool:
        """Whether the process has called `outlast.join`."""
        return self._words[7] != 0

    def alive(self, ahead_s: float = 0.0) -> None:
        """A sign of life inside a phase; `ahead_s`: for so long from now no other is owed."""
        self._words[7] = self._clock_ns() + int(ahead_s * 1e9)

    def read(self) -> tuple[Phase, int, int, float, float]:
        """(phase, step, microbatch, monotonic s of the last sign of life, allowed s or inf)."""
        words = self._words
        allowed = words[6] / 1e9 if words[6] else float("inf")
        return Phase(words[1]), words[2], words[3], max(words[5], words[7]) / 1e9, allowed

    def commit(self, time: StepTime) -> None:
        """A step was committed. It counts once the whole entry is written."""
        words, count = self._words, self._words[8]
        at = _WORDS + count % _KEPT * _FIELDS
        for index, value in enumerate(msgspec.structs.astuple(time)):
            words[at + index] = round(value * 1e9) if isinstance(value, float) else int(value)
        words[8] = count + 1

    @property
    def num_commits(self) -> int:
        """By this process; steps that it was given by others are not among them."""
        return self._words[8]

    def commits(self, since: int = 0) -> tuple[StepTime, ...]:
        """The times of commits number `since` and later, as far as they are kept."""
        count = self.num_commits
        return tuple(self._entry(number) for number in range(max(since, count - _KEPT), count))

    def _entry(self, number: int) -> StepTime:
        at = _WORDS + number % _KEPT * _FIELDS
        step, *nanoseconds, phase, members, first = self._words[at : at + _FIELDS]
        return msgspec.convert([step, *(ns / 1e9 for ns in nanoseconds), phase, members, bool(first)], StepTime)
