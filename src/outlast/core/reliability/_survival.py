"""Lifetimes from data, censored ones included: Kaplan-Meier, Nelson-Aalen, maximum likelihood, fit tests, comparison.

A duration with observed = False is censored: the life was longer. Invariant: estimators use every row; ties are handled
as in the sources. Sources: Kaplan & Meier (1958); Greenwood (1926); Aalen (1978); Meeker & Escobar (1998) ch. 8;
Lewis, J. Appl. Prob. 2 (1965) and Stute et al. (1993) (bootstrap of goodness of fit); Akaike (1974).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from outlast.errors import ConfigError

from ._law_intervals import Interval, law_intervals
from ._lifetimes import Exponential, Gamma, Lifetime, LogNormal, Weibull
from .check import FloatArray, positive

__all__ = [
    "FAMILIES", "Fit", "Steps", "best_fit", "compare_fits", "fit_lifetime", "goodness_of_fit", "kaplan_meier",
    "laplace_trend", "nelson_aalen",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """A step function: value[i] from time[i] on, with pointwise 95 % bounds; all (k,), times increasing."""

    time: FloatArray
    value: FloatArray
    low: FloatArray
    high: FloatArray

    def at(self, t: ArrayLike, before: float) -> FloatArray:
        """The value at each t; `before` ahead of the first step."""
        return np.append(before, self.value)[np.searchsorted(self.time, np.asarray(t), side="right")]


def _data(durations: ArrayLike, observed: ArrayLike | None) -> tuple[FloatArray, NDArray[np.bool_]]:
    t = positive("durations", durations).ravel()
    seen = np.ones(len(t), dtype=bool) if observed is None else np.asarray(observed, dtype=bool).ravel()
    if len(seen) != len(t) or not seen.any():
        raise ConfigError(
            "no observed failure, or lengths differ", remedy="give one flag per duration, at least one true"
        )
    return t, seen


def _risk_table(t: FloatArray, seen: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray, FloatArray]:
    times, index = np.unique(t, return_inverse=True)
    deaths = np.bincount(index, weights=seen).astype(np.float64)
    at_risk = len(t) - np.append(0, np.cumsum(np.bincount(index))[:-1]).astype(np.float64)
    keep = deaths > 0
    return times[keep], deaths[keep], at_risk[keep]


def kaplan_meier(durations: ArrayLike, observed: ArrayLike | None = None) -> Steps:
    """Survival function with Greenwood's variance on the log-log scale (bounds stay in [0, 1])."""
    times, deaths, at_risk = _risk_table(*_data(durations, observed))
    value = np.asarray(np.cumprod(1 - deaths / at_risk), dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.cumsum(deaths / (at_risk * (at_risk - deaths)))
        width = 1.959963985 * np.sqrt(variance) / np.abs(np.log(value))
        low, high = value ** np.exp(width), value ** np.exp(-width)
    return Steps(time=times, value=value, low=np.nan_to_num(low, nan=0.0), high=np.nan_to_num(high, nan=1.0))


def nelson_aalen(durations: ArrayLike, observed: ArrayLike | None = None) -> Steps:
    """Cumulative hazard with log-scale bounds."""
    times, deaths, at_risk = _risk_table(*_data(durations, observed))
    value = np.cumsum(deaths / at_risk)
    spread = np.exp(1.959963985 * np.sqrt(np.cumsum(deaths / at_risk**2)) / value)
    return Steps(time=times, value=value, low=value / spread, high=value * spread)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A fitted lifetime. Name -> (estimate, low, high) at 95 %: `parameters`, and in `spans` mean, median and p90."""

    family: str
    lifetime: Lifetime
    log_likelihood: float
    parameters: dict[str, Interval]
    spans: dict[str, Interval]
    num_rows: int
    num_observed: int

    @property
    def aic(self) -> float:
        return 2 * len(self.parameters) - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        return float(len(self.parameters) * np.log(self.num_rows) - 2 * self.log_likelihood)


def _exponential(p: FloatArray) -> Lifetime:
    return Exponential(rate=float(np.exp(p[0])))


def _weibull(p: FloatArray) -> Lifetime:
    return Weibull(shape=float(np.exp(p[0])), scale=float(np.exp(p[1])))


def _lognormal(p: FloatArray) -> Lifetime:
    return LogNormal(mu=float(p[0]), sigma=float(np.exp(p[1])))


def _gamma(p: FloatArray) -> Lifetime:
    return Gamma(shape=float(np.exp(p[0])), rate=float(np.exp(p[1])))


_Make = Callable[[FloatArray], Lifetime]
# name -> (maker from unconstrained parameters, [(name, on log scale)])
FAMILIES: Mapping[str, tuple[_Make, tuple[tuple[str, bool], ...]]] = {
    "exponential": (_exponential, (("rate", True),)),
    "weibull": (_weibull, (("shape", True), ("scale", True))),
    "lognormal": (_lognormal, (("mu", False), ("sigma", True))),
    "gamma": (_gamma, (("shape", True), ("rate", True))),
}


def _start(family: str, t: FloatArray, seen: NDArray[np.bool_]) -> FloatArray:
    logs, mean = np.log(t), float(t.sum() / seen.sum())
    starts = {
        "exponential": [-np.log(mean)],
        "weibull": [0.0, np.log(mean)],
        "lognormal": [float(logs.mean()), float(np.log(logs.std() + 0.1))],
        "gamma": [0.0, -np.log(mean)],
    }
    return np.asarray(starts[family])


def log_likelihood(lifetime: Lifetime, t: FloatArray, seen: NDArray[np.bool_]) -> float:
    """Sum of log densities of failures and log survivals of censored rows."""
    return float(np.sum(lifetime.logpdf(t[seen])) - np.sum(lifetime.cumhazard(t[~seen])))


def _cost(make: _Make, t: FloatArray, seen: NDArray[np.bool_]) -> Callable[[FloatArray], float]:
    def cost(p: FloatArray) -> float:
        try:
            with np.errstate(all="ignore"):
                value = -log_likelihood(make(np.clip(p, -60, 60)), t, seen)
        except (ConfigError, OverflowError):
            return 1e300
        return value if np.isfinite(value) else 1e300

    return cost


def _minimise(
    cost: Callable[[FloatArray], float], start: FloatArray, precision: float, *, simplex: FloatArray | None = None
) -> tuple[FloatArray, float]:
    from scipy.optimize import minimize

    limits = {"xatol": precision, "fatol": min(precision, 1e-2 * precision + 1e-9), "maxiter": 4000}
    found = minimize(cost, start, method="Nelder-Mead", options={**limits, "initial_simplex": simplex})
    return np.asarray(found.x, dtype=np.float64), float(found.fun)


def _again(family: str, near: FloatArray, t: FloatArray, seen: NDArray[np.bool_]) -> Lifetime:
    """The family's maximum, looked for near a point and to three digits: what a round of a bootstrap needs."""
    if family == "exponential":
        return Exponential(rate=float(seen.sum() / t.sum()))
    make, _ = FAMILIES[family]
    simplex = near + np.vstack([np.zeros(len(near)), 0.05 * np.eye(len(near))])
    return make(_minimise(_cost(make, t, seen), near, 1e-3, simplex=simplex)[0])


def fit_lifetime(family: str, durations: ArrayLike, observed: ArrayLike | None = None) -> Fit:
    """Maximum likelihood with censoring; intervals that hold the truth in 95 of 100 also where failures are few."""
    if family not in FAMILIES:
        raise ConfigError(f"no lifetime family {family!r}", remedy=f"one of {', '.join(FAMILIES)}")
    make, names = FAMILIES[family]
    t, seen = _data(durations, observed)
    cost = _cost(make, t, seen)
    point, least = _minimise(cost, _start(family, t, seen), 1e-7)
    lifetime = make(point)
    intervals = law_intervals(lifetime, family, t, seen)
    own = [name for name, _ in names]
    return Fit(
        family=family,
        lifetime=lifetime,
        log_likelihood=-least,
        parameters={name: intervals[name] for name in own},
        spans={name: interval for name, interval in intervals.items() if name not in own},
        num_rows=len(t),
        num_observed=int(seen.sum()),
    )


def compare_fits(durations: ArrayLike, observed: ArrayLike | None = None) -> list[Fit]:
    """All families, best (lowest AIC) first."""
    return sorted((fit_lifetime(name, durations, observed) for name in FAMILIES), key=lambda fit: fit.aic)


def best_fit(durations: ArrayLike, observed: ArrayLike | None = None) -> Fit:
    """The family with the lowest AIC."""
    return compare_fits(durations, observed)[0]


def _distance(lifetime: Lifetime, t: FloatArray, seen: NDArray[np.bool_]) -> float:
    steps = kaplan_meier(t, seen)
    model = lifetime.sf(steps.time)
    before = np.append(1.0, steps.value[:-1])
    return float(np.max(np.maximum(np.abs(steps.value - model), np.abs(before - model))))


def goodness_of_fit(
    fit: Fit, durations: ArrayLike, observed: ArrayLike | None, rng: np.random.Generator, rounds: int = 99
) -> tuple[float, float]:
    """(KS distance to Kaplan-Meier, p-value) by parametric bootstrap with refitting; censoring times resampled.

    The p-value is (1 + rounds that are as far off) / (1 + rounds): it cannot be less than 1 / (1 + rounds).
    A small p says that the family cannot have produced these data; a large p does not prove that it did.
    """
    t, seen = _data(durations, observed)
    distance = _distance(fit.lifetime, t, seen)
    limits = t[~seen] if (~seen).any() else np.asarray([np.inf])
    log_scale = dict(FAMILIES[fit.family][1])
    near = np.asarray([np.log(x) if log_scale[name] else x for name, (x, _, _) in fit.parameters.items()])
    worse = 0
    for _ in range(rounds):
        life = np.maximum(fit.lifetime.sample(rng, len(t)), 1e-12)
        limit = rng.choice(limits, len(t))
        limit = np.where(rng.random(len(t)) < (~seen).mean(), limit, np.inf)
        drawn, flag = np.minimum(life, limit), life <= limit
        if not flag.any():
            continue
        worse += _distance(_again(fit.family, near, drawn, flag), drawn, flag) >= distance
    return distance, (1 + worse) / (1 + rounds)


def laplace_trend(times: ArrayLike, horizon: float) -> tuple[float, float]:
    """Laplace's test of a trend over (0, horizon]: (z, two-sided p); z > 0 means failures grow denser."""
    t = positive("times", times).ravel()
    z = float((t.mean() / horizon - 0.5) * np.sqrt(12 * len(t)))
    return z, float(2 * special.ndtr(-abs(z)))
