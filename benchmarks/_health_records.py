"""Prediction on public records of failures: which unit fails within a week, from its past alone, beside rivals.

Records are CSV files in two forms. Events: columns node, event ("down" or "remove" is a failure), time_h or time_ms,
perhaps trace. Spans, as of Titan's GPUs (`data/gc_full.csv` of olcf/TitanGPULife): SN, insert, remove, event; a span
ends with a failure where an event is named. Learned on the first 60 % of the time and one half of the units, judged on
the rest of the time and the other half.
"""

from __future__ import annotations

import bisect
import csv
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._common import Table
from outlast.core.policy import DeviceHazard, DeviceHistory, learn_ages, learn_recency, wilson
from outlast.core.reliability import hierarchical_rates

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["prediction"]

H = 3600.0
MOMENTS = 60  # at most, at which all units are judged


@dataclass
class Unit:
    """Hours from when to when it worked, and when it failed."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)

    def age(self, hour: float) -> float:
        return sum(max(0.0, min(end, hour) - start) for start, end in self.spans)

    def works(self, hour: float) -> bool:
        return any(start <= hour < end for start, end in self.spans)

    def until(self, hour: float) -> DeviceHistory:
        past = [H * self.age(t) for t in self.failed if t < hour]
        return DeviceHistory(observed_s=H * self.age(hour), failed_s=past)


@dataclass
class Record:
    units: dict[str, Unit]
    span_h: float

    @property
    def ahead_h(self) -> float:
        return min(168.0, self.span_h / 20)


def prediction(
    path: Path, units: dict[str, int], seed: int, data: list[Any]
) -> tuple[list[Table], list[tuple[str, float, float]]]:  # fmt: skip
    """Which unit fails within a week (a twentieth of a short record), from its past alone.

    Also (record, share foretold, precision) of each score at its budget of alerts."""
    tables, measured = [], []
    for name, record in _records(path).items():
        for extra in range(len(record.units), units.get(name, 0)):
            record.units[f"never failed {extra}"] = Unit(spans=[(0.0, record.span_h)])
        rows, notes, best = _judged(record, seed)
        measured += [(f"{name}: {which}", told, true) for which, told, true in best]
        tables.append(Table(
            title=f"Prediction: {name}, {len(record.units)} units, {record.span_h / 24:.1f} days, failures within "
            f"{record.ahead_h:.3g} h",
            rows=rows, notes=notes,
            columns=["score", "precision at 5 % alerts", "95 %", "recall", "lift over base rate", "lead time, median"],
        ))  # fmt: skip
        data.append({"trace": name, "rows": rows, "notes": notes})
    return tables, measured


def _records(path: Path) -> dict[str, Record]:
    """Each record of a folder that has a hundred failures."""
    found: dict[str, Record] = {}
    for file in sorted(path.glob("*.csv")):
        with file.open() as lines:
            rows = list(csv.DictReader(lines))
        if rows and {"SN", "insert", "remove", "event"} <= rows[0].keys():
            found[file.stem] = _of_spans(rows)
        elif rows and "node" in rows[0]:
            groups: dict[str, list[dict[str, str]]] = defaultdict(list)
            for row in rows:
                groups[row.get("trace", "")].append(row)
            found |= {f"{file.stem} {trace}".strip(): _of_events(mine) for trace, mine in groups.items()}
    return {name: r for name, r in found.items() if sum(len(u.failed) for u in r.units.values()) >= 100}


def _of_events(rows: list[dict[str, str]]) -> Record:
    hours = [float(row["time_h"]) if "time_h" in row else float(row["time_ms"]) / 3.6e6 for row in rows]
    units = {node: Unit(spans=[(0.0, max(hours))]) for node in sorted({row["node"] for row in rows})}
    for hour, row in sorted(zip(hours, rows, strict=True), key=lambda pair: pair[0]):
        if row["event"] in ("down", "remove"):
            units[row["node"]].failed.append(hour)
    return Record(units, max(hours))


def _of_spans(rows: list[dict[str, str]]) -> Record:
    """Spans of a unit that overlap are one; rows without both ends are left out, as the record's own authors do."""
    known = [(row, _hour(row["insert"]), _hour(row["remove"])) for row in rows if row["insert"] and row["remove"]]
    first = min(start for _, start, _ in known)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    failed: dict[str, list[float]] = defaultdict(list)
    for row, start, end in known:
        spans[row["SN"]].append((start - first, end - first))
        if row["event"]:
            failed[row["SN"]].append(end - first)
    units = {}
    for name in sorted(spans):
        whole: list[tuple[float, float]] = []
        for start, end in sorted(spans[name]):
            if whole and start <= whole[-1][1]:
                whole[-1] = whole[-1][0], max(end, whole[-1][1])
            else:
                whole.append((start, end))
        units[name] = Unit(whole, sorted(failed[name]))
    return Record(units, max(end for _, _, end in known) - first)


def _hour(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() / H


def _learned(record: Record, half: set[str], until: float) -> dict[str, DeviceHazard]:
    """By name: what one half of the units teaches up to a moment."""
    courses = [c for c in (record.units[name].until(until) for name in sorted(half)) if c.observed_s > 0]
    worked = [round(c.observed_s / H, -1) or 1.0 for c in courses]  # rounded: equal ones are computed once
    rates = hierarchical_rates([len(c.failed_s) for c in courses], worked)
    prior = DeviceHazard(mean_rate=float(rates.mean) / H, shape=float(rates.shape))
    return {
        "frailty posterior": prior,
        "frailty and recency": learn_recency(courses, prior),
        "frailty, recency and age (DeviceHazard)": learn_recency(courses, learn_ages(courses, prior)),
    }


def _judged(record: Record, seed: int) -> tuple[list[list[str]], list[str], list[tuple[str, float, float]]]:
    cut, draw = 0.6 * record.span_h, random.Random(seed)
    half = set(draw.sample(sorted(record.units), len(record.units) // 2))
    models = _learned(record, half, cut)
    scores: dict[str, list[float]] = defaultdict(list)
    leads = []
    moments = np.arange(cut, record.span_h - record.ahead_h, record.ahead_h)
    for now in moments[:: max(1, len(moments) // MOMENTS)]:
        for name, unit in record.units.items():
            if name in half or not unit.works(now):
                continue
            course = unit.until(now)
            for which, model in models.items():
                scores[which].append(
                    model.chance(course.failed_s, course.observed_s, course.observed_s, H * record.ahead_h)
                )
            scores["time since the last failure"].append(
                course.failed_s[-1] - course.observed_s if course.failed_s else -math.inf
            )
            scores["age alone"].append(course.observed_s)
            scores["chance (alarm at random)"].append(draw.random())
            coming = bisect.bisect_left(unit.failed, now)
            after = unit.failed[coming] - now if coming < len(unit.failed) else math.inf
            leads.append(after if after < record.ahead_h else math.inf)
    return _compared(models, scores, np.array(leads))


def _compared(
    models: dict[str, DeviceHazard], scores: dict[str, list[float]], leads: np.ndarray
) -> tuple[list[list[str]], list[str], list[tuple[str, float, float]]]:
    truth = np.isfinite(leads)
    base, rows, measured = float(truth.mean()), [], []
    for name, score in (*scores.items(), ("alarm always", [0.0] * len(truth))):
        budget = len(truth) if name == "alarm always" else max(1, len(truth) // 20)
        order = np.argsort(-np.array(score), kind="stable")[:budget]
        hits = int(truth[order].sum())
        precision, low, high = wilson(hits, len(order))
        lead = f"{np.median(leads[order][truth[order]]):.3g} h" if hits else "-"
        rows.append([name, f"{precision:.4f}", f"{low:.4f} to {high:.4f}", f"{hits / max(truth.sum(), 1):.3f}",
                     f"{precision / max(base, 1e-9):.2f}", lead])  # fmt: skip
        measured.append((name, hits / max(int(truth.sum()), 1), precision))
    notes = [f"Base rate {base:.4f}: {int(truth.sum())} failures in {len(truth)} judgements."]
    for name, model in models.items():
        chance = np.array(scores[name])
        told = []
        for part in np.array_split(np.argsort(chance, kind="stable"), 4):
            share, low, high = wilson(int(truth[part].sum()), len(part))
            told.append(f"{chance[part].mean():.4f} said, {share:.4f} seen ({low:.4f} to {high:.4f})")
        ages = f"; {len(model.ages)} bands of age" if model.ages else ""
        days = f"{model.decay_s / 86400:g} days"
        notes.append(f"Calibration by quarters, {name} (excite {model.excite:g}, {days}{ages}): "
                     f"{', '.join(told)}; logarithm of likelihood {_explained(chance, truth):.0f}.")  # fmt: skip
    return rows, notes, measured


def _explained(chance: np.ndarray, truth: np.ndarray) -> float:
    sure = np.clip(np.where(truth, chance, 1 - chance), 1e-12, 1.0)
    return float(np.log(sure).sum())
