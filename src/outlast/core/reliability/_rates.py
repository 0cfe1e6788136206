"""Failure rates from counts: the Gamma-Poisson posterior, and hierarchical rates where units differ (lemons).

Invariant: a posterior is a prior plus evidence (alpha + failures, beta + exposure); units of beta are the exposure's.
Source: Gelman et al., Bayesian Data Analysis (3rd ed.), 2.6 and 5; Jeffreys' prior for a rate is Gamma(1/2, 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ._check import FloatArray, nonnegative, positive, probability

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

    mean, shape: posterior means over the grid; *_interval: 95 %; unit_mean, unit_low, unit_high: (n,), mixed over the
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


def _grid(failures: FloatArray, exposure: FloatArray, size: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    total = (failures.sum() + 0.5) / exposure.sum()
    means = total * np.exp(np.linspace(-1, 1, size) * min(3.0, 12 / np.sqrt(failures.sum() + 1)))
    shapes = np.exp(np.linspace(np.log(0.02), np.log(200), size))
    shape, mean = (part.ravel() for part in np.meshgrid(shapes, means, indexing="ij"))
    a, b = shape[:, None], (shape / mean)[:, None]
    pairs, times = np.unique(np.stack([failures, exposure]), axis=1, return_counts=True)
    n, t = pairs
    log_like = special.gammaln(a + n) - special.gammaln(a) + a * np.log(b) - (a + n) * np.log(b + t)
    # prior: flat in log mean; uniform in the shrinkage 1/(1+shape), the usual weak choice for a between-unit spread
    log_post = log_like @ times + np.log(shape) - 2 * np.log1p(shape)
    weight = np.exp(log_post - log_post.max())
    return mean, shape, weight / weight.sum()


def _weighted_quantiles(values: FloatArray, weight: FloatArray) -> tuple[float, float]:
    order = np.argsort(values)
    cumulative = np.cumsum(weight[order])
    low, high = np.searchsorted(cumulative, [0.025, 0.975])
    top = len(values) - 1
    return float(values[order][min(low, top)]), float(values[order][min(high, top)])


def hierarchical_rates(failures: ArrayLike, exposure: ArrayLike, size: int = 40) -> HierarchicalRates:
    """Full Bayes on a grid of (mean, shape): failures and exposure of each unit, both (n,), exposure > 0."""
    n, t = (
        nonnegative("failures", failures).ravel(),
        np.broadcast_to(positive("exposure", exposure), np.shape(failures)).ravel(),
    )
    mean, shape, weight = _grid(n, t, size)
    keep = weight > weight.max() * 1e-6
    mean, shape, weight = mean[keep], shape[keep], weight[keep] / weight[keep].sum()
    alpha, beta = shape[:, None] + n, (shape / mean)[:, None] + t
    population = float(weight @ mean)
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
        mean_interval=_weighted_quantiles(mean, weight),
        shape=float(weight @ shape),
        grid=(mean, shape, weight),
        shape_interval=_weighted_quantiles(shape, weight),
        unit_mean=weight @ (alpha / beta),
        unit_low=low,
        unit_high=high,
        lemons=lemons,
    )
