"""Behind the commands: options to a job, a plan to files. The only module of the room that writes files.

Invariant: command line over profile or file; what cannot be read or written is refused with the path.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from outlast.core import reliability as rel
from outlast.core.reliability._check import at_least, count, nonnegative, positive
from outlast.errors import ConfigError, EnvironmentFault

from . import _svg
from ._answer import Answer, Table, duration, significant
from ._model import Job, job_from_mapping, load_job
from ._planner import Plan, make_plan
from ._profiles import profile_data, profile_note
from ._report import _STYLE, _table, html_page
from ._traced import fit_answer, job_data_from_fit
from .traces import FleetFit, Trace, fit_trace, generate, read_trace, statistics, to_csv

__all__ = ["design", "fit_log", "generate_like", "job_from_options", "system_answer", "write_report"]


def job_from_options(
    file: str | None, *, profile: str, params: float | None, accelerators: int | None, days: float | None
) -> tuple[Job, list[str]]:
    """The job that the options describe, and its sources. Writes scale with the parameters of the profile."""
    if file and profile:
        raise ConfigError(
            "both a job file and --profile", remedy='put profile = "..." into the file, or give one of them'
        )
    overrides = {
        k: v for k, v in (("parameters", params), ("accelerators", accelerators), ("days", days)) if v is not None
    }
    if file:
        job = load_job(file)
        data: dict[str, Any] = {f: getattr(job, f) for f in job.__struct_fields__}
        return Job(**{**data, **overrides}), [f"Job: {file}."]
    name = profile or "llama3"
    data = profile_data(name)
    note = f"Profile {name}: {profile_note(name)}"
    if params is not None:
        if not params > 0:
            raise ConfigError(
                f"--params = {params:g} is out of range", remedy="give the number of parameters, above zero"
            )
        factor = params / data["parameters"]
        data["tiers"] = [
            {**t, "write_s": t["write_s"] * factor, "lag_s": t.get("lag_s", 0.0) * factor} for t in data["tiers"]
        ]
        note += f" Write times are the profile's times {factor:.3g} (bytes of state follow parameters)."
    if accelerators is not None:
        per_node = data.get("accelerators_per_node", 8)
        data["spares"] = min(data.get("spares", 0), max(0, -(-accelerators // per_node)))
    return job_from_mapping({**data, **overrides}), [note]


def design(
    file: str | None, *, profile: str = "", params: float | None = None, accelerators: int | None = None,
    days: float | None = None, replications: int = 256, seed: int = 0,
) -> tuple[Plan, list[str]]:  # fmt: skip
    """A plan from a command's options, and its sources."""
    job, sources = job_from_options(file, profile=profile, params=params, accelerators=accelerators, days=days)
    return make_plan(job, replications=replications, seed=seed), sources


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {path}: {error.strerror}", remedy="choose a folder that exists and is writable"
        ) from None


def write_report(path: str, plan: Plan, sources: list[str]) -> None:
    """The self-contained page."""
    _write(path, html_page(plan, sources))


def _only(pairs: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        column, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"--only {pair!r} is not COLUMN=VALUE", remedy="for example --only trace=p3")
        found[column] = (*found.get(column, ()), value)
    return found


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
    trace = read_trace(log, preset_name=preset, mapping_path=mapping, only=_only(only), nodes=nodes)
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


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} {text!r} is not a list of numbers", remedy="separate numbers by commas") from None


def system_answer(params: str, nodes: str, steps: int) -> Answer:
    """The table over parameters x nodes x topology, with the constants' sources."""
    shapes: tuple[rel.Topology, ...] = ("ring", "tree", "fat-tree", "rail")
    counts = [int(at_least("--nodes", n, 1)) for n in _numbers("--nodes", nodes)]
    sizes = [float(positive("--params", n)) for n in _numbers("--params", params)]
    table = rel.system_table(sizes, counts, shapes, count("--steps", steps, 1))
    rows = tuple(
        (
            f"{r.parameters:.3g} x {r.num_nodes} {r.topology}",
            f"{r.r_compute:.6f}",
            f"{r.r_communication:.6f}",
            f"{r.r_synchronisation:.6f}",
            f"{r.r:.6f}",
            duration(r.mtbi_h * 3600),
            f"{100 * r.ettr:.2f} %",
        )
        for r in table
    )
    columns = ("parameters x nodes, topology", "R compute", "R communication", "R synchronisation", "R", "MTBI", "ETTR")
    sources = rel.constant_sources()
    constants = Table(
        title="Constants",
        columns=("constant", "value"),
        rows=tuple((k, f"{v:.4g}: {text}") for k, (v, text) in sources.items()),
    )
    data = {
        "rows": [
            {
                "parameters": r.parameters,
                "nodes": r.num_nodes,
                "topology": r.topology,
                "r_compute": r.r_compute,
                "r_communication": r.r_communication,
                "r_synchronisation": r.r_synchronisation,
                "r": r.r,
                "mtbi_h": r.mtbi_h,
                "ettr": r.ettr,
                "step_s": r.step_s,
                "write_s": r.write_s,
            }
            for r in table
        ],
        "constants": {k: {"value": v, "source": text} for k, (v, text) in sources.items()},
    }
    title = f"Reliability of one segment of {steps} steps"
    note = "ring and tree count every link in series; fat-tree and rail are exact up to ten spines or rails."
    return Answer(
        title=title, tables=(Table(title="", columns=columns, rows=rows), constants), data=data, notes=(note,)
    )
