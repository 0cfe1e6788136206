"""How many spares to hold. What to do where none is left is `_vacancies.py`'s.

Invariant: spares wanted grow with the rate believed, the machines and the repair time. Spares that are held already are
given up only where a warier policy would not hold them either, so that a belief that wavers moves nobody.
Source: Palm's theorem (machines in repair are Poisson with mean rate x machines x
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
REPLACED_S = 30.0
"""From a machine's loss until its place is filled, before any was seen."""

__all__ = ["REPLACED_S", "SparesDecision", "SparesPolicy", "SparesState"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesState:
    """Now: machines wanted, and seconds until the place of a lost one is filled again; `held`: spares that there are,
    None where the question is how many to begin with."""

    wanted: Any
    repair_s: Any = 86_400.0
    held: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesDecision:
    """Spares to hold; arrays alike."""

    spares: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesPolicy:
    """`deviate`: how many standard deviations of the machines in repair to cover (2.33: all but 1 % of the time).

    takes[k]: machines of class k's failures that need repair (1 each if empty).
    """

    deviate: float = 2.33
    takes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.deviate < 0 or any(t < 0 for t in self.takes):
            raise ConfigError("negative deviate or takes", remedy="give zero or more")

    def decide(self, belief: Belief, state: SparesState) -> SparesDecision:
        """Spares by the Poisson quantile (Cornish-Fisher, within one machine)."""
        takes = self.takes or (1.0,) * len(belief.classes)
        load = belief.total(takes) * state.wanted * state.repair_s
        spares = _quantile(load, self.deviate)
        if state.held is not None:
            most = _quantile(load, self.deviate + _WARIER)
            spares = where(state.held > most, most, where(state.held < spares, spares, state.held))
        return SparesDecision(spares=spares)


def _quantile(load: Any, deviate: float) -> Any:
    """The quantile of a Poisson variable with mean `load`, `deviate` standard deviations up; 0 where 0 is likely
    enough."""
    none_below = -math.log(0.5 * math.erfc(-deviate / math.sqrt(2)))
    found = ceil(clamp(load + deviate * load**0.5 + (deviate**2 - 1) / 6 - 0.5, 0.0, 1e12))
    return where(load <= none_below, 0.0 * found, found)
