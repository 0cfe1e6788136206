"""How long to train between checkpoints, from what is believed of failures and what a write costs now.

One object decides in the run, in the simulator and in `plan --from-run`. `adaptive` is what a run does: saves as dense
as the hazard believed now asks (`_hazard.py`), at once while none was measured, later and later while they fail. The
others are formulas for a rate without memory: `core.reliability` has Young, Daly and exact; a test holds them equal.
Invariant: the interval depends on the belief and the state only, and is never shorter than the time that a write takes
to become durable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from outlast.errors import ConfigError

from ._arithmetic import clamp, log1p, where
from ._belief import Belief

__all__ = ["IntervalDecision", "IntervalPolicy", "IntervalState"]


_LEAST_COST_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalState:
    """Now: `machines` exposed, seconds a write blocks, seconds until it is durable. Floats or arrays.

    Only the adaptive interval asks for the others. age_s: from the last loss of work to the begin of the interval, and
    now_age_s to now (default: the same); extra: further losses per second, such as rewinds; left_s: training left;
    measured: whether a write's cost is known; num_failed: saves in a row that came to nothing.
    """

    machines: Any
    write_s: Any
    durable_s: Any = 0.0
    age_s: Any = 1.0
    now_age_s: Any = None
    extra: Any = 0.0
    left_s: Any = math.inf
    measured: Any = True
    num_failed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalDecision:
    """Seconds of training until the next checkpoint (inf: none pays before the end), and the mean time between losses
    that the rate believed now stands for."""

    interval_s: Any
    mtbr_s: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalPolicy:
    """`kind`: adaptive, fixed, young, daly or exact. weights[k]: share of class k's failures that lose work.

    A failure that redundancy masks or that was predicted in time loses nothing: its weight is that much below 1.
    Without weights a formula takes 1 each; the adaptive interval none, since its record of losses has them already.
    max_s holds for the formulas.
    """

    kind: Literal["adaptive", "fixed", "young", "daly", "exact"] = "exact"
    fixed_s: float = 1800.0
    min_s: float = 10.0
    max_s: float = 86_400.0
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in {"adaptive", "fixed", "young", "daly", "exact"}:
            raise ConfigError(f"interval kind {self.kind!r}", remedy="one of adaptive, fixed, young, daly, exact")
        if not 0 < self.min_s <= self.max_s or self.fixed_s <= 0:
            raise ConfigError(
                f"interval bounds {self.min_s} to {self.max_s}, fixed {self.fixed_s}", remedy="0 < min <= max"
            )
        if any(not 0 <= w <= 1 for w in self.weights):
            raise ConfigError(f"weights {self.weights}", remedy="each is a share: from 0 to 1")

    def decide(self, belief: Belief, state: IntervalState) -> IntervalDecision:
        """The interval for this belief and state."""
        if self.kind == "adaptive":
            return self._adaptive(belief, state)
        weights = self.weights or (1.0,) * len(belief.classes)
        mtbr_s = 1 / (belief.total(weights) * state.machines + 1e-18)
        if self.kind == "fixed":
            return IntervalDecision(interval_s=self.fixed_s + 0 * mtbr_s, mtbr_s=mtbr_s)
        x = state.write_s / mtbr_s
        length = self._relative(x) * mtbr_s
        return IntervalDecision(interval_s=clamp(length, max(self.min_s, state.durable_s), self.max_s), mtbr_s=mtbr_s)

    def _adaptive(self, belief: Belief, state: IntervalState) -> IntervalDecision:
        losses = belief.losses
        if losses is None:
            raise ConfigError("an adaptive interval needs a record of losses", remedy="give Belief(losses=Losses(...))")
        further = state.extra + (belief.total(self.weights) * state.machines if self.weights else 0.0)
        interval_s = losses.next_save_s(
            age_s=state.age_s,
            cost_s=clamp(state.write_s, _LEAST_COST_S, math.inf),
            least_s=clamp(state.durable_s, self.min_s, math.inf),
            extra=further,
            left_s=state.left_s,
        )
        now_age_s = state.age_s if state.now_age_s is None else state.now_age_s
        mtbr_s = 1.0 / (further + losses.hazard_at(now_age_s))
        if state.num_failed:
            interval_s = clamp(interval_s, 0.0, self.min_s * 2.0**state.num_failed)
        else:
            interval_s = where(state.measured, interval_s, self.min_s)
        return IntervalDecision(interval_s=interval_s, mtbr_s=mtbr_s)

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
