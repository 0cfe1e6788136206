"""R = R_compute x R_communication x R_synchronisation of one checkpoint segment, over parameters, nodes and topology.

Invariant: each row is a view of the job that `plan job` makes of the same options: the same MTBF, the same ETTR. The
factors group that job's own failure classes; a test holds the table to falling (weakly) in parameters, nodes and steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outlast.core.reliability.check import at_least, count, positive
from outlast.errors import ConfigError

from ._fleet import TOPOLOGIES
from ._model import Job
from ._planner import design_of
from .answers import Answer, Table
from .designs import job_from_options
from .figures import Figure
from .number_words import duration

__all__ = ["SystemRow", "system_answer", "system_rows"]

_COMMUNICATION = frozenset({"switch or cable"})
_SYNCHRONISATION = frozenset({"NCCL watchdog"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemRow:
    """One job: the odds that a segment (interval and write) passes, by what may fail in it, and the job's clocks."""

    parameters: float
    nodes: int
    topology: str
    r_compute: float
    r_communication: float
    r_synchronisation: float
    mtbf_h: float
    ettr: float
    step_s: float
    write_s: float

    @property
    def r(self) -> float:
        """The product of the three."""
        return self.r_compute * self.r_communication * self.r_synchronisation


def _survives(job: Job, hours: float) -> tuple[float, float, float]:
    rates_h = [0.0, 0.0, 0.0]
    for item in job.classes:
        rates_h[(item.name in _COMMUNICATION) + 2 * (item.name in _SYNCHRONISATION)] += job.fleet_rate_h(item)
    compute, communication, synchronisation = (math.exp(-rate * hours) for rate in rates_h)
    return compute, communication, synchronisation


def system_rows(
    sizes: list[float], nodes: list[int], steps: int, topologies: tuple[str, ...] = TOPOLOGIES, profile: str = "llama3"
) -> list[SystemRow]:
    """The table over parameters x nodes x topology; `steps` between two checkpoints."""
    found = []
    for size in sizes:
        for num in nodes:
            for topology in topologies:
                job, _ = job_from_options(
                    None, profile=profile, params=size, accelerators=8 * num, topology=topology, days=30.0
                )
                best = design_of(job)
                write_s = job.tiers[-1].write_s
                compute, communication, synchronisation = _survives(job, (steps * job.step_s + write_s) / 3600)
                found.append(
                    SystemRow(
                        parameters=size,
                        nodes=num,
                        topology=topology,
                        r_compute=compute,
                        r_communication=communication,
                        r_synchronisation=synchronisation,
                        mtbf_h=best.analytic.mtbf_h,
                        ettr=best.analytic.chain,
                        step_s=job.step_s,
                        write_s=write_s,
                    )
                )
    return found


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} {text!r} is not a list of numbers", remedy="separate numbers by commas") from None


def system_answer(params: str, nodes: str, steps: int, profile: str = "llama3") -> Answer:
    """The table, and what each class of the last row rests on."""
    counts = [int(at_least("--nodes", n, 1)) for n in _numbers("--nodes", nodes)]
    sizes = [float(positive("--params", n)) for n in _numbers("--params", params)]
    table = system_rows(sizes, counts, count("--steps", steps, 1), profile=profile)
    rows = tuple(
        (
            f"{r.parameters:.3g} x {r.nodes} {r.topology}",
            *(f"{x:.6f}" for x in (r.r_compute, r.r_communication, r.r_synchronisation, r.r)),
            duration(r.mtbf_h * 3600),
            f"{100 * r.ettr:.2f} %",
        )
        for r in table
    )
    columns = ("parameters x nodes, topology", "R compute", "R communication", "R synchronisation", "R", "MTBF", "ETTR")
    job, sources = job_from_options(None, profile=profile, params=sizes[-1], accelerators=8 * counts[-1])
    causes = Table(
        title="What fails, and where that is from",
        columns=("class", "source"),
        rows=tuple((item.name, item.source) for item in job.classes),
    )
    data = {"rows": [{**{f: getattr(r, f) for f in r.__slots__}, "r": r.r} for r in table], "steps": steps}
    notes = (
        "Each row is the job of `outlast plan --params --accelerators --topology`: its MTBF, and its design's ETTR.",
        "Parameters act through the memory they occupy, bytes of state and the length of steps. No source gives a "
        "failure rate per byte moved, so none is used.",
        "Every link counts in ring and tree; in a fat tree each device's own link and its leaf switch; rails are taken "
        "to route around a lost link.",
        *sources,
    )
    title = f"Reliability of one segment of {steps} steps"
    tables = (Table(title="", columns=columns, rows=rows), causes)
    return Answer(title=title, tables=tables, data=data, notes=notes, figures=(_curves(table, sizes[-1]),))


def _curves(table: list[SystemRow], size: float) -> Figure:
    """R over nodes of one model, a line for each topology."""
    topologies = dict.fromkeys(row.topology for row in table)
    series = tuple(
        (name, sorted((float(r.nodes), r.r) for r in table if r.topology == name and r.parameters == size))
        for name in topologies
    )
    return Figure(title=f"{size:.3g} parameters", x_label="nodes", y_label="R of a segment", series=series, log_x=True)
