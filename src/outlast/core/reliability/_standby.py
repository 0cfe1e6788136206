"""Spares with repair: a birth-death chain of how many machines are down.

State i = machines down (failed and not yet repaired), of `num_active` needed plus `num_spares`. Invariant: the job runs
iff i <= num_spares. Exponential failures and repairs; for any repair law without queueing use `spares_poisson`
(M/G/infinity is insensitive to it). Source: Trivedi, Probability and Statistics with Reliability (2002), ch. 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from scipy import special

from .check import FloatArray, count, nonnegative, positive

__all__ = ["Standby", "birth_death_stationary", "first_passage", "spares_needed", "spares_poisson"]


def birth_death_stationary(birth: FloatArray, death: FloatArray) -> FloatArray:
    """Stationary law of a chain on 0..n: birth[i] takes i to i+1, death[i] takes i+1 to i; both of shape (n,), > 0."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(birth) - np.log(death))])
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def first_passage(birth: FloatArray, death: FloatArray) -> float:
    """Expected time from state 0 to state n: sum over i of E[i -> i+1], each by the one-step recursion."""
    step, total = 0.0, 0.0
    for i in range(len(birth)):
        step = (1 + (death[i - 1] * step if i else 0.0)) / birth[i]
        total += step
    return float(total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standby:
    """`num_active` machines needed, `num_spares` standing by, `crews` repairing (inf: no queue).

    rate: failures per hour of an active machine; spare_rate: of an idle spare (0 cold, = rate hot, between warm);
    repair_h: mean repair time in hours.
    """

    num_active: int
    num_spares: int
    rate: float
    repair_h: float
    spare_rate: float = 0.0
    crews: float = inf

    def __post_init__(self) -> None:
        count("num_active", self.num_active, 1), count("num_spares", self.num_spares, 0)
        positive("rate", self.rate), positive("repair_h", self.repair_h), nonnegative("spare_rate", self.spare_rate)
        if self.crews != inf:
            count("crews", int(self.crews), 1)

    def _rates(self, top: int) -> tuple[FloatArray, FloatArray]:
        down = np.arange(top)
        active = np.minimum(self.num_active, self.num_active + self.num_spares - down)
        idle = np.maximum(self.num_spares - down, 0)
        birth = active * self.rate + idle * self.spare_rate
        death = np.minimum(down + 1, self.crews) / self.repair_h
        return birth.astype(np.float64), death.astype(np.float64)

    def stationary(self) -> FloatArray:
        """P(i machines down) in the long run, i = 0..num_active + num_spares."""
        return birth_death_stationary(*self._rates(self.num_active + self.num_spares))

    def availability(self) -> float:
        """Share of time with all `num_active` places filled."""
        return float(self.stationary()[: self.num_spares + 1].sum())

    def mean_time_to_exhaustion_h(self) -> float:
        """Expected hours from everything up until a place first stays empty (num_spares + 1 down)."""
        return first_passage(*self._rates(self.num_spares + 1))

    def survival(self, hours: float) -> float:
        """P(no place has ever been empty by `hours`), from everything up: the absorbing chain's exponential."""
        from scipy.linalg import expm

        birth, death = self._rates(self.num_spares + 1)
        generator = np.diag(birth[:-1], 1) if len(birth) > 1 else np.zeros((1, 1))
        generator = generator + (np.diag(death[: len(birth) - 1], -1) if len(birth) > 1 else 0.0)
        generator -= np.diag(birth + np.append(0.0, death[: len(birth) - 1]))
        return float(expm(generator * nonnegative("hours", hours))[0].sum())


def spares_poisson(num_active: float, num_spares: float, rate: float, repair_h: float) -> float:
    """P(the spares suffice) = P(Poisson(num_active rate repair_h) <= num_spares): any repair law, no queue (Palm)."""
    load = positive("num_active x rate x repair_h", num_active * rate * repair_h)
    return float(special.pdtr(nonnegative("num_spares", num_spares), load))


def spares_needed(num_active: int, rate: float, repair_h: float, target: float, crews: float = inf) -> int:
    """The fewest cold spares for which all places are filled a share `target` of the time (exact chain)."""
    low, high = -1, 1

    def enough(spares: int) -> bool:
        plan = Standby(num_active=num_active, num_spares=spares, rate=rate, repair_h=repair_h, crews=crews)
        return plan.availability() >= target

    while not enough(high):
        low, high = high, high * 2
        count("spares needed", high, 0, 10 * num_active + 1000)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
