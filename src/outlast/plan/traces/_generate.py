"""Traces like a fitted one: weekly bursts, incidents that take several machines, lemons, repair tails, drift.

Each generated trace first draws its parameters from their posteriors, so a set of traces spreads as widely as what is
not known. Invariant: one seed, one trace. The independent Poisson fleet is the comparison it must beat.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, fields

import numpy as np
from scipy import special

from outlast.core.reliability.check import FloatArray
from outlast.errors import ConfigError

from ._fit import BLOCK_H, WEEK_H, FleetFit, Statistics, statistics
from ._records import Failure, Trace

__all__ = ["Check", "generate", "generate_poisson", "predictive_check", "to_csv"]


def _weekly_rates(fit: FleetFit, weeks: int, rng: np.random.Generator) -> FloatArray:
    """Incidents per hour in each week: mean and spread drawn from their joint posterior, then a rate a week.

    Weeks follow each other as an autoregression of order one in normal scores: Gamma margins, the fitted correlation.
    """
    mean, shape = fit.weekly.draw(rng)
    rho = fit.weekly_correlation
    scores = rng.standard_normal(weeks)
    for i in range(1, weeks):
        scores[i] = rho * scores[i - 1] + np.sqrt(1 - rho**2) * scores[i]
    return np.asarray(special.gammaincinv(shape, special.ndtr(scores)) * mean / shape)


def _node_weights(fit: FleetFit, num_nodes: int, blocks: int, rng: np.random.Generator) -> FloatArray:
    """How prone each machine is in each block, (blocks, machines): lasting lemons times passing ones."""
    _, shape = fit.lemons.draw(rng)
    passing = fit.transient_variance
    lasting = max(1 / shape - passing / max(fit.hours / BLOCK_H, 1.0), 0.05)
    weights = np.tile(rng.gamma(1 / lasting, lasting, num_nodes), (blocks, 1)) + 1e-9
    if passing > 0:
        variance = passing / (1 + lasting)
        weights = weights * (rng.gamma(1 / variance, variance, (blocks, num_nodes)) + 1e-9)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _repair_h(fit: FleetFit, starts: FloatArray, ahead_h: float, rng: np.random.Generator) -> FloatArray:
    model = fit.repair
    if model is None:
        return np.zeros(len(starts))
    # variances that few blocks tell are uncertain themselves: Student's t in place of the normal
    degrees = max(model.num_blocks - 2, 1)
    wider = float(np.sqrt(degrees / rng.chisquare(degrees)))
    level, slope = rng.multivariate_normal([model.level, model.slope], model.covariance * wider**2)
    block = (starts + ahead_h) / BLOCK_H
    which = np.floor(block).astype(np.intp)
    first = int(which.min(initial=0))
    num, at = int(which.max(initial=0)) - first + 1, which - first
    effects = rng.normal(0, model.block_sd * wider, num)
    spread = np.exp(rng.normal(0, model.spread_sd * wider, num))
    centre = level + slope * (which + 0.5) + effects[at]
    return np.asarray(np.exp(centre + spread[at] * rng.choice(model.residuals, len(starts))))


def generate(
    fit: FleetFit,
    rng: np.random.Generator,
    *,
    hours: float | None = None,
    num_nodes: int | None = None,
    ahead_h: float = 0.0,
) -> Trace:
    """One trace of `hours` on `num_nodes` machines, beginning `ahead_h` after the fitted trace's end.

    A significant drift of repairs goes on that far; a negative `ahead_h` begins within the fitted trace's own time.
    """
    length, nodes = hours or fit.hours, num_nodes or fit.num_nodes
    if length <= 0 or nodes < 1:
        raise ConfigError(f"{length:g} h on {nodes} machines", remedy="give a positive length and machines")
    weeks = int(np.ceil(length / WEEK_H))
    rates = _weekly_rates(fit, weeks, rng) * nodes / fit.num_nodes
    per_week = rng.poisson(rates * WEEK_H)
    starts = np.repeat(np.arange(weeks) * WEEK_H, per_week) + rng.uniform(0, WEEK_H, int(per_week.sum()))
    starts = np.sort(starts[starts < length])
    sizes = np.minimum(rng.choice(np.array(fit.incident_sizes), len(starts)), nodes)
    weights = _node_weights(fit, nodes, int(length // BLOCK_H) + 1, rng)
    times = np.repeat(starts, sizes)
    cumulative = np.cumsum(weights, axis=1)
    picked = []
    for at, size in zip(starts, sizes, strict=True):
        block = int(at // BLOCK_H)
        if size == 1:
            picked.append(np.minimum(np.searchsorted(cumulative[block], rng.random(1)), nodes - 1))
        else:
            picked.append(rng.choice(nodes, size, replace=False, p=weights[block]))
    machines = np.concatenate(picked) if picked else np.zeros(0, dtype=np.intp)
    return _assemble(fit, times, machines, _repair_h(fit, times, ahead_h, rng), length, nodes, rng)


def _assemble(
    fit: FleetFit,
    times: FloatArray,
    machines: np.ndarray[tuple[int], np.dtype[np.intp]],
    repairs: FloatArray,
    length: float,
    nodes: int,
    rng: np.random.Generator,
) -> Trace:
    names = [name for name, _ in fit.classes]
    share = np.array([num for _, num in fit.classes], dtype=np.float64)
    kinds = rng.choice(len(names), len(times), p=share / share.sum())
    failures, busy = [], np.full(nodes, -np.inf)
    for at, machine, repair, kind in zip(times, machines, repairs, kinds, strict=True):
        if busy[machine] > at:  # a machine in repair cannot fail
            continue
        end = at + repair
        busy[machine] = end if fit.repair else at
        failures.append(
            Failure(
                down_h=float(at),
                up_h=float(end) if fit.repair and end <= length else None,
                node=f"n{machine:05d}",
                kind=names[kind],
                repair_known=fit.repair is not None,
            )
        )
    name = f"like {fit.name}"
    return Trace(
        name=name,
        hours=length,
        num_nodes=nodes,
        failures=tuple(failures),
        rows_read=len(failures),
        rows_used=len(failures),
    )


def generate_poisson(fit: FleetFit, rng: np.random.Generator, *, hours: float, num_nodes: int) -> Trace:
    """The usual assumption: equal, independent machines, constant rate, exponential repairs of the fitted mean."""
    num = rng.poisson(rng.gamma(fit.node_rate_h.alpha, 1 / fit.node_rate_h.beta) * num_nodes * hours)
    times = np.sort(rng.uniform(0, hours, num))
    mean = float(np.mean(np.exp(fit.repair.level + fit.repair.residuals))) if fit.repair else 0.0
    return _assemble(fit, times, rng.integers(0, num_nodes, num), rng.exponential(mean, num), hours, num_nodes, rng)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One statistic of a held-out trace against its predictive interval."""

    name: str
    observed: float
    low: float
    median: float
    high: float

    @property
    def inside(self) -> bool:
        return bool(self.low <= self.observed <= self.high)


def predictive_check(
    fit: FleetFit, held_out: Trace, *, seed: int = 0, rounds: int = 400, poisson: bool = False, level: float = 0.95
) -> list[Check]:
    """The held-out part's statistics against the generator's predictive intervals for a trace of that length."""
    rng = np.random.default_rng(seed)
    drawn: list[Statistics] = []
    for _ in range(rounds):
        if poisson:
            made = generate_poisson(fit, rng, hours=held_out.hours, num_nodes=held_out.num_nodes)
        else:
            made = generate(fit, rng, hours=held_out.hours, num_nodes=held_out.num_nodes)
        drawn.append(statistics(made))
    seen = statistics(held_out)
    checks = []
    for field in fields(Statistics):
        values = np.array([getattr(d, field.name) for d in drawn], dtype=np.float64)
        # a median never reached (most repairs open at the end) is longer than any seen
        values = np.minimum(values[~np.isnan(values)], 1e9)
        if len(values) < rounds / 2:
            continue
        low, middle, high = (float(x) for x in np.quantile(values, [(1 - level) / 2, 0.5, (1 + level) / 2]))
        checks.append(
            Check(name=field.name, observed=float(getattr(seen, field.name)), low=low, median=middle, high=high)
        )
    return checks


def to_csv(trace: Trace) -> str:
    """A trace as CSV (time_h, node, event, class), readable with columns time_h, node, event, class."""
    rows = [(f.down_h, f.node, "down", f.kind) for f in trace.failures]
    rows += [(f.up_h, f.node, "up", f.kind) for f in trace.failures if f.up_h is not None]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("time_h", "node", "event", "class"))
    writer.writerows(
        (f"{at:.6f}", node, event, kind) for at, node, event, kind in sorted(rows, key=lambda r: (r[0], r[2] == "down"))
    )
    return text.getvalue()
