"""Lifetimes made of lifetimes: competing risks, bathtub, frailty (lemons), first failure of many, renewals.

Invariant: hazards of independent risks add. It does not model dependence other than a shared frailty.
Sources: Meeker & Escobar (1998) ch. 15 (competing risks); Vaupel, Manton & Stallard (1979) (gamma frailty);
Cox, Renewal Theory (1962) (renewal function, superposition).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ._lifetimes import Exponential, Lifetime, Weibull
from .check import FloatArray, count, nonnegative, positive

__all__ = ["CompetingRisks", "FirstOf", "Frailty", "bathtub", "pooled_rate", "renewal_function"]


def _mean_by_quadrature(lifetime: Lifetime, scale: float) -> float:
    from scipy.integrate import quad

    def survive(u: float) -> float:  # t = scale * u / (1 - u): the half line on (0, 1)
        t = scale * u / (1 - u)
        return float(lifetime.sf(t)) * scale / (1 - u) ** 2

    return float(quad(survive, 0, 1, limit=400)[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class CompetingRisks(Lifetime):
    """The earliest of several independent causes: hazards add."""

    risks: tuple[Lifetime, ...]

    def __post_init__(self) -> None:
        count("risks", len(self.risks), 1)

    def cumhazard(self, t: ArrayLike) -> FloatArray:
        return np.asarray(sum(risk.cumhazard(t) for risk in self.risks))

    def hazard(self, t: ArrayLike) -> FloatArray:
        return np.asarray(sum(risk.hazard(t) for risk in self.risks))

    def mean(self) -> float:
        return _mean_by_quadrature(self, min(risk.mean() for risk in self.risks))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return np.asarray(np.minimum.reduce([risk.sample(rng, size) for risk in self.risks]))

    def share(self, cause: int) -> float:
        """The probability that `cause` is what ends the life: the integral of its hazard times the survival."""
        from scipy.integrate import quad

        scale = self.mean()

        def weight(u: float) -> float:
            t = scale * u / (1 - u)
            return float(self.risks[cause].hazard(t) * self.sf(t)) * scale / (1 - u) ** 2

        return float(quad(weight, 1e-300, 1 - 1e-12, limit=400)[0])


def bathtub(
    *, infant_shape: float, infant_scale: float, rate: float, wear_shape: float, wear_scale: float
) -> CompetingRisks:
    """Three-part bathtub: infant Weibull (shape < 1) + constant `rate` + wear-out Weibull (shape > 1)."""
    positive("1 - infant_shape", 1 - infant_shape), positive("wear_shape - 1", wear_shape - 1)
    parts = (
        Weibull(shape=infant_shape, scale=infant_scale),
        Exponential(rate=rate),
        Weibull(shape=wear_shape, scale=wear_scale),
    )
    return CompetingRisks(risks=parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstOf(Lifetime):
    """The first failure among `num` like units (a series system): S^num."""

    unit: Lifetime
    num: int

    def __post_init__(self) -> None:
        count("num", self.num, 1)

    def cumhazard(self, t: ArrayLike) -> FloatArray:
        return np.asarray(self.num * self.unit.cumhazard(t))

    def hazard(self, t: ArrayLike) -> FloatArray:
        return np.asarray(self.num * self.unit.hazard(t))

    def quantile(self, p: ArrayLike) -> FloatArray:
        return self.unit.quantile(-np.expm1(np.log1p(-np.asarray(p, dtype=float)) / self.num))

    def mean(self) -> float:
        return _mean_by_quadrature(self, max(float(self.quantile(0.5)), 1e-300))


@dataclass(frozen=True, kw_only=True, slots=True)
class Frailty(Lifetime):
    """Units differ: hazard is Z h(t), Z ~ Gamma with mean 1 and this `variance`: S(t) = (1 + v H(t))^(-1/v)."""

    unit: Lifetime
    variance: float

    def __post_init__(self) -> None:
        positive("variance", self.variance)

    def cumhazard(self, t: ArrayLike) -> FloatArray:
        return np.asarray(np.log1p(self.variance * self.unit.cumhazard(t)) / self.variance)

    def hazard(self, t: ArrayLike) -> FloatArray:
        return np.asarray(self.unit.hazard(t) / (1 + self.variance * self.unit.cumhazard(t)))

    def mean(self) -> float:
        return _mean_by_quadrature(self, self.unit.mean())

    def posterior(self, failures: ArrayLike, expected: ArrayLike) -> FloatArray:
        """Posterior mean of Z after `failures` where `expected` (rate x exposure) were expected of an average unit."""
        seen, due = nonnegative("failures", failures), nonnegative("expected", expected)
        return np.asarray((1 / self.variance + seen) / (1 / self.variance + due))

    def share_of_worst(self, share: float) -> float:
        """The share of all failures that the worst `share` of units has in the long run (Lorenz curve of a Gamma)."""
        from scipy import special

        a = 1 / self.variance
        cut = special.gammainccinv(a, share)
        return float(special.gammaincc(a + 1, cut))


def pooled_rate(lifetimes: Sequence[Lifetime]) -> float:
    """Long-run failures per unit of time of a superposition of renewal processes: the sum of 1/mean (Cox, ch. 6)."""
    return float(sum(1 / lifetime.mean() for lifetime in lifetimes))


def renewal_function(lifetime: Lifetime, horizon: float, steps: int = 1000) -> FloatArray:
    """m(t): expected renewals by t at `steps` + 1 even times up to `horizon`; error O(1/steps).

    Solves m = F + m * dF by the midpoint (RS) method: Xie, Comm. Stat. Simul. 18 (1989).
    """
    positive("horizon", horizon), count("steps", steps, 1)
    dt = horizon / steps
    at = lifetime.cdf(np.arange(steps + 1) * dt)
    half = lifetime.cdf((np.arange(steps) + 0.5) * dt)
    m = np.zeros(steps + 1)
    for i in range(1, steps + 1):
        past = np.dot(half[i - 1 : 0 : -1], np.diff(m[:i])) if i > 1 else 0.0
        m[i] = (at[i] + past - half[0] * m[i - 1]) / (1 - half[0])
    return m
