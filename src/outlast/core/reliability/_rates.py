"""Failure rates from counts: the Gamma-Poisson posterior, and hierarchical rates where units differ (lemons).

Invariant: a posterior is a prior plus evidence (alpha + failures, beta + exposure); units of beta are the exposure's.
Source: Gelman et al., Bayesian Data Analysis (3rd ed.), 2.6 and 5; Jeffreys' prior for a rate is Gamma(1/2, 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from .check import FloatArray, nonnegative, positive, probability

__all__ = [
    "HierarchicalRates", "RateInterval", "count_interval", "gamma_poisson", "hierarchical_rates", "time_to_tell_apart",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RateInterval:
    """Posterior of a rate: Gamma(alpha, beta) with its mean and equal-tailed credible interval at `level`."""

    alpha: float
    beta: float
    level: float
    mean: float
    low: float
    high: float

    def predictive(self, exposure: float, p: ArrayLike) -> FloatArray:
        """Quantiles of the number of failures in a further `exposure` (negative binomial), whole numbers."""
        odds = self.beta / (self.beta + float(nonnegative("exposure", exposure)))
        wanted = probability("p", p)
        low, high = np.full(wanted.shape, -1.0), np.full(wanted.shape, 1.0)
        while np.any(special.betainc(self.alpha, high + 1, odds) < wanted) and high.max() < 1e15:
            high *= 2
        while np.any(high - low > 1):
            middle = np.floor((low + high) / 2)
            enough = special.betainc(self.alpha, middle + 1, odds) >= wanted
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return high


def gamma_poisson(
    failures: float, exposure: float, *, prior_alpha: float = 0.5, prior_beta: float = 0.0, level: float = 0.95
) -> RateInterval:
    """Posterior after `failures` in `exposure` under Gamma(prior_alpha, prior_beta); the default is Jeffreys' prior."""
    alpha = float(nonnegative("failures", failures) + positive("prior_alpha", prior_alpha))
    beta = float(
        positive("exposure + prior_beta", nonnegative("exposure", exposure) + nonnegative("prior_beta", prior_beta))
    )
    tail = (1 - float(probability("level", level))) / 2
    low, high = special.gammaincinv(alpha, tail) / beta, special.gammainccinv(alpha, tail) / beta
    return RateInterval(alpha=alpha, beta=beta, level=level, mean=alpha / beta, low=float(low), high=float(high))


def count_interval(failures: float, level: float = 0.95) -> tuple[float, float]:
    """Exact (Garwood 1936) confidence interval of a Poisson mean after `failures`."""
    n, tail = float(nonnegative("failures", failures)), (1 - float(probability("level", level))) / 2
    low = float(special.gammaincinv(n, tail)) if n else 0.0
    return low, float(special.gammainccinv(n + 1, tail))


def time_to_tell_apart(rate_a: float, rate_b: float, *, level: float = 0.95, power: float = 0.8) -> float:
    """Exposure each design needs before a two-sided test of equal rates has this power (inf if the rates are equal).

    Square-root transform: sqrt counts have variance 1/4, so t = ((z_a + z_b)/2)^2 2 / (sqrt a - sqrt b)^2
    (Huffman, Appl. Stat. 33 (1984)).
    """
    gap = float(np.sqrt(nonnegative("rate_a", rate_a)) - np.sqrt(nonnegative("rate_b", rate_b)))
    if gap == 0:
        return float("inf")
    z = float(special.ndtri((1 + level) / 2) + special.ndtri(power))
    return z**2 / (2 * gap**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalRates:
    """Units' rates drawn from Gamma(shape, shape/mean): the population with its uncertainty, and each unit's posterior.

    mean, shape: posterior medians; *_interval: 95 %; unit_mean, unit_low, unit_high: (n,), mixed over the
    population's uncertainty; lemons: P(unit's rate > 3 population means), (n,).
    """

    mean: float
    mean_interval: tuple[float, float]
    shape: float
    shape_interval: tuple[float, float]
    grid: tuple[FloatArray, FloatArray, FloatArray]
    """The population's posterior: (mean, shape, weight) at the grid's points."""
    unit_mean: FloatArray
    unit_low: FloatArray
    unit_high: FloatArray
    lemons: FloatArray

    def draw(self, rng: np.random.Generator) -> tuple[float, float]:
        """One draw (mean, shape) of the population from its posterior."""
        mean, shape, weight = self.grid
        pick = int(rng.choice(len(weight), p=weight))
        return float(mean[pick]), float(shape[pick])


_Box = tuple[tuple[float, float], tuple[float, float]]  # of log mean and log shape


def _grid(failures: FloatArray, exposure: FloatArray, size: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The posterior at size x size points that span what has weight: looked for from far away, then closer."""
    total = float(np.log((failures.sum() + 0.5) / exposure.sum()))
    box: _Box = ((total - 3, total + 3), (float(np.log(0.02)), float(np.log(200))))
    pairs, times = np.unique(np.stack([failures, exposure]), axis=1, return_counts=True)
    for _ in range(8):
        mean, shape, weight = _posterior(pairs[0], pairs[1], times, box, size)
        closer = _where_weight_is(mean, box[0], weight), _where_weight_is(shape, box[1], weight)
        if all(new[1] - new[0] > 0.7 * (old[1] - old[0]) for new, old in zip(closer, box, strict=True)):
            break
        box = closer
    return mean, shape, weight


def _posterior(
    n: FloatArray, t: FloatArray, times: NDArray[np.intp], box: _Box, size: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    means, shapes = (np.exp(np.linspace(low, high, size)) for low, high in box)
    shape, mean = (part.ravel() for part in np.meshgrid(shapes, means, indexing="ij"))
    a, b = shape[:, None], (shape / mean)[:, None]
    log_like = special.gammaln(a + n) - special.gammaln(a) + a * np.log(b) - (a + n) * np.log(b + t)
    # prior: flat in log mean; uniform in the shrinkage 1/(1+shape), the usual weak choice for a between-unit spread
    log_post = log_like @ times + np.log(shape) - 2 * np.log1p(shape)
    weight = np.exp(log_post - log_post.max())
    return mean, shape, weight / weight.sum()


def _where_weight_is(values: FloatArray, within: tuple[float, float], weight: FloatArray) -> tuple[float, float]:
    """The logs between which all but 1e-5 of the weight lies, and one step more on both sides."""
    points, of = np.unique(values, return_inverse=True)
    share = np.bincount(of, weights=weight)
    kept = np.flatnonzero(share > 1e-5 * share.max())
    step = (within[1] - within[0]) / (len(points) - 1)
    low, high = float(np.log(points[kept[0]])) - step, float(np.log(points[kept[-1]])) + step
    return max(low, within[0]), min(high, within[1])


def _weighted_quantiles(values: FloatArray, weight: FloatArray) -> tuple[float, float, float]:
    """(2.5 %, median, 97.5 %), interpolated between the grid's points on their logarithms."""
    points, of = np.unique(values, return_inverse=True)
    share = np.bincount(of, weights=weight)
    below = np.cumsum(share) - share / 2
    low, middle, high = np.exp(np.interp([0.025, 0.5, 0.975], below, np.log(points)))
    return float(low), float(middle), float(high)


def hierarchical_rates(failures: ArrayLike, exposure: ArrayLike, size: int = 24) -> HierarchicalRates:
    """Full Bayes on a grid of (mean, shape): failures and exposure of each unit, both (n,), exposure > 0."""
    n, t = (
        nonnegative("failures", failures).ravel(),
        np.broadcast_to(positive("exposure", exposure), np.shape(failures)).ravel(),
    )
    mean, shape, weight = _grid(n, t, size)
    keep = weight > weight.max() * 1e-5
    mean, shape, weight = mean[keep], shape[keep], weight[keep] / weight[keep].sum()
    alpha, beta = shape[:, None] + n, (shape / mean)[:, None] + t
    low_mean, population, high_mean = _weighted_quantiles(mean, weight)
    low_shape, middle_shape, high_shape = _weighted_quantiles(shape, weight)
    levels = np.exp(np.linspace(np.log(population * 1e-4), np.log(population * 200), 400))
    low, high, lemons = np.empty(len(n)), np.empty(len(n)), np.empty(len(n))
    cache: dict[tuple[float, float], tuple[float, float, float]] = {}
    for i, key in enumerate(zip(n.tolist(), t.tolist(), strict=True)):
        if key not in cache:
            cdf = weight @ special.gammainc(alpha[:, i, None], beta[:, i, None] * levels)
            bounds = np.interp([0.025, 0.975], cdf, levels)
            cache[key] = (float(bounds[0]), float(bounds[1]), float(1 - np.interp(3 * population, levels, cdf)))
        low[i], high[i], lemons[i] = cache[key]
    return HierarchicalRates(
        mean=population,
        mean_interval=(low_mean, high_mean),
        shape=middle_shape,
        shape_interval=(low_shape, high_shape),
        grid=(mean, shape, weight),
        unit_mean=weight @ (alpha / beta),
        unit_low=low,
        unit_high=high,
        lemons=lemons,
    )
