"""Availability, nines, downtime, budgets of error, burn-rate alerts, and what a nine costs.

Invariant: availability = uptime / (uptime + downtime) = MTBF / (MTBF + MTTR), whatever the laws (renewal reward).
Sources: Beyer et al., Site Reliability Engineering (2016) ch. 3; The Site Reliability Workbook (2018) ch. 5
(multi-window, multi-burn-rate alerts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .check import FloatArray, count, nonnegative, positive, probability, within

__all__ = [
    "HOURS_A_MONTH", "HOURS_A_YEAR", "BurnAlert", "Lever", "Objective", "availability", "budget_left_min", "bundle_met",
    "burn_rate", "burn_alerts", "detection_bound_s", "downtime_h", "error_budget_min", "nines", "price_the_nine",
]  # fmt: skip

HOURS_A_YEAR = 8760.0
HOURS_A_MONTH = 720.0  # 30 days, as the usual SLO window


def availability(mtbf_h: ArrayLike, mttr_h: ArrayLike) -> FloatArray:
    """MTBF / (MTBF + MTTR); both in one unit, MTBF > 0, MTTR >= 0."""
    up = positive("mtbf", mtbf_h)
    return np.asarray(up / (up + nonnegative("mttr", mttr_h)))


def nines(value: ArrayLike) -> FloatArray:
    """-log10(1 - A): 0.999 is 3."""
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log10(1 - probability("availability", value)))


def downtime_h(value: ArrayLike, period_h: float = HOURS_A_YEAR) -> FloatArray:
    """Hours down in `period_h` at this availability."""
    return np.asarray((1 - probability("availability", value)) * positive("period_h", period_h))


def error_budget_min(objective: float, window_h: float = HOURS_A_MONTH) -> float:
    """Minutes of badness that an objective (0..1) allows in the window."""
    return float(downtime_h(objective, window_h)) * 60


def budget_left_min(objective: float, incidents: float, minutes_each: float, window_h: float = HOURS_A_MONTH) -> float:
    """Minutes left of the budget after this many incidents; negative when it is spent."""
    spent = float(nonnegative("incidents", incidents) * nonnegative("minutes_each", minutes_each))
    return error_budget_min(objective, window_h) - spent


def burn_rate(error_ratio: ArrayLike, objective: float) -> FloatArray:
    """How many times faster than allowed the budget burns: error ratio / (1 - objective)."""
    within("objective", objective, 0.0, 1 - 1e-15, remedy="an objective of 100 % leaves no budget: give one below 1")
    return np.asarray(probability("error_ratio", error_ratio) / (1 - objective))


@dataclass(frozen=True, kw_only=True, slots=True)
class BurnAlert:
    """Fires while both windows burn at `factor` or more; the short one makes it stop soon after the end."""

    long_h: float
    short_h: float
    factor: float
    page: bool

    def fires(self, long_ratio: float, short_ratio: float, objective: float) -> bool:
        """Whether the error ratios over the long and the short window both reach the factor."""
        rates = burn_rate([long_ratio, short_ratio], objective)
        return bool((rates >= self.factor).all())

    def detection_h(self, error_ratio: float, objective: float) -> float:
        """Hours from the onset of a constant error ratio until it fires; inf if it never does."""
        rate = float(burn_rate(error_ratio, objective))
        return self.long_h * self.factor / rate if rate >= self.factor else float("inf")


def burn_alerts(window_h: float = HOURS_A_MONTH) -> tuple[BurnAlert, ...]:
    """The Workbook's three: 2 % of the budget in 1 h, 5 % in 6 h (pages), 10 % in 3 days (ticket)."""
    table = ((1.0, 0.02, True), (6.0, 0.05, True), (72.0, 0.10, False))
    return tuple(
        BurnAlert(long_h=h, short_h=h / 12, factor=share * window_h / h, page=page) for h, share, page in table
    )


def detection_bound_s(period_s: float, missed: int) -> float:
    """The longest silence before `missed` probes in a row, `period_s` apart, are noticed."""
    return float(positive("period_s", period_s)) * count("missed", missed, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """One way to the target: `factor` times fewer incidents or faster repair, at `cost` (inf when out of reach)."""

    name: str
    factor: float
    mtbf_h: float
    mttr_h: float
    cost: float


def price_the_nine(
    mtbf_h: float, mttr_h: float, target: float, *, cost_per_halving_incidents: float, cost_per_halving_repair: float
) -> tuple[Lever, ...]:
    """What reaches `target` availability: fewer incidents alone, faster repair alone; cheapest first.

    A = 1/(1 + MTTR/MTBF) depends on the ratio only, so both need the same factor f = (MTTR/MTBF) / (1/target - 1);
    the cheaper halving wins. Costs are per halving, log2(f) halvings; a target already met needs factor 1, cost 0.
    """
    within(
        "target",
        target,
        0.0,
        1 - 1e-12,
        open_low=True,
        remedy="a target of 100 % has no finite price: give one below 1",
    )
    factor = max(1.0, float(nonnegative("mttr", mttr_h) / positive("mtbf", mtbf_h)) / (1 / target - 1))
    halvings = float(np.log2(factor))
    levers = (
        Lever(name="fewer incidents", factor=factor, mtbf_h=mtbf_h * factor, mttr_h=mttr_h,
              cost=halvings * float(nonnegative("cost_per_halving_incidents", cost_per_halving_incidents))),
        Lever(name="faster repair", factor=factor, mtbf_h=mtbf_h, mttr_h=mttr_h / factor,
              cost=halvings * float(nonnegative("cost_per_halving_repair", cost_per_halving_repair))),
    )  # fmt: skip
    return tuple(sorted(levers, key=lambda lever: lever.cost))


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """One promise over a window: `kind` at most / at least `threshold`, for a share `target` of the samples."""

    name: str
    threshold: float
    target: float
    at_most: bool = True


def bundle_met(objectives: tuple[Objective, ...], samples: Mapping[str, ArrayLike]) -> dict[str, tuple[float, bool]]:
    """Each objective's share of good samples and whether it is met; "all" is the share of samples good in everything.

    `samples[name]`: shape (n,), one value per request or step, the same n for all: a latency objective is a percentile
    (share under the threshold), an error objective a rate, a quality objective a floor (`at_most=False`).
    """
    good: dict[str, NDArray[np.bool_]] = {}
    for item in objectives:
        values = np.asarray(samples[item.name], dtype=np.float64)
        good[item.name] = (values <= item.threshold) if item.at_most else (values >= item.threshold)
    met = {
        item.name: (float(good[item.name].mean()), bool(good[item.name].mean() >= item.target)) for item in objectives
    }
    every = float(np.logical_and.reduce(list(good.values())).mean())
    met["all"] = (every, all(ok for _, ok in met.values()))
    return met
