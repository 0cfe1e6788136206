"""From a trace to a plan: a fitted fleet as job data, a trace replayed through the simulator, a run re-planned.

Invariant: fit and replay go through the same simulator, so that they differ only by where failures come from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outlast.core import reliability as rel

from ._model import Job
from ._outcome import Outcome
from ._simulate import simulate
from ._source import Replayed
from .answers import Answer, Table
from .number_words import duration, share, significant
from .traces import Check, FleetFit, Trace, predictive_check

__all__ = ["fit_answer", "job_data_from_fit", "replay"]


def job_data_from_fit(fit: FleetFit) -> dict[str, Any]:
    """Classes (rates, repairs, incidents, bursts) of a fitted fleet, to be merged into a job's data.

    Classes with under 2 % of failures are joined; an incident takes the fitted mean number of machines, rounded.
    """
    total, together = fit.num_failures, max(1, round(fit.mean_incident))
    big = [(name, num) for name, num in fit.classes if num >= 0.02 * total]
    rest = total - sum(num for _, num in big)
    classes = []
    for name, num in [*big, *([("other", rest)] if rest else [])]:
        item: dict[str, Any] = {
            "name": name,
            "node_mtbf_h": together * fit.machine_hours / num,
            "nodes": together,
            "source": f"{fit.name}: {num} of {total} failures, {fit.machine_hours:.0f} machine-hours",
        }
        if fit.repair is not None:
            spans = np.exp(fit.repair.level + fit.repair.residuals)
            blocks = float(np.exp(fit.repair.block_sd**2 / 2))  # the mean of what varies from block to block
            item |= {
                "repair": 1.0,
                "repair_median_h": float(np.median(spans)),
                "repair_mean_h": float(max(spans.mean() * blocks, np.median(spans))),
            }
        classes.append(item)
    return {"classes": classes, "burst_variance": fit.burst_variance, "burst_window_h": 168.0}


def replay(job: Job, trace: Trace) -> Outcome:
    """The job on the failures as they happened (one replication; repairs not seen to end last to the end)."""
    times = trace.times_h() * 3600
    ends = np.array([(f.up_h if f.up_h is not None else trace.hours) for f in trace.failures])
    known = np.array([f.repair_known for f in trace.failures])
    repairs = np.where(known, np.maximum(ends * 3600 - times, 1.0), 0.0)
    names = {item.name: k for k, item in enumerate(job.classes)}
    kinds = np.array([names.get(f.kind, len(names) - 1) for f in trace.failures], dtype=np.intp)
    return simulate(job, 1, source=lambda model, size, rng: Replayed(times, kinds, repairs, size))


def _variance_interval(rates: rel.HierarchicalRates) -> tuple[float, float]:
    return 1 / rates.shape_interval[1], 1 / rates.shape_interval[0]


def _between(rates: rel.HierarchicalRates) -> str:
    low, high = _variance_interval(rates)
    return f"{significant(low)} to {significant(high)}"


def _rates(fit: FleetFit) -> Table:
    rate = fit.node_rate_h
    rows = [
        ("machine MTBF", duration(3600 / rate.mean), f"{duration(3600 / rate.high)} to {duration(3600 / rate.low)}"),
        ("variance of the weekly rate", significant(fit.burst_variance), _between(fit.weekly)),
        ("variance between machines", significant(1 / fit.lemons.shape), _between(fit.lemons)),
        ("machines an incident takes", significant(fit.mean_incident), f"at most {max(fit.incident_sizes)}"),
        ("machines surely lemons (3x the mean)", str(int((fit.lemons.lemons > 0.5).sum())), "more likely than not"),
    ]  # fmt: skip
    if fit.repair is not None:
        drift = (
            f"{100 * np.expm1(fit.repair.slope):+.0f} % each four weeks"
            if fit.repair.slope
            else "none that is significant"
        )
        drift = f"{drift}, p = {significant(fit.repair.drift_p, 2)}"
        rows.append(("repair, drift", drift, f"between blocks: x/{np.exp(fit.repair.block_sd):.1f}"))
    return Table(title="Rates and what varies", columns=("quantity", "estimate", "95 %"), rows=tuple(rows))


def _families(fit: FleetFit) -> Table:
    rows = []
    for what, laws, tests in _laws(fit):
        for law in laws:
            rows.append(
                (f"{what}: {law.family}", f"{law.aic:.1f}", _tested(tests.get(law.family), fit), _parameters(law))
            )
    return Table(
        title=f"Families, best first (a small p: these data cannot be from it; {fit.rounds} rounds of bootstrap)",
        columns=("law", "AIC", "fit test", "parameters, 95 % (hours)"),
        rows=tuple(rows),
    )


def _read_off(fit: FleetFit) -> Table:
    """Mean, median and ninetieth percentile of the best laws, with their intervals."""
    rows = [
        (f"{what}: {name}, {laws[0].family}", duration(3600 * x), _bounded(low, high))
        for what, laws, _ in _laws(fit)
        if laws
        for name, (x, low, high) in laws[0].spans.items()
    ]
    title = "What the best laws say, were each gap and repair independent of the others"
    return Table(title=title, columns=("quantity", "estimate", "95 %"), rows=tuple(rows))


def _bounded(low_h: float, high_h: float) -> str:
    """What the data bound; of those that are all alike that is nothing."""
    return "not told" if math.isinf(high_h) else f"{duration(3600 * low_h)} to {duration(3600 * high_h)}"


_Tests = dict[str, tuple[float, float]]


def _laws(fit: FleetFit) -> tuple[tuple[str, tuple[rel.Fit, ...], _Tests], ...]:
    """(of what, laws best first, (distance, p) of those that were tested)."""
    gaps: _Tests = {"exponential": fit.exponential_gof} if fit.exponential_gof else {}
    if fit.gap_gof:
        gaps[fit.gap_fits[0].family] = fit.gap_gof
    repairs: _Tests = {fit.repair_fits[0].family: fit.repair_gof} if fit.repair_gof else {}
    return ("gaps", fit.gap_fits, gaps), ("repairs", fit.repair_fits, repairs)


def _tested(test: tuple[float, float] | None, fit: FleetFit) -> str:
    """The p-value; a bound where no round of the bootstrap was as far off."""
    if test is None:
        return ""
    least = 1 / (fit.rounds + 1)
    return f"p < {significant(least, 2)}" if test[1] < 1.5 * least else f"p = {test[1]:.{2 if test[1] > 0.095 else 3}f}"


def _parameters(law: rel.Fit) -> str:
    spans = law.parameters.items()
    return ", ".join(
        f"{name} {significant(best)} ({significant(low)} to {significant(high)})" for name, (best, low, high) in spans
    )


def _intervals(of: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
    return {name: {"estimate": x, "interval_95": [a, b]} for name, (x, a, b) in of.items()}


def _law_data(laws: tuple[rel.Fit, ...], tests: _Tests) -> dict[str, Any]:
    return {
        law.family: {
            "aic": law.aic,
            "parameters": _intervals(law.parameters),
            "spans_h": _intervals(law.spans),
            "fit_test": tests.get(law.family),
        }
        for law in laws
    }


def _interval(check: Check) -> str:
    low, high = (significant(x) if x < 1e9 else "beyond the end" for x in (check.low, check.high))
    return f"{low} to {high}" + ("" if check.inside else "  FAILS")


def _split(trace: Trace, seed: int, rounds: int) -> tuple[Table, list[dict[str, Any]]]:
    from .traces import fit_trace

    cut = 0.7 * trace.hours
    fit, held = fit_trace(trace.cut(0, cut), seed, rounds=0), trace.cut(cut, trace.hours)
    rows, data = [], []
    ours = predictive_check(fit, held, seed=seed, rounds=rounds)
    theirs = {c.name: c for c in predictive_check(fit, held, seed=seed, rounds=rounds, poisson=True)}
    for check in ours:
        other = theirs.get(check.name)
        against = "" if other is None else _interval(other)
        rows.append((check.name, significant(check.observed), _interval(check), against))
        against_data = {"poisson_interval": [other.low, other.high], "poisson_inside": other.inside} if other else {}
        interval = {"observed": check.observed, "interval": [check.low, check.high], "inside": check.inside}
        data.append({"statistic": check.name, **interval, **against_data})
    columns = ("statistic", "last 30 %", "fitted generator, 95 %", "independent Poisson, 95 %")
    return Table(title="Fitted to the first 70 %, asked about the rest", columns=columns, rows=tuple(rows)), data


_JOB_NOTE = (
    "A job made of this fit (--job) has bursts from week to week; within a week its failures are Poisson. "
    "The shape of the gaps above is both together."
)


def _log_table(trace: Trace, fit: FleetFit) -> Table:
    stats = fit.statistics
    return Table(
        title="The log",
        columns=("quantity", "value"),
        rows=(
            ("rows read", str(trace.rows_read)),
            ("used", str(trace.rows_used)),
            ("skipped by the mapping", str(trace.rows_skipped)),
            ("cannot be used", str(len(trace.problems))),
            ("failures", str(fit.num_failures)),
            ("machines", str(fit.num_nodes)),
            ("length", duration(fit.hours * 3600)),
            ("gaps' coefficient of variation", significant(stats.gap_cv)),
            ("weekly variance / mean", significant(stats.weekly_dispersion)),
            ("worst tenth's share", share(stats.worst_tenth_share, 0)),
            ("repair median", duration(stats.repair_median_h * 3600)),
            ("repair p90", duration(stats.repair_p90_h * 3600)),
        ),
    )


def _fit_data(trace: Trace, fit: FleetFit) -> dict[str, Any]:
    stats = fit.statistics
    return {
        "rows_read": trace.rows_read,
        "rows_used": trace.rows_used,
        "rows_skipped": trace.rows_skipped,
        "problems": [str(p) for p in trace.problems],
        "failures": fit.num_failures,
        "machines": fit.num_nodes,
        "hours": fit.hours,
        "node_mtbf_h": 1 / fit.node_rate_h.mean,
        "node_mtbf_95_h": [1 / fit.node_rate_h.high, 1 / fit.node_rate_h.low],
        "statistics": {name: getattr(stats, name) for name in stats.__slots__},
        "classes": dict(fit.classes),
        "burst_variance": fit.burst_variance,
        "between_machines_variance": 1 / fit.lemons.shape,
        "mean_incident": fit.mean_incident,
        "burst_variance_95": _variance_interval(fit.weekly),
        "between_machines_variance_95": _variance_interval(fit.lemons),
        **{f"{what}_laws": _law_data(laws, tests) for what, laws, tests in _laws(fit)},
        "bootstrap_rounds": fit.rounds,
        "job": job_data_from_fit(fit),
    }


def fit_answer(trace: Trace, fit: FleetFit, *, seed: int = 0, rounds: int = 200) -> Answer:
    """A fitted log in words: what was read, rates, families, and the check on its held-out end."""
    classes = Table(
        title="Classes", columns=("class", "failures"), rows=tuple((name, str(num)) for name, num in fit.classes[:12])
    )
    tables = [_log_table(trace, fit), classes, _rates(fit), _families(fit), _read_off(fit)]
    data = _fit_data(trace, fit)
    if trace.hours >= 12 * 168 and rounds:
        table, checks = _split(trace, seed, rounds)
        tables.append(table)
        data["held_out"] = checks
    problems = tuple(f"cannot be used: {p}" for p in trace.problems[:10])
    more = (f"... and {len(trace.problems) - 10} rows more",) if len(trace.problems) > 10 else ()
    return Answer(
        title=f"{trace.name}: {fit.num_failures} failures",
        tables=tuple(tables),
        data=data,
        notes=trace.notes + problems + more + (_JOB_NOTE,),
    )
