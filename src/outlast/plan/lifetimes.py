"""Lifetimes of units, dead or still alive, and what their age does to a job.

Invariant: a unit that lives counts with the age that it has reached (censored); every parameter has its interval. The
job gets the rate that its units have while it runs, at the age that they then have: wear reaches the plan.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from outlast.core import reliability as rel
from outlast.core.reliability.check import count, nonnegative, positive
from outlast.errors import ConfigError

from .answers import Answer, Table
from .figures import Figure
from .number_words import significant

__all__ = ["lifetimes_answer"]

_DEAD = {"1": True, "true": True, "yes": True, "dead": True, "0": False, "false": False, "no": False, "alive": False}


def _read(path: str, age: str, dead: str, group: str) -> dict[str, tuple[list[float], list[bool]]]:
    found: dict[str, tuple[list[float], list[bool]]] = {}
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                missing = [column for column in (age, dead, group) if column and row.get(column) is None]
                if missing:
                    raise ConfigError(
                        f"{path}, line {number}: no column {missing[0]!r}", remedy="name it: --age, --dead, --group"
                    )
                word, years = row[dead].strip().lower(), float(row[age])
                if word not in _DEAD or not 0 < years < float("inf"):
                    raise ValueError(f"age {row[age]!r}, dead {row[dead]!r}")
                ages, ended = found.setdefault(row[group] if group else "all", ([], []))
                ages.append(years)
                ended.append(_DEAD[word])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="give a CSV file with a header") from None
    except ValueError as error:
        raise ConfigError(
            f"{path}, line {number}: {error}", remedy="an age above 0, and dead: 1 or 0, yes or no, dead or alive"
        ) from None
    if not found:
        raise ConfigError(f"{path} has no units", remedy="one line a unit")
    return found


def lifetimes_answer(path: str, *, age: str, dead: str, group: str, units: int, years: float, days: float) -> Answer:
    """Survival and fitted laws of each group; failures of `units` of that kind, `years` old, in a job of `days`."""
    n, old, length = count("--units", units, 1), float(nonnegative("--years", years)), float(positive("--days", days))
    rows, laws, series, data = [], [], [], dict[str, Any]()
    for name, (ages, ended) in sorted(_read(path, age, dead, group).items()):
        t, seen = np.array(ages), np.array(ended)
        if seen.sum() < 3:
            raise ConfigError(f"group {name!r}: {int(seen.sum())} deaths are too few to fit", remedy="three or more")
        best, *others = rel.compare_fits(t, seen)
        hazard = [-float(np.log(np.maximum(best.lifetime.sf(x), 1e-300))) for x in (old, old + length / 365.25)]
        failures = n * (hazard[1] - hazard[0])
        a_death = float(t.sum() / seen.sum())
        rows.append(
            (name, f"{len(t):,}", f"{int(seen.sum()):,}", significant(a_death), best.family, significant(failures))
        )
        for law in (best, *others):
            told = ", ".join(
                f"{k} {significant(x)} ({significant(a)} to {significant(b)})"
                for k, (x, a, b) in law.parameters.items()
            )
            laws.append((f"{name}: {law.family}", f"{law.aic:.1f}", told))
        curve = rel.kaplan_meier(t, seen)
        series.append((name, list(zip(curve.time.tolist(), curve.value.tolist(), strict=True))))
        data[name] = {
            "units": len(t), "deaths": int(seen.sum()), "unit_years_a_death": a_death, "failures": failures,
            "node_mtbf_h": n * length * 24 / failures,
            "laws": {law.family: {"aic": law.aic, "parameters": law.parameters} for law in (best, *others)},
        }  # fmt: skip
    first = Table(
        title="",
        columns=("group", "units", "dead", "years a death", "best law", f"failures of {n:,} in {length:g} d"),
        rows=tuple(rows),
    )
    second = Table(title="Laws, best first", columns=("law", "AIC", "parameters, 95 %"), rows=tuple(laws))
    figure = Figure(title="Survival (Kaplan-Meier)", x_label="age, years", y_label="share alive", series=tuple(series))
    notes = (
        f"Failures: of units that are {old:g} years old when the job begins; `node_mtbf_h` of --json is that rate, for "
        "a class of a job file.",
        "A Weibull shape above 1 is wear: the same units fail more as they age.",
    )
    return Answer(
        title=f"{path}: lifetimes",
        tables=(first, second),
        data={"groups": data, "years": old, "days": length},
        notes=notes,
        figures=(figure,),
    )
