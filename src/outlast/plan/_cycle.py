"""Where a ladder's schedule stands: wall seconds since the pattern's start to training seconds and finished writes.

The pattern: every[1] base cycles (train `interval`, write tier 0), then a write of tier 1, and so on up. Invariant:
`locate` is exact and inverts `start_of` for any position; all arrays are (replications,).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ._model import Tier
from ._source import Floats

__all__ = ["Cycle"]


class Cycle:
    """The schedule of a ladder; the base interval is given with each call, as it differs by replication."""

    def __init__(self, tiers: tuple[Tier, ...]) -> None:
        self.every = tuple(t.every for t in tiers)
        self.writes = tuple(t.write_s for t in tiers)
        self.multiples = tuple(b // a for a, b in zip(self.every, self.every[1:], strict=False))

    def mean_write_s(self) -> float:
        """Write seconds per base interval, over the whole pattern."""
        return sum(w / n for w, n in zip(self.writes, self.every, strict=True))

    def locate(self, position: Floats, interval: Floats) -> tuple[Floats, list[Floats]]:
        """(training seconds, per tier the base index of its last finished write) at a wall position."""
        if position.size == 1:  # one large fleet: plain numbers are ten times as fast as arrays of one
            trained, found = self._locate(position.item(), interval.item(), math.floor, min)
            return np.array([trained]), [np.array([index], dtype=np.float64) for index in found]
        return self._locate(position, interval, np.floor, np.minimum)

    def _locate(self, position: Any, interval: Any, floor: Any, minimum: Any) -> tuple[Any, list[Any]]:
        spans = [interval + self.writes[0]]
        for multiple, write in zip(self.multiples, self.writes[1:], strict=True):
            spans.append(multiple * spans[-1] + write)
        top = len(spans) - 1
        cycles = floor(position / spans[top])
        left, index = position - cycles * spans[top], cycles * self.every[top]
        found = [index]
        for level in range(top - 1, -1, -1):
            multiple = self.multiples[level]
            cycles = minimum(floor(left / spans[level]), multiple)
            # inside the write of the tier above all its lower cycles are done: nothing is left for the levels below
            left = (left - cycles * spans[level]) * (cycles < multiple)
            index = index + cycles * self.every[level]
            found.append(index)
        return index * interval + minimum(left, interval), found[::-1]

    def start_of(self, index: Floats, interval: Floats) -> Floats:
        """Wall position at which training of base interval `index` starts (all writes due before it done)."""
        if index.size == 1:
            return np.array([self._start_of(index.item(), interval.item(), math.floor)])
        return np.asarray(self._start_of(index, interval, np.floor))

    def _start_of(self, index: Any, interval: Any, floor: Any) -> Any:
        position = index * interval
        for every, write in zip(self.every, self.writes, strict=True):
            position = position + floor(index / every) * write
        return position
