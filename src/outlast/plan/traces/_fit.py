"""What a trace says of its fleet: rates with intervals, bursts, lemons, common causes, repairs and their drift.

Every figure is a posterior or carries an interval. Invariant: repairs still open at the end count as censored, and a
machine that never failed counts as evidence too. Sources: `core.reliability` (rates, survival).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from outlast.core import reliability as rel
from outlast.core.reliability.check import FloatArray
from outlast.errors import ConfigError

from ._records import Trace

__all__ = [
    "INCIDENT_H", "WEEK_H", "FleetFit", "RepairModel", "Statistics", "fit_trace", "fleet_intervals", "node_rate",
    "statistics",
]  # fmt: skip

WEEK_H = 168.0
BLOCK_H = 4 * WEEK_H
INCIDENT_H = 0.1
"""Failures closer than six minutes are one incident (a shared cause)."""
_LEAST_REPAIR_H = 0.1
_SIGNIFICANT = 0.05
_COSINES = 6  # fewer are wider, more take weeks that are like the next for a proof: 91 to 94 of 100 hold then
_LEAST_DISPERSION = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """What the generator must reproduce, of any trace: NaN where there is too little to say."""

    num_failures: int
    gap_cv: float
    weekly_dispersion: float
    worst_tenth_share: float
    repair_median_h: float
    repair_p90_h: float


def statistics(trace: Trace) -> Statistics:
    """Gaps' coefficient of variation, weekly variance over mean, share of the worst tenth of machines, repairs.

    Repair quantiles are of all repairs started in the trace, by Kaplan-Meier (open ones censored).
    """
    times = trace.times_h()
    gaps = np.diff(times)
    weeks = np.histogram(times, np.arange(0, trace.hours + 1e-9, WEEK_H))[0]
    per_node = np.sort(list(Counter(f.node for f in trace.failures).values()))[::-1]
    worst = per_node[: max(1, round(trace.num_nodes / 10))].sum() / max(len(times), 1)
    spans, seen, _ = trace.repairs_h()
    nan = float("nan")
    median, p90 = (_km_quantile(spans, seen, p) for p in (0.5, 0.9)) if seen.any() else (nan, nan)
    return Statistics(
        num_failures=len(times),
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else nan,
        weekly_dispersion=float(weeks.var(ddof=1) / weeks.mean()) if len(weeks) > 1 and weeks.sum() else nan,
        worst_tenth_share=float(worst),
        repair_median_h=median,
        repair_p90_h=p90,
    )


def _km_quantile(spans: FloatArray, seen: np.ndarray[tuple[int], np.dtype[np.bool_]], p: float) -> float:
    if seen.all():
        return float(np.quantile(spans, p))
    curve = rel.kaplan_meier(np.maximum(spans, 1e-6), seen)
    below = np.flatnonzero(curve.value <= 1 - p)
    return float(curve.time[below[0]]) if len(below) else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairModel:
    """ln(repair hours) = level + slope x blocks since the end of the trace + block effect + residual.

    A block is four weeks. slope and level carry their standard errors. Where the drift is not significant at 5 % the
    slope is 0 and the level that of the whole trace, both as uncertain as with it. drift_p: the test, either way;
    residuals: the trace's own, about their block's mean; blocks differ in spread too (spread_sd, of its logarithm).
    """

    level: float
    slope: float
    covariance: FloatArray
    block_sd: float
    residuals: FloatArray
    spread_sd: float
    drift_p: float
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetFit:
    """A fitted fleet; enough to describe it, to generate traces like it, and to plan on it."""

    name: str
    num_nodes: int
    hours: float
    num_failures: int
    machine_hours: float
    node_rate_h: rel.RateInterval
    """The rate per machine-hour, with its interval: the MTBF is one over it."""
    classes: tuple[tuple[str, int], ...]
    weekly: rel.HierarchicalRates
    lemons: rel.HierarchicalRates
    weekly_correlation: float
    transient_variance: float
    incident_sizes: tuple[int, ...]
    repair: RepairModel | None
    repair_fits: tuple[rel.Fit, ...]
    repair_gof: tuple[float, float] | None
    gap_fits: tuple[rel.Fit, ...]
    gap_gof: tuple[float, float] | None
    exponential_gof: tuple[float, float] | None
    statistics: Statistics
    weekly_counts: tuple[int, ...]
    node_counts: tuple[int, ...]
    rounds: int
    """Bootstrap rounds in each fit test; 0: none was made."""

    @property
    def burst_variance(self) -> float:
        """Variance of the fleet's weekly rate about its mean (Gamma, mean 1)."""
        return 1 / self.weekly.shape

    @property
    def mean_incident(self) -> float:
        return float(np.mean(self.incident_sizes))


def incidents(times: FloatArray) -> list[int]:
    """Sizes of the incidents: runs of failures each closer than INCIDENT_H to the one before."""
    if not len(times):
        return []
    cuts = np.flatnonzero(np.diff(times) > INCIDENT_H) + 1
    return [len(part) for part in np.split(times, cuts)]


def _incident_weeks(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    times = trace.times_h()
    starts = times[np.append(0, np.flatnonzero(np.diff(times) > INCIDENT_H) + 1)]
    weekly = np.histogram(starts, np.arange(0, trace.hours + 1e-9, WEEK_H))[0].astype(np.int64)
    return weekly if len(weekly) >= 2 else np.array([len(times)])


def _correlation(weekly: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    """Correlation of the rate from one week to the next: lag-one covariance over the variance beyond Poisson's."""
    if len(weekly) < 12:
        return 0.0
    centred = weekly - weekly.mean()
    beyond = float(weekly.var(ddof=1) - weekly.mean())
    if beyond <= 0:
        return 0.0
    return float(np.clip(np.mean(centred[1:] * centred[:-1]) / beyond, 0.0, 0.95))


def _transient(trace: Trace) -> float:
    """Variance of a machine's proneness from block to block about its own lasting level.

    Proneness of a machine in a block has variance V_b, over the whole trace V_t = lasting + transient / blocks.
    """
    blocks = int(trace.hours // BLOCK_H)
    if blocks < 3:
        return 0.0
    cells, whole = np.zeros((trace.num_nodes, blocks)), np.zeros(trace.num_nodes)
    names = {name: i for i, name in enumerate(sorted({f.node for f in trace.failures}))}
    for failure in trace.failures:
        block = int(failure.down_h // BLOCK_H)
        if block < blocks:
            cells[names[failure.node], block] += 1
    whole = cells.sum(axis=1)
    total = cells.sum(axis=0)
    # each block is measured against its own mean, so that the fleet's bursts do not count as lemons
    exposure = np.broadcast_to(total / max(total.mean(), 1e-9) * BLOCK_H + 1e-3, cells.shape)
    per_block = 1 / rel.hierarchical_rates(cells.ravel(), exposure.ravel()).shape
    lasting = 1 / rel.hierarchical_rates(whole, np.full(len(whole), blocks * BLOCK_H)).shape
    return max(0.0, (per_block - lasting) / (1 - 1 / blocks))


def _repair_model(trace: Trace) -> RepairModel | None:
    spans, seen, starts = trace.repairs_h()
    if seen.sum() < 10:
        return None
    # An open repair says only that it is long: it enters with the mean residual life beyond it, once (EM's first step).
    logs = np.log(np.maximum(spans, _LEAST_REPAIR_H))
    logs = logs + np.where(seen, 0.0, float(np.std(logs)) * 0.5)
    block = np.floor((starts - trace.hours) / BLOCK_H) + 0.5
    names, index = np.unique(block, return_inverse=True)
    num = np.bincount(index).astype(np.float64)
    means = np.bincount(index, weights=logs) / num
    residuals = logs - means[index]
    within = float(np.sqrt(np.sum(residuals**2) / max(len(logs) - len(names), 1)))
    residuals = residuals * within / max(float(residuals.std()), 1e-9)
    spread_sd = _spread_sd(residuals, index, num)
    if len(names) < 4:
        return RepairModel(
            level=float(logs.mean()),
            slope=0.0,
            covariance=np.diag([within**2 / len(logs), 0.0]),
            block_sd=0.0,
            residuals=residuals,
            spread_sd=spread_sd,
            drift_p=1.0,
            num_blocks=len(names),
        )
    return _drift(names, means, num, within, residuals, spread_sd)


def _spread_sd(residuals: FloatArray, index: np.ndarray[tuple[int], np.dtype[np.intp]], num: FloatArray) -> float:
    """Between-block standard deviation of the log spread, beyond what sampling gives (1 / 2(n-1) a block)."""
    big = np.flatnonzero(num >= 5)
    if len(big) < 3:
        return 0.0
    logs = np.array([np.log(max(float(residuals[index == b].std(ddof=1)), 1e-6)) for b in big])
    return float(np.sqrt(max(0.0, logs.var(ddof=1) - float(np.mean(1 / (2 * (num[big] - 1)))))))


def _drift(
    names: FloatArray, means: FloatArray, num: FloatArray, within: float, residuals: FloatArray, spread_sd: float
) -> RepairModel:
    """Weighted least squares of block means on time, with a variance between blocks (as DerSimonian and Laird)."""
    from scipy import special

    level, sampling = np.ones((len(names), 1)), max(within**2, 1e-9) / num
    beta, covariance, between = _least_squares(np.column_stack([level, names]), means, sampling)
    drift_p = float(2 * special.ndtr(-abs(float(beta[1] / np.sqrt(covariance[1, 1])))))
    if drift_p >= _SIGNIFICANT:  # not followed; what it may be yet stays in the covariance
        alone, _, between = _least_squares(level, means, sampling)
        beta = np.array([alone[0], 0.0])
    return RepairModel(
        level=float(beta[0]),
        slope=float(beta[1]),
        covariance=covariance,
        block_sd=float(np.sqrt(between)),
        residuals=residuals,
        spread_sd=spread_sd,
        drift_p=drift_p,
        num_blocks=len(names),
    )


def _least_squares(design: FloatArray, means: FloatArray, variance: FloatArray) -> tuple[FloatArray, FloatArray, float]:
    """(coefficients, their covariance, variance between blocks beyond the sampling `variance` of their means)."""
    between = 0.0
    for _ in range(20):
        weight = 1 / (variance + between)
        covariance = np.linalg.inv(design.T @ (weight[:, None] * design))
        beta = covariance @ (design.T @ (weight * means))
        excess = float(np.sum((means - design @ beta) ** 2 - variance) / (len(means) - design.shape[1]))
        between = max(0.0, 0.5 * between + 0.5 * excess)
    return np.asarray(beta, dtype=np.float64), np.asarray(covariance, dtype=np.float64), between


def _dispersion(trace: Trace) -> tuple[float, int]:
    """(variance of the number of failures over its mean, how many squares it was estimated from).

    It is read off the six slowest cosines of the failures by week, each of which estimates the variance of their sum:
    with what weeks that differ, like weeks in a row and incidents of several machines add to it. Below four weeks a
    quarter of the record stands for a week. Failures at even distances are no proof that the next ones will be: there
    is a least dispersion.
    Source: Lazarus, Lewis, Stock & Watson, HAR inference, JBES 36(4) (2018), equal-weighted cosines.
    """
    weeks = max(4, round(trace.hours / WEEK_H))
    counts = np.histogram(trace.times_h(), np.linspace(0, trace.hours, weeks + 1))[0]
    squares = min(weeks - 1, _COSINES)
    phase = np.outer(np.arange(1, squares + 1), np.arange(weeks) + 0.5) * np.pi / weeks
    variance = 2 / weeks * float(np.mean((np.cos(phase) @ counts) ** 2))
    return max(variance / max(float(counts.mean()), 1e-9), _LEAST_DISPERSION), squares


def node_rate(trace: Trace) -> rel.RateInterval:
    """The rate per machine-hour. Its interval is as wide as the record itself varies: that of independent failures held
    the truth in half of all bursty fleets, one with a prior on how much weeks differ in 99 of 100 steady ones.

    Over its dispersion the number of failures is as a Poisson's, whose rate has a Gamma posterior (Jeffreys' prior); as
    the dispersion is estimated, its ends lie where those of Student's t do.
    """
    from scipy import special

    counted = rel.gamma_poisson(len(trace.failures), trace.exposure_h)
    dispersion, squares = _dispersion(trace)
    tail = float(special.ndtr(special.stdtrit(squares, (1 - counted.level) / 2)))
    alpha, beta = len(trace.failures) / dispersion + 0.5, trace.exposure_h / dispersion
    low, high = (float(end(alpha, tail)) / beta for end in (special.gammaincinv, special.gammainccinv))
    return replace(counted, low=low, high=high)


def fleet_intervals(trace: Trace) -> tuple[rel.RateInterval, rel.HierarchicalRates]:
    """(the rate per machine-hour, the rates of incidents a week), each with its interval."""
    weekly = _incident_weeks(trace)
    weeks = rel.hierarchical_rates(weekly, np.full(len(weekly), WEEK_H))
    return node_rate(trace), weeks


def fit_trace(trace: Trace, seed: int = 0, rounds: int = 200) -> FleetFit:
    """Fit everything; `rounds` of bootstrap per goodness of fit (0 skips it). Needs ten failures."""
    if len(trace.failures) < 10:
        raise ConfigError(
            f"{len(trace.failures)} failures are too few to fit", where=trace.name, remedy="give a log with ten or more"
        )
    rng = np.random.default_rng(seed)
    counts = Counter(f.node for f in trace.failures)
    per_node = np.zeros(trace.num_nodes)
    per_node[: len(counts)] = sorted(counts.values(), reverse=True)
    weekly = _incident_weeks(trace)
    rate, weeks = fleet_intervals(trace)
    spans, seen, _ = trace.repairs_h()
    gaps = np.maximum(np.diff(trace.times_h()), 1e-3)
    repair_fits = tuple(rel.compare_fits(np.maximum(spans, 1e-3), seen)) if seen.sum() >= 10 else ()
    gap_fits = tuple(rel.compare_fits(gaps))
    exponential = next(fit for fit in gap_fits if fit.family == "exponential")

    def tested(fit: rel.Fit, data: FloatArray, flags: object) -> tuple[float, float] | None:
        return rel.goodness_of_fit(fit, data, flags, rng, rounds) if rounds else None  # type: ignore[arg-type]

    return FleetFit(
        name=trace.name,
        num_nodes=trace.num_nodes,
        hours=trace.hours,
        num_failures=len(trace.failures),
        machine_hours=trace.exposure_h,
        weekly_correlation=_correlation(weekly),
        node_rate_h=rate,
        classes=tuple(Counter(f.kind for f in trace.failures).most_common()),
        weekly=weeks,
        lemons=rel.hierarchical_rates(per_node, np.full(trace.num_nodes, trace.hours)),
        transient_variance=_transient(trace),
        incident_sizes=tuple(incidents(trace.times_h())),
        repair=_repair_model(trace),
        repair_fits=repair_fits,
        repair_gof=tested(repair_fits[0], np.maximum(spans, 1e-3), seen) if repair_fits else None,
        gap_fits=gap_fits,
        gap_gof=tested(gap_fits[0], gaps, None),
        exponential_gof=tested(exponential, gaps, None),
        statistics=statistics(trace),
        weekly_counts=tuple(int(w) for w in weekly),
        node_counts=tuple(int(c) for c in per_node),
        rounds=rounds,
    )
