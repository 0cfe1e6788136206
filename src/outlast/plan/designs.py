"""Behind the commands: options to a job, a plan to files. The only module of the room that writes files.

Invariant: command line over profile or file; what cannot be read or written is refused with the path.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from outlast.core.reliability.check import count, nonnegative
from outlast.errors import ConfigError, EnvironmentFault

from . import _svg
from ._model import Job, job_from_mapping, load_job
from ._planner import Plan, make_plan
from ._profiles import profile_data, profile_note
from ._traced import fit_answer, job_data_from_fit
from .answers import Answer, Table
from .calibration import applied, load
from .figures import Figure
from .number_words import duration, significant
from .plan_report import _STYLE, _table, html_page
from .traces import FleetFit, Trace, fit_trace, generate, read_trace, rows_wanted, statistics, to_csv

__all__ = ["design", "fit_log", "generate_like", "job_from_options", "write_figures", "write_report"]


def job_from_options(
    file: str | None,
    *,
    profile: str = "",
    params: float | None = None,
    accelerators: int | None = None,
    days: float | None = None,
    topology: str = "",
) -> tuple[Job, list[str]]:
    """The job that the options describe, and its sources: every command makes its job here."""
    if file and profile:
        raise ConfigError(
            "both a job file and --profile", remedy='put profile = "..." into the file, or give one of them'
        )
    if params is not None and not params > 0:
        raise ConfigError(f"--params = {params:g} is out of range", remedy="give the number of parameters, above zero")
    shape = {"parameters": params, "accelerators": accelerators, "days": days, "topology": topology or None}
    overrides = {key: value for key, value in shape.items() if value is not None}
    if file:
        job = load_job(file, overrides)
        return job, [f"Job: {file}."]
    name = profile or "llama3"
    data = profile_data(name, overrides)
    note = f"Profile {name}: {profile_note(name)}"
    if name not in ("spot", "target"):
        note += " Tiers follow the bytes of state: 16 a parameter."
    elif params is not None:
        factor = params / data["parameters"]
        scaled = ("write_s", "lag_s")
        data["tiers"] = [{**t, **{k: t[k] * factor for k in scaled if k in t}} for t in data["tiers"]]
        note += f" Write times are the profile's times {factor:.3g} (bytes of state follow parameters)."
    if accelerators is not None:
        per_node = data.get("accelerators_per_node", 8)
        data["spares"] = min(data.get("spares", 0), max(0, -(-accelerators // per_node)))
    return job_from_mapping({**data, **overrides}), [note]


def design(
    file: str | None,
    *,
    profile: str = "",
    params: float | None = None,
    accelerators: int | None = None,
    days: float | None = None,
    topology: str = "",
    calibration: str = "",
    replications: int = 256,
    seed: int = 0,
) -> tuple[Plan, list[str]]:
    """A plan from a command's options, and its sources."""
    job, sources = job_from_options(
        file, profile=profile, params=params, accelerators=accelerators, days=days, topology=topology
    )
    if calibration:
        job, notes = applied(job, load(calibration))
        sources = [*sources, *notes]
    else:
        sources = [*sources, "Costs of outlast's own work are assumed: `outlast calibrate --out FILE` measures them."]
    return make_plan(job, replications=replications, seed=seed), sources


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {path}: {error.strerror}", remedy="choose a folder that exists and is writable"
        ) from None


def write_figures(path: str, figures: tuple[Figure, ...]) -> None:
    """The first figure at `path`, each further one with its number before the suffix."""
    where = Path(path)
    for number, figure in enumerate(figures, 1):
        _write(str(where if number == 1 else where.with_stem(f"{where.stem}-{number}")), figure.svg())


def write_report(path: str, plan: Plan, sources: list[str]) -> None:
    """The self-contained page."""
    _write(path, html_page(plan, sources))


def _toml(data: dict[str, Any]) -> str:
    def value(item: Any) -> str:
        if isinstance(item, str):
            return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return str(item).lower() if isinstance(item, bool) else repr(item)

    lines = [f"{k} = {value(v)}" for k, v in data.items() if not isinstance(v, list)]
    for item in data["classes"]:
        lines += ["", "[[classes]]", *(f"{k} = {value(v)}" for k, v in item.items())]
    return "\n".join(lines) + "\n"


def trace_page(trace: Trace, fit: FleetFit, answer: Answer) -> str:
    """The trace drawn: failures a week, failures of each machine, repairs; with the tables."""
    weeks = [(f"week {i + 1}", float(n), str(n)) for i, n in enumerate(fit.weekly_counts)]
    nodes = [(i + 1.0, float(c)) for i, c in enumerate(fit.node_counts)]
    spans, seen, _ = trace.repairs_h()
    plots = [
        "<h2>Incidents a week</h2>",
        _svg.bars(weeks, label="incidents a week"),
        "<h2>Failures by machine, worst first</h2>",
    ]
    plots.append(_svg.line(nodes, x_label="machine (log rank)", y_label="failures"))
    if seen.sum() > 1:
        logs = np.log10(np.maximum(spans[seen], 0.01))
        plots += ["<h2>Repairs</h2>", _svg.histogram(logs.tolist(), x_label="log10 of repair hours")]
    tables = "".join(_table(table) for table in answer.tables)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(trace.name)}</title>'
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>{escape(answer.title)}</h1>{''.join(plots)}{tables}</body></html>\n"
    )


def fit_log(
    log: str,
    *,
    preset: str,
    mapping: str,
    only: list[str],
    nodes: int,
    rounds: int,
    seed: int,
    job: str = "",
    plot: str = "",
) -> Answer:
    """Read, fit, test; optionally write the fitted job and the drawing."""
    count("--nodes", nodes), count("--rounds", rounds)
    trace = read_trace(log, preset_name=preset, mapping_path=mapping, only=rows_wanted(only), nodes=nodes)
    fit = fit_trace(trace, seed, rounds=rounds)
    answer = fit_answer(trace, fit, seed=seed, rounds=rounds)
    if job:
        _write(
            job, _toml({"name": f"fitted to {trace.name}", "accelerators": 8 * fit.num_nodes, **job_data_from_fit(fit)})
        )
    if plot:
        _write(plot, trace_page(trace, fit, answer))
    return answer


def generate_like(
    log: str, out: str, *, preset: str, mapping: str, days: float, nodes: int, log_nodes: int, seed: int
) -> Answer:
    """Fit a log and write one generated trace as CSV; it begins where the log does, and drifts as that did."""
    count("--nodes", nodes), count("--log-nodes", log_nodes), nonnegative("--days", days)
    trace = read_trace(log, preset_name=preset, mapping_path=mapping, nodes=log_nodes)
    fit = fit_trace(trace, seed, rounds=0)
    made = generate(
        fit, np.random.default_rng(seed), hours=days * 24 or None, num_nodes=nodes or None, ahead_h=-fit.hours
    )
    _write(out, to_csv(made))
    a, b = fit.statistics, statistics(made)
    rows = tuple((name, significant(getattr(a, name)), significant(getattr(b, name))) for name in a.__slots__)
    table = Table(title="", columns=("statistic", "the log", "generated"), rows=rows)
    data = {
        "out": out,
        "seed": seed,
        "log": {n: getattr(a, n) for n in a.__slots__},
        "generated": {n: getattr(b, n) for n in b.__slots__},
    }
    failures = f"{len(made.failures)} failures of {made.num_nodes} machines"
    title = f"{out}: {failures} in {duration(made.hours * 3600)}, seed {seed}"
    return Answer(title=title, tables=(table,), data=data, notes=trace.notes)
