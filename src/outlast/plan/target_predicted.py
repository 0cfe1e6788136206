"""The target's four configurations as outlast would run them: published rates, its own coverage and costs, intervals.

Role: the second of the target study's tables. Rates are counts of a published fleet with their Gamma posteriors; the
share of deaths that survivors outlast, and of wrong gradients that are caught, are counts of outlast's own trials with
Beta posteriors; costs are a calibration file's, or assumed and called so. Invariant: nothing here was fitted to the
table; the job is the one that `plan job` makes of 1.5e12 parameters on 10,000 accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from outlast.core.policy import audit_share

from ._analytic import analyse
from ._compiled import replace_job
from ._model import Job
from ._planner import design_of
from .answers import Table
from .calibration import Calibration, applied
from .designs import job_from_options

__all__ = ["PARAMETERS", "PredictedRow", "measured_table", "predicted", "predicted_table"]

PARAMETERS, ACCELERATORS, DAYS = 1.5e12, 10_000, 30.0
_EVERYWHERE = frozenset({"software", "dependency", "NCCL watchdog"})
"""What strikes all replicas alike: no other replica outlasts it."""
_BYZANTINE = "silent data corruption"
_OUTLASTED = (19, 20)
"""Without a calibration: the run's own prior, one death in twenty is not outlasted (`RunPrior`), worth twenty."""
_CAUGHT = (12, 12)
"""`outlast prove corruption --flips 9` in float32 and bf16 (benchmarks/RESULTS.md): 12 of 12 with the right culprit."""
_REPLICA_DEVICES = 400  # 16 bytes a parameter in 60 GB a device
_HOUR_S = 3600.0
_NAMES = ("baseline", "+ redundant gradients", "+ adaptive checkpointing", "+ Byzantine tolerance")


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedRow:
    """MTBR (hours) and efficiency (ETTR times the failure-free share), each with what 95 % of the inputs' posteriors
    give."""

    name: str
    mtbr_h: float
    mtbr_95_h: tuple[float, float]
    efficiency: float
    efficiency_95: tuple[float, float]


def _masked(job: Job, outlasted: float, caught: float) -> Job:
    def share(name: str) -> float:
        if name == _BYZANTINE:
            return caught
        return 0.0 if name in _EVERYWHERE else outlasted

    return replace_job(job, classes=tuple(msgspec.structs.replace(c, masked=share(c.name)) for c in job.classes))


def _configurations(job: Job, best: Job, outlasted: float, caught: float) -> tuple[Job, ...]:
    """The four; `best`: the same job with the ladder that is best for it."""
    store = msgspec.structs.replace(job.tiers[-1], every=1)
    near = tuple(msgspec.structs.replace(c, severity=0) for c in job.classes)
    fixed: dict[str, Any] = {"tiers": (store,), "interval": "fixed", "interval_s": _HOUR_S}
    replicas = job.accelerators / _REPLICA_DEVICES
    # while a dead replica's place is empty the others do its work
    stall_s = job.mask_stall_s + job.tiers[0].recovery_s / replicas
    baseline = replace_job(job, classes=near, mask_stall_s=stall_s, **fixed)
    ladder = replace_job(job, tiers=best.tiers, interval="fixed", interval_s=best.interval_s, mask_stall_s=stall_s)
    audited = audit_share("auto", job.accelerators, job.step_s)
    return (
        baseline,
        _masked(baseline, outlasted, 0.0),
        _masked(ladder, outlasted, 0.0),
        replace_job(_masked(ladder, outlasted, caught), efficiency=job.efficiency / (1 + audited)),
    )


def _scaled(job: Job, factors: dict[str, float]) -> Job:
    classes = (msgspec.structs.replace(c, node_mtbf_h=c.node_mtbf_h / factors[c.name]) for c in job.classes)
    return replace_job(job, classes=tuple(classes))


def _beta(rng: np.random.Generator, seen: tuple[int, int], draws: int) -> Any:
    return rng.beta(seen[0] + 0.5, seen[1] - seen[0] + 0.5, draws)


def predicted(
    calibration: Calibration | None = None, *, profile: str = "llama3", draws: int = 200, seed: int = 0
) -> tuple[list[PredictedRow], dict[str, float], list[str]]:
    """(the rows, the job's own MTBF and ETTR as every command has them, what they rest on)."""
    job, sources = job_from_options(None, profile=profile, params=PARAMETERS, accelerators=ACCELERATORS, days=DAYS)
    plain = design_of(job)
    clocks = {"mtbf_h": plain.analytic.mtbf_h, "ettr": plain.analytic.chain}
    notes, outlasted = list(sources), _OUTLASTED
    if calibration is None:
        notes.append("Costs are assumed: `outlast calibrate --out FILE`, then --calibration FILE.")
    else:
        job, taken = applied(job, calibration)
        notes += taken
        if "outlasted" in calibration.shares:
            outlasted = (calibration.shares["outlasted"].k, calibration.shares["outlasted"].n)
    notes.append(
        f"Deaths outlasted: {outlasted[0]} of {outlasted[1]}; wrong gradients caught: {_CAUGHT[0]} of {_CAUGHT[1]}."
    )
    rng = np.random.default_rng(seed)
    shares = _beta(rng, outlasted, draws), _beta(rng, _CAUGHT, draws)
    means = (outlasted[0] + 0.5) / (outlasted[1] + 1), (_CAUGHT[0] + 0.5) / (_CAUGHT[1] + 1)
    best = design_of(_masked(job, means[0], 0.0)).job
    counts = {c.name: _count(c.source) for c in job.classes}
    found = [[_answer(x)] for x in _configurations(job, best, *means)]
    for k in range(draws):
        factors = {name: rng.gamma(n + 0.5) / n for name, n in counts.items()}
        drawn = _configurations(_scaled(job, factors), best, float(shares[0][k]), float(shares[1][k]))
        for row, each in zip(found, drawn, strict=True):
            row.append(_answer(each))
    return [_row(name, np.array(row)) for name, row in zip(_NAMES, found, strict=True)], clocks, notes


def _count(source: str) -> float:
    """How many failures a class's rate rests on, as its source ends with; twenty where it does not say."""
    last = source.rpartition(": ")[2]
    return float(last) if last.isdigit() else 20.0


def _answer(job: Job) -> tuple[float, float]:
    found = analyse(job)
    return found.mtbr_h, found.chain * job.efficiency


def _row(name: str, values: Any) -> PredictedRow:
    (mtbr, efficiency), drawn = values[0], values[1:]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0) if len(drawn) else (values[0], values[0])
    return PredictedRow(
        name=name,
        mtbr_h=float(mtbr),
        mtbr_95_h=(float(low[0]), float(high[0])),
        efficiency=float(efficiency),
        efficiency_95=(float(low[1]), float(high[1])),
    )


def predicted_table(rows: list[PredictedRow], profile: str) -> Table:
    """The rows for a reader."""
    cells = tuple(
        (
            r.name,
            f"{r.mtbr_h:.1f} ({r.mtbr_95_h[0]:.1f}-{r.mtbr_95_h[1]:.1f})",
            f"{100 * r.efficiency:.1f} % ({100 * r.efficiency_95[0]:.1f}-{100 * r.efficiency_95[1]:.1f})",
        )
        for r in rows
    )
    title = f"2. Predicted for outlast, at the rates of {profile}: nothing here was fitted to the table"
    return Table(title=title, columns=("configuration", "MTBR h (95 %)", "efficiency (95 %)"), rows=cells)


def measured_table(rows: list[dict[str, Any]]) -> Table:
    """Real fleets under compressed time, beside what was predicted for exactly these."""
    cells = tuple(
        (
            str(r["name"]),
            str(r["faults"]),
            f"{r['mtbr_s']:.0f} s" if r["mtbr_s"] else "no loss",
            f"{r['predicted_mtbr_s']:.0f} s" if r["predicted_mtbr_s"] else "never",
            f"{100 * r['ettr']:.1f} %",
            f"{100 * r['predicted_ettr']:.1f} %",
        )
        for r in rows
    )
    columns = ("configuration", "faults", "MTBR", "predicted", "useful time", "predicted")
    return Table(title="3. Measured: real fleets, failures injected at scaled rates", columns=columns, rows=cells)
