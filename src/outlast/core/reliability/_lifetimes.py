"""Lifetimes: exponential, Weibull, log-normal, gamma, and the survival algebra that all of them share.

Time is in any one unit (the caller's); rates are per that unit. Invariant: `sf` is exp(-cumhazard), non-increasing,
1 at 0. Nothing here draws without the generator it is handed.
Sources: Meeker & Escobar, Statistical Methods for Reliability Data (1998), ch. 4 and 5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import exp, gamma, log

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from .check import FloatArray, nonnegative, positive, probability

__all__ = ["Exponential", "Gamma", "Lifetime", "LogNormal", "Weibull"]


class Lifetime(ABC):
    """A non-negative random time. Arrays in, arrays of the same shape out."""

    @abstractmethod
    def cumhazard(self, t: ArrayLike) -> FloatArray:
        """H(t) = -ln S(t)."""

    @abstractmethod
    def hazard(self, t: ArrayLike) -> FloatArray:
        """h(t) = f(t) / S(t), per unit of time."""

    @abstractmethod
    def mean(self) -> float:
        """Expected lifetime."""

    def sf(self, t: ArrayLike) -> FloatArray:
        """Survival function P(T > t)."""
        return np.exp(-self.cumhazard(t))

    def cdf(self, t: ArrayLike) -> FloatArray:
        """P(T <= t)."""
        return -np.expm1(-self.cumhazard(t))

    def logpdf(self, t: ArrayLike) -> FloatArray:
        """Log density: ln h(t) - H(t)."""
        with np.errstate(divide="ignore"):
            return np.log(self.hazard(t)) - self.cumhazard(t)

    def quantile(self, p: ArrayLike) -> FloatArray:
        """The time by which a share `p` has failed, by bisection on the cumulative hazard (relative error 1e-12)."""
        target = -np.log1p(-probability("p", p))
        high = np.full_like(target, self.mean())
        while np.any(grow := self.cumhazard(high) < target):
            high = np.where(grow & np.isfinite(target), high * 2, high)
            if np.all(np.isinf(target[grow])):
                break
        low = np.zeros_like(high)
        for _ in range(200):
            middle = (low + high) / 2
            below = self.cumhazard(middle) < target
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.where(np.isinf(target), np.inf, np.where(target == 0, 0.0, high))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws, by inversion."""
        return self.quantile(rng.random(size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponential(Lifetime):
    """Constant hazard `rate` > 0: no memory."""

    rate: float

    def __post_init__(self) -> None:
        positive("rate", self.rate)

    def cumhazard(self, t: ArrayLike) -> FloatArray:
        return self.rate * nonnegative("t", t)

    def hazard(self, t: ArrayLike) -> FloatArray:
        return np.full_like(nonnegative("t", t), self.rate)

    def mean(self) -> float:
        return 1 / self.rate

    def quantile(self, p: ArrayLike) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.asarray(-np.log1p(-probability("p", p)) / self.rate)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return rng.exponential(1 / self.rate, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weibull(Lifetime):
    """S(t) = exp(-(t/scale)^shape): shape below 1 is infant mortality, above 1 wear-out."""

    shape: float
    scale: float

    def __post_init__(self) -> None:
        positive("shape", self.shape), positive("scale", self.scale)

    def cumhazard(self, t: ArrayLike) -> FloatArray:
        return np.asarray((nonnegative("t", t) / self.scale) ** self.shape)

    def hazard(self, t: ArrayLike) -> FloatArray:
        with np.errstate(divide="ignore"):
            ratio = np.asarray(nonnegative("t", t) / self.scale)
            return np.asarray(self.shape / self.scale * ratio ** (self.shape - 1))

    def mean(self) -> float:
        return self.scale * gamma(1 + 1 / self.shape)

    def quantile(self, p: ArrayLike) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.asarray(self.scale * (-np.log1p(-probability("p", p))) ** (1 / self.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormal(Lifetime):
    """ln T ~ Normal(mu, sigma): the usual repair time. `median` = exp(mu)."""

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        positive("sigma", self.sigma)

    @classmethod
    def from_median_mean(cls, median: float, mean: float) -> LogNormal:
        """The log-normal with this median and mean (mean > median > 0)."""
        positive("median", median), positive("mean - median", mean - median)
        return cls(mu=log(median), sigma=float(np.sqrt(2 * log(mean / median))))

    def _z(self, t: ArrayLike) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.asarray((np.log(nonnegative("t", t)) - self.mu) / self.sigma)

    def cumhazard(self, t: ArrayLike) -> FloatArray:
        return np.asarray(-special.log_ndtr(-self._z(t)))

    def hazard(self, t: ArrayLike) -> FloatArray:
        z, time = self._z(t), nonnegative("t", t)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_pdf = -0.5 * z**2 - 0.5 * log(2 * np.pi) - np.log(time * self.sigma)
            return np.where(time == 0, 0.0, np.exp(log_pdf - special.log_ndtr(-z)))

    def mean(self) -> float:
        return exp(self.mu + self.sigma**2 / 2)

    def quantile(self, p: ArrayLike) -> FloatArray:
        return np.asarray(np.exp(self.mu + self.sigma * special.ndtri(probability("p", p))))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return rng.lognormal(self.mu, self.sigma, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gamma(Lifetime):
    """Gamma(shape) with `rate` per unit of time; a sum of `shape` exponential phases when shape is whole."""

    shape: float
    rate: float

    def __post_init__(self) -> None:
        positive("shape", self.shape), positive("rate", self.rate)

    def cumhazard(self, t: ArrayLike) -> FloatArray:
        """Where the tail is too small for a float its logarithm is that of the asymptotic series (DLMF 8.11.2)."""
        k, x = self.shape, self.rate * nonnegative("t", t)
        with np.errstate(divide="ignore", invalid="ignore"):
            far = x - special.xlogy(k - 1, x) + special.gammaln(k) - np.log1p((k - 1) / x * (1 + (k - 2) / x))
            tail = special.gammaincc(k, x)
            return np.asarray(np.where(tail > 1e-280, -np.log(tail), far))

    def logpdf(self, t: ArrayLike) -> FloatArray:
        x = self.rate * nonnegative("t", t)
        with np.errstate(divide="ignore"):
            return np.asarray(special.xlogy(self.shape - 1, x) - x - special.gammaln(self.shape) + log(self.rate))

    def hazard(self, t: ArrayLike) -> FloatArray:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp(self.logpdf(t) + self.cumhazard(t))

    def mean(self) -> float:
        return self.shape / self.rate

    def quantile(self, p: ArrayLike) -> FloatArray:
        return np.asarray(special.gammaincinv(self.shape, probability("p", p)) / self.rate)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return rng.gamma(self.shape, 1 / self.rate, size)
