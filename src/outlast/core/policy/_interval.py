"""How long to train between checkpoints, from what is believed of failures and what a write costs now.

Invariant: the interval depends on the belief and the state only, lies in [min_s, max_s], and is never shorter than the
time that a write takes to become durable. Formulas: `core.reliability` (Young, Daly, exact); a test holds them equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from outlast.errors import ConfigError

from ._arithmetic import clamp, log1p
from ._belief import Belief

__all__ = ["IntervalDecision", "IntervalPolicy", "IntervalState"]


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalState:
    """Now: `machines` exposed, seconds a write blocks, seconds until it is durable. Floats or arrays."""

    machines: Any
    write_s: Any
    durable_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalDecision:
    """Seconds of training until the next checkpoint, and the mean time between losses it was derived from."""

    interval_s: Any
    mtbr_s: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalPolicy:
    """`kind`: fixed, young, daly or exact. weights[k]: share of class k's failures that lose work (1 each if empty).

    A failure that redundancy masks or that was predicted in time loses nothing: its weight is that much below 1.
    """

    kind: Literal["fixed", "young", "daly", "exact"] = "exact"
    fixed_s: float = 1800.0
    min_s: float = 10.0
    max_s: float = 86_400.0
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in {"fixed", "young", "daly", "exact"}:
            raise ConfigError(f"interval kind {self.kind!r}", remedy="one of fixed, young, daly, exact")
        if not 0 < self.min_s <= self.max_s or self.fixed_s <= 0:
            raise ConfigError(
                f"interval bounds {self.min_s} to {self.max_s}, fixed {self.fixed_s}", remedy="0 < min <= max"
            )
        if any(not 0 <= w <= 1 for w in self.weights):
            raise ConfigError(f"weights {self.weights}", remedy="each is a share: from 0 to 1")

    def decide(self, belief: Belief, state: IntervalState) -> IntervalDecision:
        """The interval for this belief and state."""
        weights = self.weights or (1.0,) * len(belief.classes)
        mtbr_s = 1 / (belief.total(weights) * state.machines + 1e-18)
        if self.kind == "fixed":
            return IntervalDecision(interval_s=self.fixed_s + 0 * mtbr_s, mtbr_s=mtbr_s)
        x = state.write_s / mtbr_s
        length = self._relative(x) * mtbr_s
        return IntervalDecision(interval_s=clamp(length, max(self.min_s, state.durable_s), self.max_s), mtbr_s=mtbr_s)

    def _relative(self, x: Any) -> Any:
        """Interval over MTBR for a write of x MTBRs."""
        young = (2 * x) ** 0.5
        if self.kind == "young":
            return young
        half = clamp(x / 2, 0.0, 1.0)
        daly = clamp(young * (1 + half**0.5 / 3 + half / 9) - x, 1e-12, 1.0 - 1e-9)
        if self.kind == "daly":
            return daly
        for _ in range(2):  # Newton on ln(1 - t) + t + x = 0, whose root is 1 + W(-exp(-x - 1))
            daly = clamp(daly + (log1p(-daly) + daly + x) * (1 - daly) / daly, 1e-12, 1.0 - 1e-9)
        return daly
