"""How likely a device is to fail soon, from its past alone: how often it failed, and how lately.

Two things make a past telling. Few devices make most failures: a device's rate is a draw from a Gamma distribution, and
its own record updates that (Gamma-Poisson). And a failure that was not mended returns: each one raises the hazard for a
while (Hawkes 1971), by `excite` further failures in all, over a mean of `decay_s`. Updated with every failure and every
second without one; with no record at all it is the stated prior. Pure: it looks at no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.errors import ConfigError

__all__ = ["DeviceHazard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHazard:
    """`mean_rate`: failures a second of a device that nothing is known of; `shape`: of the Gamma distribution over
    devices, small where few make most failures. `excite` 0 leaves recency out."""

    mean_rate: float
    shape: float = 1.0
    excite: float = 0.0
    decay_s: float = 86400.0

    def __post_init__(self) -> None:
        for name in ("mean_rate", "shape", "decay_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}", remedy="above zero and finite")
        if not 0 <= self.excite < 1:
            raise ConfigError(
                f"excite = {self.excite}", remedy="from 0 to below 1: a failure that brings one or more never ends"
            )

    def base(self, num_failures: int, observed_s: float) -> float:
        """The device's own rate a second, after so many failures in so long, without recency."""
        rate = (self.shape + num_failures) / (self.shape / self.mean_rate + max(observed_s, 0.0))
        return rate * (1 - self.excite)

    def rate(self, failed_at_s: Sequence[float], now_s: float, observed_s: float) -> float:
        """The hazard a second. `failed_at_s`: on the clock of `now_s`; later ones are not known yet, and left out."""
        past = [now_s - at_s for at_s in failed_at_s if at_s <= now_s]
        recent = sum(math.exp(-ago / self.decay_s) for ago in past)
        return self.base(len(past), observed_s) + self.excite / self.decay_s * recent

    def chance(self, failed_at_s: Sequence[float], now_s: float, observed_s: float, within_s: float) -> float:
        """Probability of a failure within so long."""
        past = [now_s - at_s for at_s in failed_at_s if at_s <= now_s]
        fade = -math.expm1(-within_s / self.decay_s)
        recent = self.excite * fade * sum(math.exp(-ago / self.decay_s) for ago in past)
        return -math.expm1(-(self.base(len(past), observed_s) * within_s + recent))
