"""The small questions: a fleet's arithmetic, an interval, the nines. Closed forms only.

Invariant: every number comes from `core.reliability`; here are only the words around it.
"""

from __future__ import annotations

from outlast.core import reliability as rel
from outlast.core.reliability.check import count, nonnegative, positive

from .answers import Answer, Table
from .figures import Figure
from .number_words import duration, share, significant

__all__ = ["fleet_answer", "interval_answer", "nines_answer"]


def fleet_answer(nodes: int, node_mtbf_hours: float, mttr_hours: float, hours: float) -> Answer:
    """What `nodes` machines of this MTBF do together: first failure, availability, failures expected in `hours`."""
    count("--nodes", nodes, 1), positive("--node-mtbf-hours", node_mtbf_hours)
    nonnegative("--mttr-hours", mttr_hours), nonnegative("--hours", hours)
    fleet_h = node_mtbf_hours / nodes
    one = float(rel.availability(node_mtbf_hours, mttr_hours))
    survive = float(rel.series_power(float(rel.Exponential(rate=1 / node_mtbf_hours).sf(hours)), nodes))
    expected = nodes * hours / (node_mtbf_hours + mttr_hours)
    low, high = rel.count_interval(expected)
    spares = rel.spares_needed(nodes, 1 / node_mtbf_hours, mttr_hours, 0.99) if mttr_hours > 0 else 0
    data = {
        "nodes": nodes, "node_mtbf_h": node_mtbf_hours, "mttr_h": mttr_hours, "hours": hours, "mtbf_h": fleet_h,
        "first_failure_min": fleet_h * 60, "node_availability": one, "all_up": float(rel.series_power(one, nodes)),
        "no_failure": survive, "expected_failures": expected, "failures_95": [low, high], "spares_99": spares,
    }  # fmt: skip
    rows = (
        ("mean time to the first failure", duration(fleet_h * 3600)),
        (f"failures expected in {duration(hours * 3600)}", significant(expected)),
        (f"P(no failure in {duration(hours * 3600)})", significant(survive)),
        ("availability of one node", f"{one:.6f}"),
        ("availability of all at once", f"{data['all_up']:.6f}"),
        ("spares that fill every place 99 % of the time", str(spares)),
    )
    notes = (
        "Independent nodes with constant rates. Real fleets fail in bursts: `outlast plan fit LOG` measures yours.",
    )
    title = f"{nodes:,} nodes, each failing every {duration(node_mtbf_hours * 3600)}"
    return Answer(
        title=title, tables=(Table(title="", columns=("quantity", "value"), rows=rows),), data=data, notes=notes
    )


def interval_answer(mtbf_hours: float, write_seconds: float, recovery_seconds: float) -> Answer:
    """Young, Daly and the exact optimum for a fleet MTBF (hours) and a write (seconds), with the waste of each."""
    m, c = float(positive("--mtbf-hours", mtbf_hours)) * 3600, float(positive("--write-seconds", write_seconds))
    nonnegative("--recovery-seconds", recovery_seconds)
    choices = {
        "Young": float(rel.young_interval(c, m)),
        "Daly": float(rel.daly_interval(c, m)),
        "exact": float(rel.exact_interval(c, m)),
    }
    best = choices["exact"]
    ladder = {"exact / 4": best / 4, "exact / 2": best / 2, "exact x 2": best * 2, "exact x 4": best * 4}
    rows, listed = [], []
    for name, t in (choices | ladder).items():
        ratio, first = (
            float(rel.ettr(t, c, m, recovery_seconds)),
            float(rel.first_order_waste(t, c, m, recovery_seconds)),
        )
        rows.append((name, f"{t / 60:.2f} min", share(1 - ratio), share(first), share(ratio)))
        listed.append({"name": name, "interval_s": t, "waste": 1 - ratio, "waste_first_order": first, "ettr": ratio})
    columns = ("interval", "length", "waste", "first-order waste", "ETTR")
    data = {"mtbf_h": mtbf_hours, "write_s": c, "recovery_s": recovery_seconds, "interval_s": best, "choices": listed}
    notes = [
        "Interruptions are exponential and also strike writes and recoveries; work since the last write is lost.",
        "First-order waste is c/T + T/2M + r/M; it holds while c, T and r are far below M.",
    ]
    if c > m / 2:
        notes.append(
            "The write takes more than half the time between interruptions: no interval helps; make writes cheaper."
        )
    table = Table(title="", columns=columns, rows=tuple(rows))
    title = f"Checkpoint interval: fleet MTBF {duration(m)}, write {duration(c)}, recovery {duration(recovery_seconds)}"
    spans = [best * 2 ** (k / 8) for k in range(-24, 25)]
    waste = [(t / 60, 1 - float(rel.ettr(t, c, m, recovery_seconds))) for t in spans]
    first_order = [(t / 60, float(rel.first_order_waste(t, c, m, recovery_seconds))) for t in spans]
    figure = Figure(
        title="Waste over the interval",
        x_label="minutes",
        y_label="share of time",
        log_x=True,
        series=(("first order", first_order), ("exact", waste)),
    )
    return Answer(title=title, tables=(table,), data=data, notes=tuple(notes), figures=(figure,))


def _budgets(incidents: float, minutes: float) -> tuple[Table, list[dict[str, float]]]:
    data = [
        {
            "objective": level,
            "year_h": float(rel.downtime_h(level)),
            "month_min": rel.error_budget_min(level),
            "left_min": rel.budget_left_min(level, incidents, minutes),
        }
        for level in (0.99, 0.999, 0.9999, 0.99999)
    ]
    rows = tuple(
        (f"{d['objective']:.5g}", f"{d['year_h']:.2f} h", f"{d['month_min']:.2f} min", f"{d['left_min']:.2f} min")
        for d in data
    )
    columns = ("objective", "a year", "a month (30 d)", f"left after {incidents:g} x {minutes:g} min")
    return Table(title="Budgets", columns=columns, rows=rows), data


def _alerts() -> tuple[Table, list[dict[str, object]]]:
    alerts = rel.burn_alerts()
    rows = tuple(
        (duration(a.long_h * 3600), duration(a.short_h * 3600), f"{a.factor:.1f}", "page" if a.page else "ticket")
        for a in alerts
    )
    title = "Burn-rate alerts (both windows must burn at the factor)"
    data: list[dict[str, object]] = [
        {"long_h": a.long_h, "short_h": a.short_h, "factor": a.factor, "page": a.page} for a in alerts
    ]
    return Table(title=title, columns=("long window", "short window", "factor", "kind"), rows=rows), data


def _levers(levers: tuple[rel.Lever, ...], goal: float) -> tuple[Table, list[dict[str, object]]]:
    rows = tuple(
        (x.name, f"{x.factor:.2f}x", duration(x.mtbf_h * 3600), duration(x.mttr_h * 3600), significant(x.cost))
        for x in levers
    )
    data: list[dict[str, object]] = [
        {"name": x.name, "factor": x.factor, "mtbf_h": x.mtbf_h, "mttr_h": x.mttr_h, "cost": x.cost} for x in levers
    ]
    return Table(title=f"To reach {goal:.7g}", columns=("lever", "factor", "MTBF", "MTTR", "cost"), rows=rows), data


def nines_answer(
    mtbf_hours: float,
    mttr_hours: float,
    target: float | None,
    *,
    cost_incidents: float,
    cost_repair: float,
    incidents: float,
    minutes: float,
) -> Answer:
    """Availability in nines, downtime, budgets, burn-rate alerts, and the cheaper way to the target."""
    positive("--mtbf-hours", mtbf_hours), nonnegative("--mttr-hours", mttr_hours)
    positive("--cost-incidents", cost_incidents), positive("--cost-repair", cost_repair)
    nonnegative("--incidents", incidents), nonnegative("--minutes", minutes)
    now = float(rel.availability(mtbf_hours, mttr_hours))
    goal = target if target is not None else 1 - (1 - now) / 10
    costs = {"cost_per_halving_incidents": cost_incidents, "cost_per_halving_repair": cost_repair}
    levers, lever_data = _levers(rel.price_the_nine(mtbf_hours, mttr_hours, goal, **costs), goal)
    budgets, budget_data = _budgets(incidents, minutes)
    alerts, alert_data = _alerts()
    data = {
        "availability": now, "nines": float(rel.nines(now)), "downtime_h_a_year": float(rel.downtime_h(now)),
        "incidents_a_month": rel.HOURS_A_MONTH / (mtbf_hours + mttr_hours), "target": goal,
        "levers": lever_data, "budgets": budget_data, "alerts": alert_data,
    }  # fmt: skip
    note = "Availability depends on MTTR / MTBF only: a halving of either is worth the same; compare what each costs."
    clocks = f"MTBF {duration(mtbf_hours * 3600)}, MTTR {duration(mttr_hours * 3600)}"
    title = f"{clocks}: {now:.6f} available, {data['nines']:.2f} nines"
    figures = (_downtime(mtbf_hours),)
    return Answer(title=title, tables=(levers, budgets, alerts), data=data, notes=(note,), figures=figures)


def _downtime(mtbf_hours: float) -> Figure:
    """Hours a year that a service is down, over the time to repair; and if it failed twice as often."""
    shares = [10 ** (k / 8) for k in range(-32, 1)]
    series = tuple(
        (name, [(mtbf_hours * x, float(rel.downtime_h(rel.availability(each, mtbf_hours * x)))) for x in shares])
        for name, each in (("as often", mtbf_hours), ("twice as often", mtbf_hours / 2))
    )
    return Figure(
        title="Downtime", x_label="hours to repair", y_label="hours a year", series=series, log_x=True, log_y=True
    )
