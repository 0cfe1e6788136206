"""How long a job takes, and how far that spreads: mean and variance of the makespan under interruptions.

Exponential interruptions that strike during work, writes and recoveries alike. Invariant: the mean per segment is
`expected_segment`. Source: Daly (2006) for the mean; the variance by the random sum of failed tries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ._intervals import expected_segment
from .check import FloatArray, nonnegative, positive

__all__ = ["Makespan", "makespan", "segment_variance"]


def _truncated(length: FloatArray, m: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and variance of an exponential of mean m given that it is below `length` (0 where length is 0)."""
    x = np.maximum(length / m, 1e-9)
    inverse = 1 / np.expm1(x)
    mean = m * (1 - x * inverse)
    variance = m**2 * (1 - x**2 * inverse * (1 + inverse))
    tiny = x < 1e-3  # the closed forms cancel there: uniform on (0, length)
    return np.where(tiny, length / 2, mean), np.where(tiny, length**2 / 12, np.maximum(variance, 0.0))


def _random_sum(
    length: FloatArray, m: FloatArray, try_mean: FloatArray, try_var: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Mean and variance of a geometric number of failed tries before one of `length` succeeds."""
    with np.errstate(over="ignore"):
        fails = np.expm1(length / m)
    return fails * try_mean, fails * try_var + fails * (1 + fails) * try_mean**2


def segment_variance(interval: ArrayLike, write: ArrayLike, mtbi: ArrayLike, recovery: ArrayLike = 0.0) -> FloatArray:
    """Variance of the wall time that banks one interval."""
    a = positive("interval", interval) + nonnegative("write time", write)
    m, r = positive("MTBF", mtbi), nonnegative("recovery", recovery)
    recover_mean, recover_var = _random_sum(r, m, *_truncated(r, m))
    fail_mean, fail_var = _truncated(a, m)
    return np.asarray(_random_sum(a, m, fail_mean + r + recover_mean, fail_var + recover_var)[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Makespan:
    """Mean and standard deviation of a job's wall time, in the unit of its inputs."""

    mean: float
    sd: float

    def quantile(self, p: float) -> float:
        """Normal approximation, good when the job has many segments (sd far below the mean)."""
        return float(self.mean + self.sd * special.ndtri(p))


def makespan(work: float, interval: float, write: float, mtbi: float, recovery: float = 0.0) -> Makespan:
    """Wall time of `work`, cut into whole intervals and a last one that needs no write."""
    positive("work", work)
    num = int(np.ceil(work / interval - 1e-9)) - 1
    last = work - num * interval
    mean = num * expected_segment(interval, write, mtbi, recovery) + expected_segment(last, 0.0, mtbi, recovery)
    variance = num * segment_variance(interval, write, mtbi, recovery) + segment_variance(last, 0.0, mtbi, recovery)
    return Makespan(mean=float(mean), sd=float(np.sqrt(variance)))
