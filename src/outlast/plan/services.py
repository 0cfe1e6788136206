"""Promises and prices: bundled objectives beside an agreement, quorums, burn-in, and what lost work costs.

Invariant: closed forms of `core.reliability`, or counts of the samples that were given; prices are the user's own.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outlast.core import reliability as rel
from outlast.core.reliability.check import count, nonnegative, positive, probability
from outlast.errors import ConfigError

from ._analytic import analyse
from ._compiled import replace_job
from ._model import FailureClass, Job
from ._planner import design_of
from .answers import Answer, Table
from .designs import job_from_options
from .figures import Figure
from .number_words import duration, share, significant

__all__ = ["burn_in_answer", "objectives_answer", "price_answer", "quorum_answer"]

_PROMISE = re.compile(r"^(?P<name>\w+)(?P<sign><=|>=)(?P<bound>[0-9.eE+-]+)@(?P<target>[0-9.]+)$")


def _promise(text: str) -> rel.Objective:
    found = _PROMISE.match(text.replace(" ", ""))
    if found is None:
        raise ConfigError(
            f"--objective {text!r} is no objective", remedy='write "latency<=0.3@0.99" or "quality>=0.8@0.95"'
        )
    target = float(probability(f"target of --objective {text}", float(found["target"])))
    if target == 1.0:
        raise ConfigError(f"--objective {text!r} allows no error", remedy="give a target below 1: no budget can be 0")
    return rel.Objective(
        name=found["name"], threshold=float(found["bound"]), target=target, at_most=found["sign"] == "<="
    )


def _columns(path: str, names: Sequence[str]) -> dict[str, list[float]]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        found = {name: [float(row[name]) for row in rows] for name in names}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="give a CSV file with a header") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} has no numbers for {error}",
            remedy=f"its header must name {', '.join(names)}, its cells be numbers",
        ) from None
    if not rows:
        raise ConfigError(f"{path} has no samples", remedy="one line a request")
    return found


def _objective_row(item: rel.Objective, good: float, kept: bool) -> dict[str, Any]:
    burn = float(rel.burn_rate(1 - good, item.target))
    return {
        "objective": f"{item.name} {'<=' if item.at_most else '>='} {item.threshold:g}",
        "target": item.target,
        "good": good,
        "met": kept,
        "burn_rate": burn,
        "budget_left": 1 - burn,
    }


def _objective_cells(row: dict[str, Any]) -> tuple[str, ...]:
    kept, burn = "yes" if row["met"] else "NO", f"{row['burn_rate']:.2f}x"
    return row["objective"], share(row["target"]), share(row["good"], 3), kept, burn, share(row["budget_left"])


def objectives_answer(path: str, promises: Sequence[str], sla: float, credit: float) -> Answer:
    """A bundle of objectives over samples: each one's share, budget and burn; the bundle; the agreement beside it."""
    bundle = tuple(_promise(text) for text in promises)
    if not bundle:
        raise ConfigError("no objective", remedy='give --objective "latency<=0.3@0.99", as often as you promise')
    probability("--sla", sla), probability("--credit", credit)
    samples = _columns(path, [item.name for item in bundle])
    met = rel.bundle_met(bundle, samples)
    rows = [_objective_row(item, *met[item.name]) for item in bundle]
    every, all_met = met["all"]
    num = len(next(iter(samples.values())))
    alerts = [a for a in rel.burn_alerts() if any(r["burn_rate"] >= a.factor for r in rows)]
    columns = ("objective (SLO)", "target", "good", "met", "budget burns", "budget left")
    broken = every < sla
    agreement = Table(
        title="Agreement (SLA): all objectives at once",
        columns=("promised", "kept", "broken", "credit owed"),
        rows=((share(sla), share(every, 3), "YES" if broken else "no", share(credit if broken else 0.0)),),
    )
    notes = (
        "A bundle is kept for a request only if all its objectives are: its share is below each one's.",
        "An SLO is what you steer by, an SLA what you owe: promise less than you steer by.",
        *(f"Burning at {a.factor:.1f}x over {a.long_h:g} h raises a {'page' if a.page else 'ticket'}." for a in alerts),
    )
    data = {"samples": num, "objectives": rows, "all_good": every, "all_met": all_met, "sla": sla, "sla_broken": broken,
            "credit": credit if broken else 0.0}  # fmt: skip
    title = f"{path}: {num:,} samples, {len(bundle)} objectives"
    table = Table(title="", columns=columns, rows=tuple(_objective_cells(row) for row in rows))
    figures = (_budgets_left(bundle, samples, num),)
    return Answer(title=title, tables=(table, agreement), data=data, notes=notes, figures=figures)


def _budgets_left(bundle: Sequence[rel.Objective], samples: dict[str, list[float]], num: int) -> Figure:
    """What is left of each error budget as the requests come, in the order of the file; below 0 it is overspent."""
    series = []
    shown = np.unique(np.linspace(0, num, 121).astype(int))
    for item in bundle:
        values = np.array(samples[item.name])
        bad = values > item.threshold if item.at_most else values < item.threshold
        left = 1 - np.concatenate([[0], np.cumsum(bad)]) / ((1 - item.target) * num)
        series.append((item.name, list(zip(shown.tolist(), left[shown].tolist(), strict=True))))
    return Figure(
        title="Error budgets",
        x_label="requests so far",
        y_label="share of the file's budget left",
        series=tuple(series),
    )


def quorum_answer(replicas: int, read: int, write: int, available: float, tries: int, partition: float) -> Answer:
    """What quorums and retries give an always-on service, and what it must choose when its network is cut."""
    n = count("--replicas", replicas, 1)
    r, w = count("--read", read, 1, n), count("--write", write, 1, n)
    p, cut = float(probability("--availability", available)), float(probability("--partition", partition))
    t = count("--tries", tries, 1)

    def reached(k: int) -> float:
        return float(rel.k_of_n_equal(k, n, p))

    strict = r + w > n
    rows = [(f"{name} of {n}", k, reached(k), 1 - (1 - reached(k)) ** t) for name, k in (("read", r), ("write", w))]
    tried = sum((1 - reached(r)) ** i for i in range(t))
    minority = (n - 1) // 2 / n
    table = Table(
        title="",
        columns=("operation", "needs", "available", f"with {t} tries"),
        rows=tuple((name, str(k), f"{a:.7f}", f"{b:.7f}") for name, k, a, b in rows),
    )
    choice = Table(
        title="While the network is cut in two",
        columns=("choice", "answers", "may read old values"),
        rows=(
            ("consistency: the minority refuses", share(1 - cut * minority, 4), "no" if strict else "yes: R + W <= N"),
            ("availability: both sides answer", share(1.0, 4), "yes, until the sides are merged"),
        ),
    )
    note = (
        "Every read meets the newest write."
        if strict
        else f"R + W = {r + w} <= N = {n}: a read can miss the newest write."
    )
    notes = (
        note,
        f"Retries cost {tried:.4g} requests for each read on average; they help against faults that pass, and make "
        "overload worse.",
        "Replicas fail independently here; what they share (a switch, a release) fails them together.",
    )
    data = {
        "replicas": n, "read": r, "write": w, "strict": strict, "tries": t, "requests_a_read": tried,
        "read_available": rows[0][2], "write_available": rows[1][2], "read_with_tries": rows[0][3],
        "write_with_tries": rows[1][3], "answers_if_consistent": 1 - cut * minority,
    }  # fmt: skip
    figure = _quorum_curve({"read": (r, n), "write": (w, n), "one copy": (1, 1)}, t)
    title = f"{n} replicas, R = {r}, W = {w}"
    return Answer(title=title, tables=(table, choice), data=data, notes=notes, figures=(figure,))


def _quorum_curve(operations: dict[str, tuple[int, int]], tries: int) -> Figure:
    """How often each (needs, of) fails in all its tries, over how often one copy does."""
    shares = [float(x) for x in np.geomspace(1e-4, 0.5, 40)]
    series = tuple(
        (name, [(q, (1 - float(rel.k_of_n_equal(k, n, 1 - q))) ** tries) for q in shares])
        for name, (k, n) in operations.items()
    )
    return Figure(
        title="What a quorum makes of its copies", x_label="unavailability of one copy",
        y_label=f"unavailability, {tries} tries" if tries > 1 else "unavailability", series=series,
        log_x=True, log_y=True,
    )  # fmt: skip


def _bathtub(hazard: Callable[[float], float], days: float) -> Figure:
    """The curve of a cumulated hazard's slope up to an age."""
    ages = np.geomspace(0.1, days, 120)
    steps = np.diff([hazard(t) for t in ages]) / np.diff(ages)
    return Figure(
        title="The bathtub",
        x_label="age, days",
        y_label="failures a unit and day",
        log_x=True,
        log_y=True,
        series=(("hazard", list(zip(ages[:-1].tolist(), steps.tolist(), strict=True))),),
    )


def _burn_in_cells(row: dict[str, float]) -> tuple[str, ...]:
    spent, failures = duration(row["burn_in_days"] * 86_400), significant(row["failures"])
    return spent, share(row["die_in_it"]), failures, duration(row["mtbf_h"] * 3600), significant(row["unit_days"])


def burn_in_answer(
    units: int,
    days: float,
    infant_shape: float,
    infant_days: float,
    mtbf_days: float,
    wear_shape: float,
    wear_days: float,
    failure_days: float,
) -> Answer:
    """A bathtub: how long to run new hardware before the job, and what that buys. Times in days."""
    n, length = count("--units", units, 1), float(positive("--days", days))
    life = rel.bathtub(
        infant_shape=infant_shape,
        infant_scale=infant_days,
        rate=1 / float(positive("--mtbf-days", mtbf_days)),
        wear_shape=wear_shape,
        wear_scale=wear_days,
    )
    cost = float(nonnegative("--failure-days", failure_days))

    def hazard(t: float) -> float:
        return -float(np.log(np.maximum(life.sf(t), 1e-300)))

    def row(b: float) -> dict[str, float]:
        failures = n * (hazard(b + length) - hazard(b))
        return {
            "burn_in_days": b,
            "die_in_it": 1 - float(life.sf(b)),
            "failures": failures,
            "unit_days": n * b + cost * failures,
            "mtbf_h": 24 * length / failures if failures else float("inf"),
        }

    listed = [row(b) for b in (0.0, 1.0, 2.0, 4.0, 7.0, 14.0, 30.0, 60.0)]
    grid = [row(b) for b in np.concatenate([[0.0], np.geomspace(0.05, 2 * length, 200)])]
    best = min(grid, key=lambda r: r["unit_days"])
    last = _burn_in_cells(best)
    cells = (*map(_burn_in_cells, listed), (f"best: {last[0]}", *last[1:]))
    columns = ("burn-in", "units that die in it", "failures in the job", "MTBF of all", "unit-days it costs")
    figure = _bathtub(hazard, max(4 * wear_days, 4 * length))
    notes = (f"Each failure in the job is taken to cost {cost:g} unit-days; burning in costs a unit-day each day.",)
    title = f"{n:,} new units for {length:g} days"
    return Answer(
        title=title, tables=(Table(title="", columns=columns, rows=cells),),
        data={"units": n, "days": length, "rows": listed, "best": best}, notes=notes, figures=(figure,),
    )  # fmt: skip


def price_answer(
    *,
    profile: str,
    params: float | None,
    accelerators: int | None,
    days: float | None,
    price: float,
    watts: float,
    carbon: float,
    spot_price: float | None,
    spot_mtbf_h: float,
) -> Answer:
    """What a job's lost and redundant work costs: money, energy, carbon; and spot machines against reserved ones."""
    nonnegative("--price", price), nonnegative("--watts", watts), nonnegative("--carbon", carbon)
    positive("--spot-mtbf-hours", spot_mtbf_h)
    job, sources = job_from_options(None, profile=profile, params=params, accelerators=accelerators, days=days)
    best = design_of(job)
    hours = job.accelerators * job.days * 24
    parts = {"productive": best.analytic.chain, "lost, waiting, saving": 1 - best.analytic.chain}

    def row(name: str, part: float) -> dict[str, Any]:
        spent = hours * part
        kwh = spent * watts / 1000
        return {"what": name, "share": part, "hours": spent, "money": spent * price, "kwh": kwh, "kg_co2": kwh * carbon}

    rows = [row(name, part) for name, part in parts.items()]
    cells = tuple(
        (r["what"], share(r["share"]), *(significant(r[k]) for k in ("hours", "money", "kwh", "kg_co2"))) for r in rows
    )
    tables = [Table(title="", columns=("what", "share", "accelerator-hours", "money", "kWh", "kg CO2"), rows=cells)]
    data: dict[str, Any] = {"rows": rows, "mtbf_h": best.analytic.mtbf_h, "ettr": best.analytic.chain}
    if spot_price is not None:
        nonnegative("--spot-price", spot_price)
        taken = FailureClass(
            name="taken back", node_mtbf_h=spot_mtbf_h, predicted=1.0, notice_s=120.0, source="--spot-mtbf-hours"
        )
        spot = replace_job(job, classes=(*job.classes, taken))
        useful = analyse(design_of(spot).job).chain
        each = {"reserved": (price, best.analytic.chain), "spot": (spot_price, useful)}
        data["useful_hour"] = {name: cost / max(ratio, 1e-9) for name, (cost, ratio) in each.items()}
        compared = tuple(
            (name, significant(cost), share(ratio), significant(data["useful_hour"][name]))
            for name, (cost, ratio) in each.items()
        )
        headings = ("machines", "price an hour", "useful time", "price of a useful hour")
        tables.append(Table(title="Spot against reserved", columns=headings, rows=compared))
    notes = ("Prices, watts and carbon are yours; ETTR is the design's, as `outlast plan` has it.", *sources)
    title = f"{job.name}: {job.accelerators:,} accelerators for {job.days:g} days"
    figures = (_price_curve(job, hours * price),)
    return Answer(title=title, tables=tuple(tables), data=msgspec.to_builtins(data), notes=notes, figures=figures)


def _price_curve(job: Job, money: float) -> Figure:
    """What is lost of a job's `money` if its machines fail more or less often, each time with its best design."""
    lost = []
    for factor in np.geomspace(0.1, 10, 9).tolist():
        classes = tuple(msgspec.structs.replace(c, node_mtbf_h=c.node_mtbf_h / factor) for c in job.classes)
        lost.append((factor, money * (1 - design_of(replace_job(job, classes=classes)).analytic.chain)))
    return Figure(
        title="What reliability is worth", x_label="failures, times those expected", y_label="money lost",
        series=(("lost, waiting, saving", lost),), log_x=True,
    )  # fmt: skip
