"""How many spares to hold, and whether to shrink or to wait when there is none left.

Invariant: spares wanted grow with the rate believed, the machines and the repair time; a job below `min_machines` never
goes on. Spares that are held already are given up only where a warier policy would not hold them either, so that a
belief that wavers moves nobody. Source: Palm's theorem (machines in repair are Poisson with mean rate x machines x
repair time).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from outlast.errors import ConfigError

from ._arithmetic import ceil, clamp, where
from ._belief import Belief

_WARIER = 0.6  # standard deviations more, for those that are held already

__all__ = ["SparesDecision", "SparesPolicy", "SparesState"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesState:
    """Now: machines running and wanted, seconds until the next one is expected back, seconds one reshape costs; `held`:
    spares that there are, None where the question is how many to begin with."""

    running: Any
    wanted: Any
    expected_wait_s: Any
    reshape_s: float = 60.0
    repair_s: float = 86_400.0
    held: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesDecision:
    """Spares to hold, and what to do while machines are missing: shrink (true) or wait (false); arrays alike."""

    spares: Any
    shrink: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesPolicy:
    """`deviate`: how many standard deviations of the machines in repair to cover (2.33: all but 1 % of the time).

    min_share: the job may shrink to this share of the machines wanted, not below; 1 means it always waits.
    takes[k]: machines of class k's failures that need repair (1 each if empty).
    """

    deviate: float = 2.33
    min_share: float = 0.5
    takes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.min_share <= 1:
            raise ConfigError(f"min_share = {self.min_share}", remedy="a share of the machines wanted: from 0 to 1")
        if self.deviate < 0 or any(t < 0 for t in self.takes):
            raise ConfigError("negative deviate or takes", remedy="give zero or more")

    def decide(self, belief: Belief, state: SparesState) -> SparesDecision:
        """Spares by the Poisson quantile (Cornish-Fisher, within one machine); shrink when waiting costs more."""
        takes = self.takes or (1.0,) * len(belief.classes)
        load = belief.total(takes) * state.wanted * state.repair_s
        spares = _quantile(load, self.deviate)
        if state.held is not None:
            most = _quantile(load, self.deviate + _WARIER)
            spares = where(state.held > most, most, where(state.held < spares, spares, state.held))
        allowed = state.running >= self.min_share * state.wanted
        missing_share = 1 - state.running / state.wanted
        cheaper = state.expected_wait_s > state.expected_wait_s * missing_share + 2 * state.reshape_s
        return SparesDecision(spares=spares, shrink=allowed & cheaper)


def _quantile(load: Any, deviate: float) -> Any:
    """Of a Poisson variable with this mean, so many standard deviations up; 0 where 0 is likely enough."""
    none_below = -math.log(0.5 * math.erfc(-deviate / math.sqrt(2)))
    found = ceil(clamp(load + deviate * load**0.5 + (deviate**2 - 1) / 6 - 0.5, 0.0, 1e12))
    return where(load <= none_below, 0.0 * found, found)
