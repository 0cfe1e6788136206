"""A month of runs, read off their journals: useful time and its budget, failures by cause with intervals, the price.

Invariant: a run is counted once, whole, in the month (UTC) in which it began; every number is of the journals.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.core import events as ev
from outlast.core.events import AnyEvent
from outlast.core.held_places import mean_places
from outlast.core.reliability import count_interval
from outlast.errors import ConfigError

from .answers import Answer, Table
from .number_words import duration, share, significant

__all__ = ["RunOfMonth", "month_answer", "run_of_month"]

_HOUR_S = 3600.0
_ACCOUNTS = ("productive", "checkpoint", "lost", "recovery", "degraded", "stalled", "idle", "unexplained")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOfMonth:
    """One run. `seconds`: its account by name, `wall` among them; `replicas`: with spares, the mean over its time, as
    both may change; `faults`: (cause, noticed after, downtime, steps lost) of each that it survived; `outcome`: "" if
    it still goes on or was killed as a whole."""

    name: str
    began_s: float
    seconds: dict[str, float]
    replicas: float
    steps: int
    outcome: str
    losses: int
    faults: list[tuple[str, float, float, int]] = field(default_factory=list)

    @property
    def month(self) -> str:
        """YYYY-MM, UTC."""
        return datetime.datetime.fromtimestamp(self.began_s, datetime.UTC).strftime("%Y-%m")

    @property
    def replica_hours(self) -> float:
        """Paid for: whatever its replicas did."""
        return self.replicas * self.seconds["wall"] / _HOUR_S


def run_of_month(name: str, events: Sequence[AnyEvent], seconds: dict[str, float]) -> RunOfMonth:
    """From a run's journal and its account."""
    started = next((event for event in events if isinstance(event, ev.RunStarted)), None)
    if started is None:
        raise ConfigError(f"the journal of {name} does not say when the run began", remedy="name another run")
    finished = next((event for event in reversed(events) if isinstance(event, ev.RunFinished)), None)
    progress = max((event.stable for event in events if isinstance(event, ev.ProgressMade)), default=0)
    return RunOfMonth(
        name=name,
        began_s=started.at_s,
        seconds=seconds,
        replicas=mean_places(events, seconds["wall"]),
        steps=finished.steps if finished is not None else progress,
        outcome=finished.outcome if finished is not None else "",
        losses=sum(isinstance(event, ev.FleetGone) for event in events),
        faults=[
            (e.cause, e.detect_s, e.downtime_s, e.lost_steps) for e in events if isinstance(e, ev.Recovery)
        ],
    )  # fmt: skip


def month_answer(
    runs: Sequence[RunOfMonth],
    month: str,
    *,
    objective: float,
    price: float,
    watts: float,
    carbon: float,
    accelerators: int,
) -> Answer:
    """`month`: YYYY-MM, or "" for the newest run's. `accelerators`: of one replica, for the price."""
    _check(month, objective, price, watts, carbon, accelerators)
    if not runs:
        raise ConfigError("no run was named", remedy="outlast plan month RUN_DIRECTORY…, or a directory of runs")
    wanted = month or max(runs, key=lambda run: run.began_s).month
    held = sorted((run for run in runs if run.month == wanted), key=lambda run: run.began_s)
    if not held:
        have = ", ".join(sorted({run.month for run in runs}))
        raise ConfigError(f"no run began in {wanted}", remedy=f"the runs named are of {have}")
    paid_h = sum(run.replica_hours for run in held)
    hours = {name: sum(r.replicas * r.seconds.get(name, 0.0) for r in held) / _HOUR_S for name in _ACCOUNTS}
    useful = hours["productive"] / paid_h if paid_h else 0.0
    budget_h, used_h = (1.0 - objective) * paid_h, paid_h - hours["productive"]
    lost = {
        "accelerator_hours": used_h * accelerators,
        "money": used_h * accelerators * price,
        "energy_kwh": used_h * accelerators * watts / 1000.0,
        "carbon_kg": used_h * accelerators * watts / 1000.0 * carbon,
    }
    causes, clocks = _causes(held, paid_h), _clocks(held)
    data: dict[str, Any] = {
        "month": wanted, "runs": [_run_data(run) for run in held], "replica_hours": paid_h, "hours": hours,
        "ettr": useful, "objective": objective, "budget_h": budget_h, "used_h": used_h,
        "left_share": 1.0 - used_h / budget_h if budget_h else None,
        "burn_rate": used_h / budget_h if budget_h else None,
        "causes": causes, "clocks": clocks, "lost": lost,
    }  # fmt: skip
    tables = (_useful(data), _accounts(hours, paid_h), _cause_table(causes), _clock_table(clocks), _runs_table(held))
    return Answer(title=_title(wanted, held, paid_h), tables=tables, data=data, notes=_notes(runs, held))


def _check(month: str, objective: float, price: float, watts: float, carbon: float, accelerators: int) -> None:
    if month:
        try:
            datetime.datetime.strptime(month, "%Y-%m")
        except ValueError:
            raise ConfigError(f"--month {month!r} is no month", remedy="YYYY-MM, for example 2026-11") from None
    if not 0.0 < objective < 1.0:
        raise ConfigError(f"--objective {objective:g} is no share of time", remedy="above 0 and below 1")
    if min(price, watts, carbon) < 0 or accelerators < 1 or not math.isfinite(price * watts * carbon):
        raise ConfigError("a negative price, power or carbon", remedy="0 or more; --accelerators 1 or more")


def _causes(held: Sequence[RunOfMonth], paid_h: float) -> list[dict[str, Any]]:
    by_cause: dict[str, list[tuple[str, float, float, int]]] = {}
    for run in held:
        for fault in run.faults:
            by_cause.setdefault(fault[0], []).append(fault)
    found: list[dict[str, Any]] = []
    for cause, faults in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        low, high = count_interval(len(faults))
        found.append(
            {
                "cause": cause, "count": len(faults), "mtbf_h": paid_h / len(faults),
                "mtbf_95_h": [paid_h / high, paid_h / low if low else None],
                "detect_s": sum(f[1] for f in faults) / len(faults), "downtime_s": sum(f[2] for f in faults),
                "lost_steps": sum(f[3] for f in faults),
            }
        )  # fmt: skip
    return found


def _clocks(held: Sequence[RunOfMonth]) -> list[dict[str, Any]]:
    """The three clocks, never mixed: of failures, of standstills, of work that was rolled back."""
    wall_h = sum(run.seconds["wall"] for run in held) / _HOUR_S
    faults = [fault for run in held for fault in run.faults]
    counts = {
        "MTBF": len(faults) + sum(run.losses for run in held),
        "MTBI": sum(fault[2] > 0 for fault in faults) + sum(run.losses for run in held),
        "MTBR": sum(run.losses for run in held),
    }
    rows: list[dict[str, Any]] = []
    for name, count in counts.items():
        low, high = count_interval(count)
        hours = wall_h / count if count else None
        rows.append(
            {
                "clock": name,
                "count": count,
                "hours": hours,
                "least_h": wall_h / high,
                "most_h": wall_h / low if low else None,
            }
        )
    return rows


def _run_data(run: RunOfMonth) -> dict[str, Any]:
    return {
        "run": run.name, "began_s": run.began_s, "replicas": run.replicas, "wall_s": run.seconds["wall"],
        "ettr": run.seconds.get("productive", 0.0) / run.seconds["wall"] if run.seconds["wall"] else 0.0,
        "steps": run.steps, "faults": len(run.faults), "outcome": run.outcome,
    }  # fmt: skip


# --- for a reader ----------------------------------------------------------------------------------------------------
def _title(month: str, held: Sequence[RunOfMonth], paid_h: float) -> str:
    runs = "a run" if len(held) == 1 else f"{len(held)} runs"
    return f"{month}: {runs}, {significant(paid_h)} replica-hours, {sum(run.steps for run in held):,} steps"


def _useful(data: dict[str, Any]) -> Table:
    left, burn = data["left_share"], data["burn_rate"]
    lost = data["lost"]
    return Table(
        title="Useful time, and what is left of its budget",
        columns=("quantity", "value"),
        rows=(
            ("useful time (ETTR)", share(data["ettr"])),
            ("objective", share(data["objective"])),
            ("budget, replica-hours", significant(data["budget_h"])),
            ("used", significant(data["used_h"])),
            ("left of the budget", share(left) if left is not None else "-"),
            ("burn rate", significant(burn) if burn is not None else "-"),
            ("accelerator-hours not used", significant(lost["accelerator_hours"])),
            ("their price", significant(lost["money"])),
            ("their energy, kWh", significant(lost["energy_kwh"])),
            ("their carbon, kg CO2", significant(lost["carbon_kg"])),
        ),
    )


def _accounts(hours: dict[str, float], paid_h: float) -> Table:
    rows = tuple((name, significant(value), share(value / paid_h if paid_h else 0.0)) for name, value in hours.items())
    return Table(title="Where the time went", columns=("account", "replica-hours", "share"), rows=rows)


def _cause_table(causes: Sequence[dict[str, Any]]) -> Table:
    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        low, high = row["mtbf_95_h"]
        return (
            str(row["cause"]), str(row["count"]), significant(row["mtbf_h"]),
            f"{significant(low)} to {significant(high) if high is not None else 'any'}",
            duration(row["detect_s"]), duration(row["downtime_s"]), str(row["lost_steps"]),
        )  # fmt: skip

    columns = ("cause", "faults", "replica-hours each", "95 %", "noticed after", "standstill, all", "steps lost")
    return Table(title="What failed", columns=columns, rows=tuple(cells(row) for row in causes))


def _clock_table(clocks: Sequence[dict[str, Any]]) -> Table:
    def told(value: Any) -> str:
        return "-" if value is None else duration(value * _HOUR_S)

    rows = tuple(
        (str(r["clock"]), str(r["count"]), told(r["hours"]), f"{told(r['least_h'])} to {told(r['most_h'])}")
        for r in clocks
    )
    return Table(title="Mean time of a run between", columns=("clock", "seen", "mean", "95 %"), rows=rows)


def _runs_table(held: Sequence[RunOfMonth]) -> Table:
    rows = tuple(
        (
            r.name, datetime.datetime.fromtimestamp(r.began_s, datetime.UTC).strftime("%d %H:%M"),
            f"{r.replicas:.3g}", duration(r.seconds["wall"]),
            share(r.seconds.get("productive", 0.0) / r.seconds["wall"] if r.seconds["wall"] else 0.0),
            str(len(r.faults)), r.outcome or "no end",
        )
        for r in held
    )  # fmt: skip
    columns = ("run", "began (UTC)", "replicas", "wall", "useful", "faults", "end")
    return Table(title="Each run", columns=columns, rows=rows)


def _notes(runs: Sequence[RunOfMonth], held: Sequence[RunOfMonth]) -> tuple[str, ...]:
    others = len(runs) - len(held)
    notes = [
        "MTBF: any failure; MTBI: training stood still; MTBR: all who held the state were lost, and work with them."
    ]
    if others:
        notes.append(f"{others} of the runs named began in other months.")
    return tuple(notes)
