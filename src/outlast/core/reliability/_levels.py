"""Checkpoint ladders of n levels: a cheap near tier for common failures, dear far tiers for rare ones.

Level j is written every `every[j]` base intervals (each a multiple of the one before; every[0] = 1) and blocks for
write[j]; a failure of severity j can be recovered from levels >= j only and takes recovery[j]. Invariant: `ladder_ettr`
is the exact ratio of the embedded Markov chain for exponential failures that strike at any time.
Sources: Moody et al., SC'10 (multi-level model); Di, Robert, Vivien & Cappello, TPDS 28(1) (2017) (two-level optimum);
Benoit, Cavelan, Le Fevre, Robert & Sun, TC 66(7) (2017) (first order, n levels).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import ArrayLike

from outlast.errors import ConfigError

from ._intervals import exact_interval
from .check import FloatArray, count, nonnegative, positive

__all__ = ["Ladder", "first_order_ladder", "ladder_chain", "ladder_ettr", "optimal_ladder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """A schedule: base `interval`, and `every[j]` base intervals between writes of level j."""

    interval: float
    every: tuple[int, ...]

    def __post_init__(self) -> None:
        positive("interval", self.interval)
        if not self.every or self.every[0] != 1:
            raise ConfigError(
                f"every = {self.every}: the first level is written at each interval", remedy="start with 1"
            )
        for near, far in pairwise(self.every):
            if far < near or far % near:
                raise ConfigError(
                    f"every = {self.every}: {far} is no multiple of {near}", remedy="use multiples, nearest tier first"
                )


def first_order_ladder(writes: ArrayLike, rates: ArrayLike) -> FloatArray:
    """Interval per level sqrt(2 c_j / l_j), l_j the rate of failures of severity j; first order, levels independent."""
    return np.asarray(np.sqrt(2 * positive("writes", writes) / positive("rates", rates)))


def _attempts(ladder: Ladder, writes: FloatArray) -> FloatArray:
    index = np.arange(1, ladder.every[-1] + 1)
    due = (index[:, None] % np.asarray(ladder.every)[None, :]) == 0
    return np.asarray(ladder.interval + due @ writes)


def ladder_chain(
    ladder: Ladder, writes: FloatArray, rates: FloatArray, recoveries: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The linear system (A, b) for x[i], the expected time from base index i to the end of the super-cycle.

    A recovery of level j from index i ends at floor(i / every[j]) * every[j]; a failure in it raises the severity.
    """
    total, num = float(rates.sum()), ladder.every[-1]
    length = _attempts(ladder, writes)
    survive, span = np.exp(-total * length), -np.expm1(-total * length) / total
    share = rates / total
    matrix, known = np.eye(num), span.copy()
    upper = np.arange(num)
    matrix[upper[:-1], upper[1:]] -= survive[:-1]
    ok, r_span = np.exp(-total * recoveries), -np.expm1(-total * recoveries) / total
    # landing[j]: law of the level at which a recovery that starts at level j ends, and its expected duration
    levels = len(rates)
    landing, spent = np.zeros((levels, levels)), np.zeros(levels)
    for j in range(levels - 1, -1, -1):
        stay = 1 - (1 - ok[j]) * share[: j + 1].sum()
        spent[j] = (r_span[j] + (1 - ok[j]) * (share[j + 1 :] @ spent[j + 1 :])) / stay
        landing[j] = (1 - ok[j]) * (share[j + 1 :] @ landing[j + 1 :]) / stay
        landing[j, j] += ok[j] / stay
    known += (1 - survive) * float(share @ spent)
    for level, weight in enumerate(share @ landing):
        matrix[upper, upper // ladder.every[level] * ladder.every[level]] -= (1 - survive) * weight
    return matrix, known


def ladder_ettr(ladder: Ladder, writes: ArrayLike, rates: ArrayLike, recoveries: ArrayLike) -> float:
    """Exact long-run ETTR of a ladder (see `ladder_chain`); rates[j] of severity j, at least one above zero."""
    c, rate, r = nonnegative("writes", writes), nonnegative("rates", rates), nonnegative("recoveries", recoveries)
    if not len(c) == len(rate) == len(r) == len(ladder.every):
        raise ConfigError(
            "writes, rates, recoveries and every must have one entry per level", remedy="give each tier all four"
        )
    num = ladder.every[-1]
    if rate.sum() == 0:
        return float(num * ladder.interval / _attempts(ladder, c).sum())
    total = rate.sum()
    if np.exp(-total * max(_attempts(ladder, c).max(), r.max())) < 1e-13:
        return 0.0  # some attempt needs 1e13 tries: no progress, and a singular system
    matrix, known = ladder_chain(ladder, c, rate, r)
    return float(num * ladder.interval / np.linalg.solve(matrix, known)[0])


def optimal_ladder(
    writes: ArrayLike, rates: ArrayLike, recoveries: ArrayLike, max_every: int = 64
) -> tuple[Ladder, float]:
    """The ladder with the best exact ETTR: multiples searched around the first-order ones, interval by golden section.

    Returns (ladder, ettr). Levels with no failures of their own are still written, as rarely as `max_every` allows.
    """
    c, rate = positive("writes", writes), nonnegative("rates", rates)
    count("levels", len(c), 1, 5)
    positive("sum of rates", rate.sum())
    if len(c) == 1:
        best = float(exact_interval(c[0], 1 / rate[0]))
        ladder = Ladder(interval=best, every=(1,))
        return ladder, ladder_ettr(ladder, c, rate, recoveries)
    wanted = first_order_ladder(c, np.maximum(rate, rate.sum() * 1e-9))
    options: list[tuple[int, ...]] = []
    for near, far in pairwise(wanted):
        ratio = far / near
        around = {1, *(min(round(ratio * f), max_every) for f in (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0))}
        options.append(tuple(sorted(m for m in around if m >= 1)))
    found: tuple[float, Ladder] | None = None
    for multiples in product(*options):
        every = tuple(int(n) for n in np.cumprod((1, *multiples)))
        if every[-1] > 4 * max_every:
            continue
        ladder, value = _best_interval(every, c, rate, recoveries, float(wanted[0]))
        if found is None or value > found[0]:
            found = (value, ladder)
    assert found is not None
    return found[1], found[0]


def _best_interval(
    every: tuple[int, ...], c: FloatArray, rate: FloatArray, recoveries: ArrayLike, near: float
) -> tuple[Ladder, float]:
    ratio = (5**0.5 - 1) / 2
    a, b = np.log(near / 20), np.log(near * 20)

    def value(log_t: float) -> float:
        return ladder_ettr(Ladder(interval=float(np.exp(log_t)), every=every), c, rate, recoveries)

    x, y = b - ratio * (b - a), a + ratio * (b - a)
    at_x, at_y = value(x), value(y)
    while b - a > 1e-3:  # ETTR is flat at its top: this is 1e-6 of it
        if at_x >= at_y:
            b, y, at_y = y, x, at_x
            x = b - ratio * (b - a)
            at_x = value(x)
        else:
            a, x, at_x = x, y, at_y
            y = a + ratio * (b - a)
            at_y = value(y)
    best = Ladder(interval=float(np.exp((a + b) / 2)), every=every)
    return best, ladder_ettr(best, c, rate, recoveries)
