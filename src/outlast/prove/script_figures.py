"""What a campaign's runs say together: fault by phase and by moment, times by cause, predicted beside observed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from outlast.prove.script_campaign import ScriptResult
from outlast.prove.script_evidence import MOMENTS, Survived
from outlast.prove.script_plan import INSIDE, KINDS, PHASES

__all__ = ["Foreseen", "CountGrid", "Spread", "foreseen_of", "kind_of", "moments_grid", "phases_grid", "spreads_of"]

_OF_SIGNAL = {kind.signal: name for name, kind in KINDS.items() if kind.signal and name not in ("pause", "brownout")}
_BESIDE = ("checkpoint_s", "lost_s", "degraded_s", "stalled_s", "unexplained_s")


class CountGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Counts: `rows` by `columns`."""

    rows: list[str]
    columns: list[str]
    counts: list[list[int]]

    @property
    def empty(self) -> list[str]:
        """Columns in which nothing was counted."""
        return [name for index, name in enumerate(self.columns) if not any(row[index] for row in self.counts)]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A duration over all faults of one cause: how many, and its quantiles, in seconds."""

    what: str
    cause: str
    count: int
    least_s: float
    middle_s: float
    most_of_95_s: float
    longest_s: float


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """Useful time of the runs with odd numbers: predicted from what faults cost in the even ones, and observed."""

    learnt_from: int
    held_against: int
    predicted: float
    observed: float


def kind_of(done: str) -> str:
    """The name that schedules have for a strike, from the one that its record has."""
    first, _, more = done.partition(", ")
    return "pause" if more else _OF_SIGNAL.get(first, first.lower())


def phases_grid(results: Sequence[ScriptResult]) -> CountGrid:
    """Faults from inside that were met: what was done, by the phase of a step in which."""
    columns = [phase.name.lower() for phase in PHASES]
    counts: Counter[tuple[str, str]] = Counter()
    for result in results:
        for told, met in zip(result.phases, result.evidence.met, strict=False):
            phase, _, action = told.partition(":")
            counts[action, phase] += met
    rows = list(INSIDE)
    return CountGrid(rows=rows, columns=columns, counts=[[counts[row, column] for column in columns] for row in rows])


def moments_grid(results: Sequence[ScriptResult]) -> CountGrid:
    """Strikes from outside: the kind, by what the run was doing when it was struck."""
    counts: Counter[tuple[str, str]] = Counter()
    for result in results:
        for done, moment in zip(result.done, result.evidence.moments, strict=False):
            counts[kind_of(done.kind), moment] += 1
    rows = sorted({kind for kind, _ in counts})
    return CountGrid(
        rows=rows, columns=list(MOMENTS), counts=[[counts[row, column] for column in MOMENTS] for row in rows]
    )


def spreads_of(results: Sequence[ScriptResult]) -> list[Spread]:
    """How long a fault took to be noticed, and how long training stood still, by cause."""
    by_cause: dict[str, list[Survived]] = {}
    for result in results:
        for each in result.evidence.survived:
            by_cause.setdefault(each.cause, []).append(each)
    found = []
    for what, field in (("noticed after", "detect_s"), ("training stood still for", "downtime_s")):
        for cause, rows in sorted(by_cause.items()):
            seconds = sorted(float(getattr(row, field)) for row in rows)
            found.append(
                Spread(
                    what=what,
                    cause=cause,
                    count=len(seconds),
                    least_s=seconds[0],
                    middle_s=statistics.median(seconds),
                    most_of_95_s=seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
                    longest_s=seconds[-1],
                )
            )
    return found


def foreseen_of(results: Sequence[ScriptResult]) -> Foreseen | None:
    """From disjoint runs: what each cause cost in the mean in the runs with even numbers, times how often it struck in
    those with odd ones. None where there are no two such runs with accounts."""
    told = [result for result in results if result.evidence.accounts_s.get("productive_s", 0.0) > 0.0]
    learnt, held = ([r for r in told if r.number % 2 == odd] for odd in (0, 1))
    if not learnt or not held:
        return None
    costs: dict[str, list[float]] = {}
    for result in learnt:
        for each in result.evidence.survived:
            costs.setdefault(each.cause, []).append(each.downtime_s)
    means = {cause: statistics.fmean(seconds) for cause, seconds in costs.items()}
    usual = statistics.fmean([each for seconds in costs.values() for each in seconds] or [0.0])
    struck = Counter(each.cause for result in held for each in result.evidence.survived)
    useful_s = sum(result.evidence.accounts_s["productive_s"] for result in held)
    begin_s = _account(learnt, "idle_s") * len(held) / len(learnt)
    beside = sum(_account(learnt, name) for name in _BESIDE) / _account(learnt, "productive_s")
    lost_s = useful_s * beside + sum(count * means.get(cause, usual) for cause, count in struck.items())
    wall_s = sum(result.evidence.accounts_s["wall_s"] for result in held)
    return Foreseen(
        learnt_from=len(learnt),
        held_against=len(held),
        predicted=useful_s / (useful_s + begin_s + lost_s),
        observed=useful_s / wall_s,
    )


def _account(results: Sequence[ScriptResult], name: str) -> float:
    return sum(result.evidence.accounts_s.get(name, 0.0) for result in results)
