"""From a trace to a plan: a fitted fleet as job data, a trace replayed through the simulator, a run re-planned.

Invariant: fit and replay go through the same simulator, so that they differ only by where failures come from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._answer import Answer, Table, duration, share, significant
from ._model import Job
from ._outcome import Outcome
from ._simulate import simulate
from ._source import Replayed
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
            item |= {
                "repair": 1.0,
                "repair_median_h": float(np.median(spans)),
                "repair_mean_h": float(max(spans.mean(), np.median(spans))),
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


def _rates(fit: FleetFit) -> Table:
    rate = fit.node_rate_h
    rows = [
        ("machine MTBF", duration(3600 / rate.mean), f"{duration(3600 / rate.high)} to {duration(3600 / rate.low)}"),
        ("variance of the weekly rate", significant(fit.burst_variance),
         f"{significant(1 / fit.weekly.shape_interval[1])} to {significant(1 / fit.weekly.shape_interval[0])}"),
        ("variance between machines", significant(1 / fit.lemons.shape),
         f"{significant(1 / fit.lemons.shape_interval[1])} to {significant(1 / fit.lemons.shape_interval[0])}"),
        ("machines an incident takes", significant(fit.mean_incident), f"at most {max(fit.incident_sizes)}"),
        ("machines surely lemons (3x the mean)", str(int((fit.lemons.lemons > 0.5).sum())), "more likely than not"),
    ]  # fmt: skip
    if fit.repair is not None:
        drift = f"{100 * np.expm1(fit.repair.slope):+.0f} % each four weeks, p = {fit.repair.drift_p:.2f}"
        rows.append(("repair, drift", drift, f"between blocks: x/{np.exp(fit.repair.block_sd):.1f}"))
    return Table(title="Rates and what varies", columns=("quantity", "estimate", "95 %"), rows=tuple(rows))


def _families(fit: FleetFit) -> Table:
    rows = []
    for what, fits, test in (("gaps", fit.gap_fits, fit.gap_gof), ("repairs", fit.repair_fits, fit.repair_gof)):
        for rank, item in enumerate(fits):
            tested = f"p = {test[1]:.2f}" if rank == 0 and test else ""
            if what == "gaps" and item.family == "exponential" and rank and fit.exponential_gof:
                tested = f"p = {fit.exponential_gof[1]:.2f}"
            rows.append((f"{what}: {item.family}", f"{item.aic:.1f}", tested))
    return Table(
        title="Families, best first (a small p: these data cannot be from it)",
        columns=("law", "AIC", "fit test"),
        rows=tuple(rows),
    )


def _interval(check: Check) -> str:
    return f"{significant(check.low)} to {significant(check.high)}" + ("" if check.inside else "  FAILS")


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


def fit_answer(trace: Trace, fit: FleetFit, *, seed: int = 0, rounds: int = 200) -> Answer:
    """A fitted log in words: what was read, rates, families, and the check on its held-out end."""
    stats = fit.statistics
    read = Table(
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
    classes = Table(
        title="Classes", columns=("class", "failures"), rows=tuple((name, str(num)) for name, num in fit.classes[:12])
    )
    tables = [read, classes, _rates(fit), _families(fit)]
    data: dict[str, Any] = {
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
        "gap_families": {f.family: f.aic for f in fit.gap_fits},
        "repair_families": {f.family: f.aic for f in fit.repair_fits},
        "gap_fit_test": fit.gap_gof,
        "repair_fit_test": fit.repair_gof,
        "exponential_gap_test": fit.exponential_gof,
        "job": job_data_from_fit(fit),
    }
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
        notes=trace.notes + problems + more,
    )
