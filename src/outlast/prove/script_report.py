"""What a campaign on a script has shown, as one record: for the terminal, JSON, the page and JUnit alike. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from outlast.prove.catalogue import CATALOGUE
from outlast.prove.script_campaign import Baseline, ScriptResult
from outlast.prove.script_figures import (
    CountGrid,
    Foreseen,
    Spread,
    foreseen_of,
    kind_of,
    moments_grid,
    phases_grid,
    spreads_of,
)
from outlast.prove.script_plan import KINDS, Shape
from outlast.prove.strike_findings import StrikeFinding

__all__ = ["NOT_DRAWN", "FailedRun", "ProofReport", "StruckRow", "command_of", "proof_of"]

NOT_DRAWN = "no strike of it was drawn, or nobody was there to be struck"
"""Why a kind that could have been injected was not."""


class StruckRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table: strikes of one kind at one target, and how the runs ended that they struck."""

    kind: str
    target: str
    strikes: int
    same_bits: int
    fleet_lost: int
    wrong: int


class FailedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ended wrong. `command`: strikes it the same way again; `shrunk`: whether by the shortest schedule that
    still failed."""

    number: int
    findings: list[StrikeFinding]
    command: str
    shrunk: bool
    folder: str


class ProofReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `verdict`: `held`; `script`, where the script itself is at fault; `failed`; `nothing`, where no run
    was struck. `untested`: (what, why not)."""

    verdict: Literal["held", "script", "failed", "nothing"]
    script: list[str]
    seed: int
    shape: Shape
    steps: int
    microbatches: int
    fingerprint: str
    script_faults: list[StrikeFinding]
    runs: int
    same_bits: int
    fleet_lost: int
    wrong: int
    strikes: int
    table: list[StruckRow]
    downtimes_s: list[float]
    longest_s: float
    numbers: list[str]
    notes: list[str]
    failures: list[FailedRun]
    untested: list[tuple[str, str]]
    phases: CountGrid
    moments: CountGrid
    spreads: list[Spread]
    foreseen: Foreseen | None
    results: list[ScriptResult]


def proof_of(
    script: Sequence[str],
    seed: int,
    baseline: Baseline,
    results: Sequence[ScriptResult],
    untested: Sequence[tuple[str, str]],
    shrunk: Mapping[int, ScriptResult],
) -> ProofReport:
    """`shrunk`: by the number of a run that failed, the shortest that still does."""
    ends = Counter(result.outcome for result in results)
    rows = _table(results)
    met = {row.kind for row in rows}
    if any(":brownout:" in result.schedule for result in results):
        met.add("brownout")  # it is told as the deaths that it consists of
    missing = [(name, NOT_DRAWN) for name in KINDS]
    phases = phases_grid(results)
    others = [kind for kind in CATALOGUE if not kind.by.startswith("outlast prove run")]
    return ProofReport(
        verdict="script" if baseline.faults else "failed" if ends["wrong"] else "held" if results else "nothing",
        script=list(script),
        seed=seed,
        shape=baseline.shape,
        steps=baseline.shape.steps,
        microbatches=baseline.microbatches,
        fingerprint=baseline.fingerprint,
        script_faults=baseline.faults,
        runs=len(results),
        same_bits=ends["same bits"],
        fleet_lost=ends["fleet lost"],
        wrong=ends["wrong"],
        strikes=sum(row.strikes for row in rows),
        table=rows,
        downtimes_s=sorted(each for result in results for each in result.downtimes_s),
        longest_s=max((result.longest_s for result in results), default=0.0),
        numbers=[f"run {r.number}: {f.check}: {f.detail}" for r in results for f in r.numbers],
        notes=sorted({note for result in results for note in result.notes}),
        failures=[_failure(script, result, baseline, shrunk) for result in results if result.outcome == "wrong"],
        untested=[
            *((n, w) for n, w in missing if n not in met and n not in dict(untested)),
            *untested,
            *((f"a fault in the phase {name}", "none was met there") for name in phases.empty if "phase" in met),
            *((kind.name, kind.why_not or f"it has a command of its own: {kind.by}") for kind in others),
        ],
        phases=phases,
        moments=moments_grid(results),
        spreads=spreads_of(results),
        foreseen=foreseen_of(results),
        results=list(results),
    )


def _failure(
    script: Sequence[str], result: ScriptResult, baseline: Baseline, shrunk: Mapping[int, ScriptResult]
) -> FailedRun:
    least = shrunk.get(result.number, result)
    return FailedRun(
        number=result.number,
        findings=least.findings,
        command=command_of(script, least, baseline.shape),
        shrunk=result.number in shrunk,
        folder=least.folder,
    )


def command_of(script: Sequence[str], result: ScriptResult, shape: Shape) -> str:
    """The command that strikes a run the same way once more; what the strikes meet need not be the same."""
    words = ["outlast", "prove", "run", "--schedule", result.schedule, "--replicas", str(shape.replicas)]
    words += ["--spares", str(shape.spares), "--agents", str(result.agents), "--exchange", result.exchange]
    words += ["--checkpoints"] if result.keeps else ["--no-checkpoints"]
    words += ["--hosts", str(shape.hosts)] if shape.hosts else []
    words += ["--slots", str(shape.slots)] if shape.slots else []
    words += ["--ranks", str(shape.ranks)] if shape.ranks > 1 else []
    return shlex.join([*words, *script])


def _table(results: Sequence[ScriptResult]) -> list[StruckRow]:
    table: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        for done in result.done:
            table.setdefault((kind_of(done.kind), done.role), Counter())[result.outcome] += 1
        for phase in result.phases:
            table.setdefault(("phase", phase.replace(":", ", ")), Counter())[result.outcome] += 1
    return [
        StruckRow(
            kind=kind,
            target=target,
            strikes=row.total(),
            same_bits=row["same bits"],
            fleet_lost=row["fleet lost"],
            wrong=row["wrong"],
        )
        for (kind, target), row in sorted(table.items())
    ]
