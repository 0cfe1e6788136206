"""Structures of components: series, parallel, k-of-n with unequal parts, common causes and shared shocks.

Invariant: probabilities in, exact probabilities out (sums over states, no sampling).
Sources: Barlow & Proschan (1975); Hong, Comput. Stat. Data Anal. 59 (2013) (Poisson-binomial);
Fleming (1975) and NUREG/CR-4780 (beta factor).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from .check import FloatArray, count, probability

__all__ = [
    "any_of", "beta_factor", "binomial_pmf", "k_of_n", "k_of_n_equal", "parallel", "poisson_binomial", "series",
    "series_power", "shock_survivors",
]  # fmt: skip


def series(reliability: ArrayLike, axis: int = -1) -> FloatArray:
    """All parts must work: the product along `axis`."""
    return np.asarray(np.prod(probability("reliability", reliability), axis=axis))


def series_power(reliability: ArrayLike, num: ArrayLike) -> FloatArray:
    """`num` equal parts in series: R^num, precise when R is near 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.asarray(num, dtype=float) * np.log(probability("reliability", reliability))
    return np.where(np.asarray(num) == 0, 1.0, np.exp(logs))


def any_of(chance: ArrayLike, num: ArrayLike) -> FloatArray:
    """P(at least one of `num` independent events of probability `chance`): 1 - (1-p)^num, precise for small p."""
    p = probability("chance", chance)
    with np.errstate(divide="ignore"):
        return np.asarray(-np.expm1(np.asarray(num, dtype=float) * np.log1p(-p)))


def parallel(reliability: ArrayLike, axis: int = -1) -> FloatArray:
    """At least one part must work."""
    return np.asarray(1 - np.prod(1 - probability("reliability", reliability), axis=axis))


def binomial_pmf(num: int, p: float) -> FloatArray:
    """P(exactly i of `num` parts work), i = 0..num, in logs (precise for a million parts)."""
    count("num", num, 0), probability("p", p)
    i = np.arange(num + 1)
    log_ways = special.gammaln(num + 1) - special.gammaln(i + 1) - special.gammaln(num - i + 1)
    return np.asarray(np.exp(log_ways + special.xlogy(i, p) + special.xlog1py(num - i, -p)))


def poisson_binomial(reliability: ArrayLike) -> FloatArray:
    """P(exactly i parts work), i = 0..n, for unequal independent parts (n,): n convolutions, exact, O(n^2)."""
    pmf = np.ones(1)
    for p in probability("reliability", reliability).ravel():
        pmf = np.append(pmf * (1 - p), 0.0) + np.append(0.0, pmf * p)
    return pmf


def k_of_n(k: int, reliability: ArrayLike) -> float:
    """P(at least k of the n unequal parts work)."""
    pmf = poisson_binomial(reliability)
    count("k", k, 0, len(pmf) - 1)
    return float(min(1.0, pmf[k:].sum()))


def k_of_n_equal(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(at least k of n equal parts work), by the regularised incomplete beta function; vectorised."""
    probability("p", p)
    return np.asarray(
        special.bdtrc(np.asarray(k) - 1, np.asarray(n), np.asarray(p, dtype=float)) * (np.asarray(k) > 0)
        + (np.asarray(k) <= 0)
    )


def beta_factor(k: int, n: int, p_fail: float, beta: float) -> float:
    """k-of-n with common cause: a share `beta` of each part's failure probability strikes all parts together."""
    probability("p_fail", p_fail), probability("beta", beta)
    return float((1 - beta * p_fail) * k_of_n_equal(k, n, 1 - (1 - beta) * p_fail))


def _thin(pmf: FloatArray, p_shock: float) -> FloatArray:
    shocked = pmf * (1 - p_shock)
    shocked[0] += p_shock
    return shocked


def shock_survivors(groups: Sequence[int], p_node: float, p_group: float, p_all: float = 0.0) -> FloatArray:
    """P(exactly i nodes work), i = 0..n, when each of `groups` (racks of that many nodes) may be lost whole.

    p_node, p_group, p_all: failure probability of a node, of a rack (switch, power), of everything at once. Exact.
    """
    for name, value in (("p_node", p_node), ("p_group", p_group), ("p_all", p_all)):
        probability(name, value)
    total = np.ones(1)
    for size in groups:
        total = np.convolve(total, _thin(binomial_pmf(count("group size", size, 1), 1 - p_node), p_group))
    return _thin(total, p_all)
