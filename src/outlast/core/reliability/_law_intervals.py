"""Intervals of a fitted law that hold the truth as often as they say: of its parameters, its mean, median and p90.

They are the central 95 % of the posterior under the prior that is flat in the logarithms of shape, scale and rate, and
in mu. For a law whose logarithm has a location and a scale this is the right-invariant prior: where every life was seen
to its end, the intervals of the parameters and quantiles of exponential, Weibull and lognormal are exact at any number
of failures. A normal approximation around the maximum is not: it takes the spread that it estimated for the true one.
Where a share of the lives was not seen to end, the prior is to that share flat in the logarithm of the hazard by a
given age, in place of the location: of units that are all watched to one age, that hazard and the shape are told.
Invariant: nothing is drawn; an interval holds its estimate, and has no end where the data do not give it one.
Sources: Stein, Approximation of improper prior measures by prior probability measures (1965); Severini, Mukerjee &
Ghosh, Biometrika 89 (2002) (exactness); Lawless, Statistical Models and Methods for Lifetime Data (2003), ch. 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy import special

from ._lifetimes import Exponential, Gamma, Lifetime, LogNormal, Weibull
from .check import FloatArray

__all__ = ["law_intervals"]

_TAILS = (0.025, 0.975)
_SEARCHED, _SUMMED = 24, 64  # points a side: a fifth of a standard deviation apart, a bound is half a percent off
_FAR = 14.0  # standard deviations at which the search for weight begins: of three failures, nothing lies beyond
_ROWS = 256  # more distinct ages than these are taken as so many of equal width in their logarithm
_PHI = (1 + 5**0.5) / 2
_ALIKE = -11.5  # a spread of a part in 100,000: less is rounding, and the likelihood of a gamma is too
_OPEN = (-float("inf"), float("inf"))

Interval = tuple[float, float, float]
"""(estimate, low, high)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """What the likelihoods need of the data: sums over the failures, and ages with how many have them."""

    num: int
    hidden: float  # share of the lives that were not seen to end
    sum_log: float
    sum_square: float
    sum_time: float
    every: tuple[FloatArray, FloatArray]
    censored: tuple[FloatArray, FloatArray]

    @staticmethod
    def of(t: FloatArray, seen: NDArray[np.bool_]) -> _Rows:
        logs = np.log(t)
        return _Rows(
            num=int(seen.sum()),
            hidden=1 - float(seen.mean()),
            sum_log=float(logs[seen].sum()),
            sum_square=float((logs[seen] ** 2).sum()),
            sum_time=float(t[seen].sum()),
            every=_counted(logs),
            censored=_counted(logs[~seen]),
        )


def _counted(logs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(distinct logarithms, how often each); of many, the means of bins that are too narrow to matter."""
    values, times = np.unique(logs, return_counts=True)
    if len(values) <= _ROWS:
        return values, times.astype(np.float64)
    edges = np.linspace(values[0], values[-1], _ROWS + 1)
    place = np.clip(np.searchsorted(edges, logs, side="right") - 1, 0, _ROWS - 1)
    counts = np.bincount(place, minlength=_ROWS).astype(np.float64)
    kept = counts > 0
    return np.bincount(place, weights=logs, minlength=_ROWS)[kept] / counts[kept], counts[kept]


# Each law below has a log spread and a location at every point, both (k,): of Weibull ln(1/shape) and ln(scale), of
# lognormal ln(sigma) and mu, of gamma -ln(shape) / 2 and ln(mean). The location's own standard error is as the spread.


def _weibull(rows: _Rows, spread: FloatArray, location: FloatArray) -> FloatArray:
    shape, (ages, times) = np.exp(-spread), rows.every
    hazard = np.exp(shape[:, None] * (ages - location[:, None])) * times
    return np.asarray(-rows.num * spread + shape * (rows.sum_log - rows.num * location) - hazard.sum(axis=1))


def _lognormal(rows: _Rows, spread: FloatArray, location: FloatArray) -> FloatArray:
    sigma, (ages, times) = np.exp(spread), rows.censored
    squares = rows.sum_square - 2 * location * rows.sum_log + rows.num * location**2
    alive = special.log_ndtr((location[:, None] - ages) / sigma[:, None]) * times
    return np.asarray(-rows.num * spread - squares / (2 * sigma**2) + alive.sum(axis=1))


def _gamma(rows: _Rows, spread: FloatArray, location: FloatArray) -> FloatArray:
    shape, log_rate, (ages, times) = np.exp(-2 * spread), -2 * spread - location, rows.censored
    dead = rows.num * (shape * log_rate - special.gammaln(shape)) + shape * rows.sum_log
    k, x = shape[:, None], np.exp(log_rate[:, None] + ages)
    tail = special.gammaincc(k, x)
    # where the tail is too small for a float: as `Gamma.cumhazard`
    far = special.xlogy(k - 1, x) - x - special.gammaln(k) + np.log1p((k - 1) / x * (1 + (k - 2) / x))
    alive = np.where(tail > 1e-280, np.log(tail), far) * times
    return np.asarray(dead - np.exp(log_rate) * rows.sum_time + alive.sum(axis=1))


def _of_weibull(spread: FloatArray, location: FloatArray) -> dict[str, FloatArray]:
    inverse = np.exp(spread)
    return {
        "shape": -spread,
        "scale": location,
        "mean": location + special.gammaln(1 + inverse),
        "median": location + log(log(2)) * inverse,
        "p90": location + log(log(10)) * inverse,
    }


def _of_lognormal(spread: FloatArray, location: FloatArray) -> dict[str, FloatArray]:
    sigma = np.exp(spread)
    return {
        "mu": location,
        "sigma": spread,
        "mean": location + sigma**2 / 2,
        "median": location,
        "p90": location + float(special.ndtri(0.9)) * sigma,
    }


def _of_gamma(spread: FloatArray, location: FloatArray) -> dict[str, FloatArray]:
    shape, rate = np.exp(-2 * spread), -2 * spread - location

    def quantile(p: float) -> FloatArray:
        small = (log(p) + special.gammaln(shape + 1)) / shape  # where the quantile is too small for a float
        found = special.gammaincinv(shape, p)
        return np.asarray(np.where(found > 1e-280, np.log(found), small) - rate)

    return {"shape": -2 * spread, "rate": rate, "mean": location, "median": quantile(0.5), "p90": quantile(0.9)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Law:
    """The likelihood at points, and what is read at them: all logarithms, but for mu. `hazard`: the logarithm of the
    hazard by a given age moves with the location as this power of 1 / spread."""

    likelihood: Callable[[_Rows, FloatArray, FloatArray], FloatArray]
    read: Callable[[FloatArray, FloatArray], dict[str, FloatArray]]
    hazard: float


_LAWS: Mapping[str, _Law] = {
    "weibull": _Law(likelihood=_weibull, read=_of_weibull, hazard=1.0),
    "lognormal": _Law(likelihood=_lognormal, read=_of_lognormal, hazard=1.0),
    "gamma": _Law(likelihood=_gamma, read=_of_gamma, hazard=2.0),
}


def _maximum(lifetime: Lifetime) -> tuple[float, float]:
    """(log spread, location) of a fitted law."""
    if isinstance(lifetime, Weibull):
        return -log(lifetime.shape), log(lifetime.scale)
    if isinstance(lifetime, LogNormal):
        return log(lifetime.sigma), lifetime.mu
    assert isinstance(lifetime, Gamma), lifetime
    return -log(lifetime.shape) / 2, log(lifetime.shape / lifetime.rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Posterior:
    """The log posterior at (change of log spread, change of location in spreads): there it is nearly round."""

    law: _Law
    rows: _Rows
    best: tuple[float, float]

    def places(self, u: FloatArray, v: FloatArray) -> tuple[FloatArray, FloatArray]:
        spread = self.best[0] + u
        return spread, self.best[1] + v * np.exp(spread)

    def likelihood(self, u: FloatArray, v: FloatArray) -> FloatArray:
        with np.errstate(all="ignore"):
            return self.law.likelihood(self.rows, *self.places(u, v))

    def roots(self) -> FloatArray | None:
        """A square root of the inverse information, turned so that no line of a grid has one value of a parameter."""
        h = 1e-3
        around = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
        u, v = h * np.array(around, dtype=np.float64).T
        f = self.likelihood(u, v)
        cross = (f[5] - f[6] - f[7] + f[8]) / 4
        information = -np.array([[f[1] - 2 * f[0] + f[2], cross], [cross, f[3] - 2 * f[0] + f[4]]]) / h**2
        if not np.isfinite(information).all() or np.linalg.eigvalsh(information)[0] <= 0:
            return None
        turn = np.array([[_PHI, -1.0], [1.0, _PHI]]) / np.hypot(1, _PHI)
        return np.asarray(np.linalg.cholesky(np.linalg.inv(information)) @ turn)

    def points(self) -> tuple[FloatArray, FloatArray, FloatArray] | None:
        """(log spread, location, weight) where the weight is, looked for from far away, then closer."""
        roots = self.roots()
        if roots is None:
            return None
        box = [(-_FAR, _FAR), (-_FAR, _FAR)]
        for _ in range(8):
            _, _, weight = self._weighed(roots, box, _SEARCHED)
            closer = [_held(side, weight.max(axis=1 - i)) for i, side in enumerate(box)]
            done = all(new[1] - new[0] > 0.7 * (old[1] - old[0]) for new, old in zip(closer, box, strict=True))
            box = closer
            if done:
                break
        u, v, weight = self._weighed(roots, box, _SUMMED)
        return *self.places(u, v), weight.ravel() / weight.sum()

    def _weighed(
        self, roots: FloatArray, box: list[tuple[float, float]], size: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(u, v, weight at most 1) at size x size points."""
        grid = np.meshgrid(*(np.linspace(*side, size) for side in box), indexing="ij")
        u, v = roots @ np.stack([part.ravel() for part in grid])
        prior = (1 - self.law.hazard * self.rows.hidden) * u  # v is in spreads: flat in it is not flat in the location
        found = np.nan_to_num(self.likelihood(u, v) + prior, nan=-np.inf, posinf=-np.inf, neginf=-np.inf)
        return u, v, np.exp(found - found.max()).reshape(size, size)


def _held(side: tuple[float, float], weight: FloatArray) -> tuple[float, float]:
    """The ends between which a side's points have weight, and one step more."""
    kept, step = np.flatnonzero(weight > 1e-6), (side[1] - side[0]) / (len(weight) - 1)
    low, high = side[0] + (kept[0] - 1) * step, side[0] + (kept[-1] + 1) * step
    return max(side[0], float(low)), min(side[1], float(high))


def _tails(values: FloatArray, weight: FloatArray) -> tuple[float, float]:
    """The values with 2.5 % of the weight below and above them; between points a normal's curve is followed."""
    order = np.argsort(values)
    below = np.cumsum(weight[order]) - weight[order] / 2
    inner = (below > 1e-12) & (below < 1 - 1e-12)
    low, high = np.interp(special.ndtri(_TAILS), special.ndtri(below[inner]), values[order][inner])
    return float(low), float(high)


def _constant_rate(t: FloatArray, seen: NDArray[np.bool_]) -> dict[str, Interval]:
    num, total = float(seen.sum()), float(t.sum())
    rate, (low, high) = num / total, (float(x) / total for x in special.gammaincinv(num, _TAILS))
    lives = {"mean": 1.0, "median": log(2), "p90": log(10)}
    return {"rate": (rate, low, high), **{name: (x / rate, x / high, x / low) for name, x in lives.items()}}


def law_intervals(lifetime: Lifetime, family: str, t: FloatArray, seen: NDArray[np.bool_]) -> dict[str, Interval]:
    """Name -> (estimate, low, high) at 95 %, of parameters, mean, median and p90 of the maximum-likelihood `lifetime`.

    Fewer than two distinct failures, or lives that are all alike, do not bound two parameters.
    """
    if isinstance(lifetime, Exponential):
        return _constant_rate(t, seen)
    law, best = _LAWS[family], _maximum(lifetime)
    posterior = _Posterior(law=law, rows=_Rows.of(t, seen), best=best)
    told = len(np.unique(t[seen])) > 1 and best[0] > _ALIKE
    points = posterior.points() if told else None
    with np.errstate(all="ignore"):
        estimates = law.read(*(np.array([x]) for x in best))
        spans = law.read(*points[:2]) if points else {}
    found = {}
    for name, (estimate,) in estimates.items():
        low, high = _tails(spans[name], points[2]) if points else _OPEN
        with np.errstate(over="ignore"):
            ends = [x if name == "mu" else float(np.exp(x)) for x in (float(estimate), low, high)]
        found[name] = (ends[0], min(ends[:2]), max(ends[0], ends[2]))
    return found
