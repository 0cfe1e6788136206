"""A plan in words: the tables of the terminal, the data of `--json`, and a self-contained page.

Invariant: page, text and data show the same figures; the page refers to nothing outside itself and reads in greyscale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from . import _svg
from ._model import Job
from ._outcome import ACCOUNTS, Estimate, Outcome
from ._planner import Plan, tell_apart_days
from .answers import Answer, Table
from .number_words import duration, share, significant

__all__ = ["html_page", "plan_answer"]


_CLOCKS = "Three clocks (expected) and ETTR (simulated)"


def _span(value: Estimate) -> str:
    return f"{100 * value.mean:.2f} % ({100 * value.low:.2f}-{100 * value.high:.2f})"


def _clocks(plan: Plan) -> Table:
    given, planned = plan.analytic_given.clocks_h(), plan.analytic.clocks_h()
    names = (
        ("MTBF", "mtbf_h", "anything fails"),
        ("MTBI", "mtbi_h", "the job stops"),
        ("MTBR", "mtbr_h", "work is rolled back"),
    )
    rows = tuple(
        (f"{name}: {what}", duration(given[key] * 3600), duration(planned[key] * 3600)) for name, key, what in names
    )
    extra = (
        ("ETTR, expected (chain)", share(plan.analytic_given.chain), share(plan.analytic.chain)),
        ("ETTR (95 % of the mean)", _span(plan.outcome_given.ettr()), _span(plan.outcome.ettr())),
        ("ETTR, 95 % of single runs", _runs(plan.outcome_given), _runs(plan.outcome)),
        (
            "efficiency (ETTR x failure-free)",
            *(share(o.efficiency * o.ettr().mean) for o in (plan.outcome_given, plan.outcome)),
        ),
    )
    return Table(title=_CLOCKS, columns=("", "as given", "designed"), rows=rows + extra)


def _runs(outcome: Outcome) -> str:
    """Where 95 % of single runs fall, with as many digits as tell the two ends apart, and apart from 100 %."""
    value = outcome.ettr()
    if value.run_low == value.run_high:
        return f"{_percent(value.run_low, 1 - value.run_low)} in all but the rarest"
    least = min(value.run_high - value.run_low, 1 - value.run_high or 1.0)
    return f"{_percent(value.run_low, least)[:-2]}-{_percent(value.run_high, least)}"


def _percent(value: float, gap: float) -> str:
    """A percentage, of so many decimals that a difference of `gap` shows."""
    decimals = 1 if gap <= 0 else min(9, max(1, math.ceil(-math.log10(100 * gap))))
    return f"{100 * value:.{decimals}f} %"


def _breakdown(plan: Plan) -> Table:
    given, planned = plan.outcome_given.breakdown(), plan.outcome.breakdown()
    hours = plan.job.days * 24
    rows = tuple(
        (name, share(given[name]), share(planned[name]), duration(planned[name] * hours * 3600)) for name in ACCOUNTS
    )
    columns = ("account", "as given", "designed", "designed, a run")
    return Table(title="Where the time goes", columns=columns, rows=rows)


def _design(plan: Plan) -> Table:
    job, rows = plan.job, []
    for tier in job.tiers:
        length = job.interval_s * tier.every
        rows.append((f"interval of tier {tier.name!r}", duration(length), f"writes block {duration(tier.write_s)}"))
    rows += [
        (
            "spares",
            f"{plan.outcome.spares.mean():.1f} on average" if job.auto_spares else str(job.spares),
            f"{plan.spares_99} fill every place 99 % of the time; the run's policy would hold {plan.spares_policy:.0f}",
        ),
        (
            "audit rate",
            significant(plan.audit_rate) if plan.audit_rate else "0",
            "share of microbatches computed twice",
        ),
        ("redundancy", f"{100 * plan.redundancy_gain:+.2f} points", "ETTR if 95 % of every class were masked"),
    ]
    return Table(title="The design", columns=("choice", "value", "why"), rows=tuple(rows))


def _classes(outcome: Outcome, job: Job) -> Table:
    expected, found = _failures(job), outcome.failures_by_class()
    rows = tuple(
        (name, significant(mean), f"{found[name].run_low:.0f}-{found[name].run_high:.0f}")
        for name, mean in sorted(expected.items(), key=lambda item: -item[1])
    )
    return Table(
        title=f"Failures expected in {job.days:g} days", columns=("class", "mean", "95 % of simulated runs"), rows=rows
    )


def _failures(job: Job) -> dict[str, float]:
    """Failures of each class that a run of the job's length sees on average, with all its machines at work."""
    return {c.name: job.fleet_rate_h(c) * job.days * 24 for c in job.classes}


def _placements(plan: Plan) -> Table:
    rows = tuple(
        (
            p.name,
            f"{p.bytes_ratio:.2f}",
            *(_odds(x) for x in p.survive),
            "unknown" if p.losses_a_year is None else significant(p.losses_a_year, 2),
        )
        for p in plan.placements
    )
    columns = ("placement", "bytes / state", "1 lost", "2 lost", "3 lost", "state lost a year")
    title = f"Placement of the near tier on {plan.job.num_nodes:,} nodes: odds that the state survives random losses"
    return Table(title=title, columns=columns, rows=rows)


def _odds(value: float) -> str:
    """An exact probability, with as many digits as tell it from 1."""
    if value in (0.0, 1.0):
        return f"{value:.0f}"
    return f"{value:.{max(6, math.ceil(-math.log10(1 - value)) + 1)}f}"


def _levers(plan: Plan) -> Table:
    rows = tuple(
        (x.name, f"{x.factor:.2f}x", duration(x.mtbf_h * 3600), duration(x.mttr_h * 3600)) for x in plan.levers
    )
    return Table(title="One more nine of job availability", columns=("lever", "factor", "MTBI", "recovery"), rows=rows)


def _sensitivity(plan: Plan) -> Table:
    rows = tuple((s.name, share(s.low), share(s.high), f"{100 * s.swing:.2f}") for s in plan.sensitivity)
    columns = ("input", "20 % lower", "20 % higher", "points")
    return Table(title="What matters most (ETTR by the chain)", columns=columns, rows=rows)


def _mistakes(plan: Plan) -> Table:
    best = max((m.ettr for m in plan.mistakes), default=0.0)
    rows = tuple(
        (f"x {m.factor:g}", duration(m.interval_s), share(m.ettr), f"{100 * (best - m.ettr):.2f}")
        for m in plan.mistakes
    )
    columns = ("believed rate", "interval", "ETTR", "points lost")
    return Table(title="What a mistaken rate costs", columns=columns, rows=rows)


def _notes(plan: Plan, sources: Sequence[str]) -> tuple[str, ...]:
    days = tell_apart_days(plan.outcome, plan.outcome_given)
    apart = "never" if days == float("inf") else duration(days * 86400) + " of each"
    notes = [
        f"Simulated {plan.outcome.num_runs} runs of {plan.job.days:g} days, seed {plan.outcome.seed}; "
        f"chain {share(plan.analytic.chain)}, "
        f"closed form {share(plan.analytic.closed)}.",
        f"A real run tells the design from the job as given after {apart} (95 %, power 80 %).",
    ]
    if any(p.losses_a_year is None for p in plan.placements):
        notes.append("How often state is lost is not known: no class says what share of it needs a repair (`repair`).")
    if not plan.levers:
        notes.append(
            "One more nine of job availability has no price: nothing stops the job, or going on takes no time."
        )
    notes += [f"Outside the envelope of closed form and chain: {why}." for why in plan.analytic.outside]
    return tuple(notes + list(sources))


def _outcome_data(plan: Plan, value: Outcome, clocks_h: dict[str, float]) -> dict[str, Any]:
    e = value.ettr()
    return {
        "ettr": e.mean,
        "ettr_95": [e.low, e.high],
        "ettr_runs_95": [e.run_low, e.run_high],
        "efficiency": value.efficiency * e.mean,
        "breakdown": value.breakdown(),
        **clocks_h,
        "failures": _failures(plan.job),
    }


def _data(plan: Plan) -> dict[str, Any]:
    job = plan.job
    return {
        "job": {
            "name": job.name,
            "parameters": job.parameters,
            "accelerators": job.accelerators,
            "nodes": job.num_nodes,
            "days": job.days,
            "topology": job.topology,
        },
        "mtbf_h": plan.analytic.mtbf_h,
        "ettr": plan.analytic.chain,
        "given": _outcome_data(plan, plan.outcome_given, plan.analytic_given.clocks_h()),
        "designed": _outcome_data(plan, plan.outcome, plan.analytic.clocks_h()),
        "design": {
            "tiers": [
                {"name": t.name, "interval_s": job.interval_s * t.every, "write_s": t.write_s} for t in job.tiers
            ],
            "spares": job.spares,
            "spares_held": float(plan.outcome.spares.mean()),
            "spares_99": plan.spares_99,
            "spares_policy": plan.spares_policy,
            "audit_rate": plan.audit_rate,
            "redundancy_gain": plan.redundancy_gain,
        },
        "analytic": {
            "closed": plan.analytic.closed,
            "chain": plan.analytic.chain,
            "outside": list(plan.analytic.outside),
        },
        "placements": [
            {"name": p.name, "bytes_ratio": p.bytes_ratio, "survive": list(p.survive), "losses_a_year": p.losses_a_year}
            for p in plan.placements
        ],
        "sensitivity": [{"input": s.name, "low": s.low, "high": s.high} for s in plan.sensitivity],
        "mistakes": [{"factor": m.factor, "interval_s": m.interval_s, "ettr": m.ettr} for m in plan.mistakes],
        "nines": [
            {"lever": x.name, "factor": x.factor, "mtbi_h": x.mtbf_h, "recovery_h": x.mttr_h} for x in plan.levers
        ],
        "tell_apart_days": tell_apart_days(plan.outcome, plan.outcome_given),
        "replications": plan.outcome.num_runs,
        "seed": plan.outcome.seed,
    }


def plan_answer(plan: Plan, sources: Sequence[str] = ()) -> Answer:
    """The whole plan as tables and data."""
    tables = [
        _clocks(plan),
        _breakdown(plan),
        _design(plan),
        _classes(plan.outcome, plan.job),
        _sensitivity(plan),
        _mistakes(plan),
        *([_levers(plan)] if plan.levers else []),
    ]
    if plan.placements:
        tables.insert(4, _placements(plan))
    job = plan.job
    fleet = f"{job.accelerators:,} accelerators ({job.num_nodes:,} nodes)"
    title = f"{job.name}: {job.parameters:.3g} parameters on {fleet}, {job.days:g} days"
    return Answer(title=title, tables=tuple(tables), data=_data(plan), notes=_notes(plan, sources))


_STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#000;background:#fff}"
    "table{border-collapse:collapse;margin:1em 0;width:100%}"
    "th,td{border-bottom:1px solid #999;padding:.25em .6em;text-align:right}"
    "th:first-child,td:first-child{text-align:left}th{border-bottom:2px solid #000}"
    "svg{width:100%;height:auto;margin:.5em 0}"
    "caption{text-align:left;font-weight:bold;padding:.4em 0}.big{font-size:1.6em}@media print{svg{break-inside:avoid}}"
)


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<table><caption>{escape(table.title)}</caption>{row(table.columns, 'th')}{body}</table>"


def _plots(plan: Plan) -> dict[str, str]:
    """Plot per table title, shown above it."""
    given, planned = plan.outcome_given.breakdown(), plan.outcome.breakdown()
    failures = sorted(_failures(plan.job).items(), key=lambda item: -item[1])[:18]
    minutes = [(t / 60, e) for t, e in plan.curve]
    ettr = (plan.outcome.accounts_s[0] / plan.outcome.wall_s).tolist()
    chain = plan.analytic.chain
    return {
        _CLOCKS: _svg.histogram(ettr, x_label="ETTR of single runs"),
        "Where the time goes": _svg.stacked(
            [("as given", list(given.items())), ("designed", list(planned.items()))],
            label="share of wall time by account",
        ),
        "The design": _svg.line(
            minutes,
            x_label="base interval, minutes (log)",
            y_label="ETTR (chain)",
            mark=(plan.job.interval_s / 60, "the design"),
        ),
        f"Failures expected in {plan.job.days:g} days": _svg.bars(
            [(name, mean, significant(mean)) for name, mean in failures], label="failures by class"
        ),
        "What matters most (ETTR by the chain)": _svg.spans(
            [(s.name, s.low, s.high) for s in plan.sensitivity],
            centre=chain,
            label="ETTR, inputs 20 % lower (hatched) and higher (solid)",
        ),
    }


def html_page(plan: Plan, sources: Sequence[str] = ()) -> str:
    """The report as one file: no script, no external reference."""
    answer, plots = plan_answer(plan, sources), _plots(plan)
    parts = []
    for table in answer.tables:
        parts.append(plots.get(table.title, "") + _table(table))
    assumed = [
        ("Failure classes and their sources", ("class", "node MTBF", "source"),
         [(c.name, duration(c.node_mtbf_h * 3600), c.source or "given by the user") for c in plan.job.classes]),
    ]  # fmt: skip
    parts += [_table(Table(title=t, columns=c, rows=tuple(r))) for t, c, r in assumed]
    notes = "".join(f"<li>{escape(note)}</li>" for note in answer.notes)
    best = plan.outcome.ettr()
    head = (
        f"<h1>{escape(answer.title)}</h1><p class=big>ETTR {100 * best.mean:.2f} % "
        f"(95 %: {100 * best.low:.2f} to {100 * best.high:.2f}); single runs {_runs(plan.outcome)}</p>"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>outlast plan: {escape(plan.job.name)}</title>"
        f"<style>{_STYLE}</style></head><body>{head}{''.join(parts)}"
        f"<h2>Assumptions and sources</h2><ul>{notes}</ul></body></html>\n"
    )
