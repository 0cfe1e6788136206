"""A learned band for one scalar, such as the loss: what is usual, and whether a value is far above it.

A band is a frozen value: `read` returns a reading and the next band, so members that see the same numbers hold the same
band, and a rollback puts the old one back. Invariant: a value outside the band never teaches it, so a spike cannot
widen what is allowed. It says what is seen, never what to do about it (`step_decisions.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Band", "BandReading"]

Finding = Literal["learning", "inside", "spike", "nonfinite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BandReading:
    """One value against its band. `limit`: the largest value that would have been inside; `score`: deviations above."""

    finding: Finding
    value: float
    limit: float
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A learned upper limit for a loss or a gradient norm: mean + width x mean absolute deviation, both forgetting.

    `warmup`: values that are only learnt from (non-finite ones excepted). `memory`: values that the averages reach
    back. `width`: deviations allowed. `floor`: the least deviation, as a share of the mean's size. `patience`: so many
    spikes in a row are a new level, from which the band starts again.
    """

    warmup: int = 20
    memory: float = 50.0
    width: float = 8.0
    floor: float = 0.02
    patience: int = 5
    num_seen: int = 0
    num_spikes: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @property
    def limit(self) -> float:
        """The largest value inside the band; infinite while it is learning."""
        if self.num_seen < self.warmup:
            return math.inf
        return self.mean + self.width * self._spread()

    def read(self, value: float) -> tuple[BandReading, Band]:
        """Judge a value, and the band after it."""
        limit = self.limit
        if not math.isfinite(value):
            return BandReading(finding="nonfinite", value=value, limit=limit, score=math.inf), self
        score = (value - self.mean) / self._spread() if self.num_seen >= self.warmup else 0.0
        if value <= limit:
            finding: Finding = "learning" if self.num_seen < self.warmup else "inside"
            return BandReading(finding=finding, value=value, limit=limit, score=score), self._learn(value)
        reading = BandReading(finding="spike", value=value, limit=limit, score=score)
        if self.num_spikes + 1 >= self.patience:
            return reading, self.reset()
        return reading, replace(self, num_spikes=self.num_spikes + 1)

    def reset(self) -> Band:
        """The same band, knowing nothing: after a rollback, or a change that the user made on purpose."""
        return replace(self, num_seen=0, num_spikes=0, mean=0.0, deviation=0.0)

    def _spread(self) -> float:
        return max(self.deviation, self.floor * abs(self.mean), math.ulp(self.mean))

    def _learn(self, value: float) -> Band:
        share = max(1.0 / (self.num_seen + 1), 1.0 / self.memory)
        away = abs(value - self.mean) if self.num_seen else 0.0
        return replace(
            self,
            num_seen=self.num_seen + 1,
            num_spikes=0,
            mean=self.mean + share * (value - self.mean),
            deviation=self.deviation + share * (away - self.deviation),
        )
