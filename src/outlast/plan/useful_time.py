"""Useful time (ETTR): what was predicted for a run, beside what was seen of it.

Role: what the failures that the prior predicts for so long (`beliefs_beside`) would cost this run, at what it has
measured that a save, a death, a start cost it. The formula is that of `outlast plan` (`_analytic.analyse`) with one
tier of saves, in plain numbers so that `why` stays instant: Daly's exact segment for losses of all work (FGCS 22(3),
2006, eq. 20), and shares of time for what survivors stand still and what is missing meanwhile.
Invariant: `outlast why`, the page and `outlast plan --from-run` answer from `useful_beside` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outlast.core import events as ev
from outlast.core.policy import Believed, RunRecord

from .answers import Table
from .beliefs_beside import predicted_beside_observed, predicted_counts
from .number_words import duration, share

__all__ = [
    "UsefulBeside", "UsefulCosts", "UsefulSeen", "costs_of", "planned_useful", "useful_beside", "useful_data",
    "useful_note", "useful_table",
]  # fmt: skip

_TAILS = (0.0125, 0.9875)
"""Probabilities at which the counts of both classes are read: by Bonferroni's inequality at least 95 of 100 runs have
no more and no fewer of either."""


class UsefulSeen(Protocol):
    """What a run came to, as `outlast.observe` has it: ETTR, its 95 % interval or None, failures outlasted."""

    @property
    def ettr(self) -> float: ...
    @property
    def ettr_95(self) -> tuple[float, float] | None: ...
    @property
    def failures(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UsefulCosts:
    """What a run pays, in seconds. save_s: a save holds training up, every interval_s of training (inf: none before the
    end); durable_s: until it is published; restart_s: a start, from nothing to the first view; stall_s: survivors stand
    still for a death, its detection and work done again included; join_s: and for who takes the place; replaced_s:
    until it is taken. num_replicas: as many as the run is to have; none outlasts a death alone."""

    save_s: float
    interval_s: float
    durable_s: float
    restart_s: float
    stall_s: float
    join_s: float
    replaced_s: float
    num_replicas: int


class UsefulBeside(NamedTuple):
    """Predicted ETTR of this run, at least 95 % of the prediction from `low` to `high`; what was seen, its interval."""

    predicted: float
    low: float
    high: float
    seen: float
    seen_95: tuple[float, float] | None
    failures: int
    costs: UsefulCosts

    @property
    def surprise(self) -> bool:
        """Whether what was seen, as far as it is known, lies wholly outside what the prediction allows."""
        return self.seen_95 is not None and (self.seen_95[1] < self.low or self.seen_95[0] > self.high)


def costs_of(record: RunRecord, believed: Believed, events: Iterable[ev.AnyEvent]) -> UsefulCosts:
    """What the run has measured of its costs; of what it has not met yet, what its own policies go by."""
    worst: dict[tuple[int, ...], float] = {}  # faults that one view mended stood still together
    deaths = saves = 0
    for event in events:
        if isinstance(event, ev.Recovery) and "." in event.replica:
            view = tuple(event.view)
            worst[view] = max(worst.get(view, 0.0), event.downtime_s)
            deaths += 1
        elif isinstance(event, ev.CheckpointSaved):
            saves += 1
    # What the policy chooses now is no measure of what the run did: near its end it chooses to save no more.
    apart_s = max(record.blocked_s, believed.watched_s / saves - record.blocked_s) if saves else believed.interval_s
    reshape_s = record.replacements().reshape_s
    return UsefulCosts(
        save_s=record.blocked_s,
        interval_s=apart_s,
        durable_s=record.durable_s,
        restart_s=record.restart_s,
        stall_s=math.fsum(worst.values()) / deaths if deaths else reshape_s,
        join_s=reshape_s,
        replaced_s=record.replaced_s,
        num_replicas=record.num_replicas,
    )


def planned_useful(costs: UsefulCosts, seconds: float, deaths: float, losses: float) -> float:
    """ETTR of `seconds` of training after the first view in which so many replicas die and so often all is lost."""
    if seconds <= 0:
        return 0.0
    interval_s = min(costs.interval_s, seconds)
    save_s = costs.save_s if interval_s == costs.interval_s else 0.0
    useful = interval_s / (interval_s + save_s) if interval_s > 0 else 0.0
    if losses > 0 and interval_s > 0:
        apart_s = seconds / losses
        lengths = costs.restart_s / apart_s, (interval_s + save_s) / apart_s
        useful = interval_s / (apart_s * math.exp(lengths[0]) * math.expm1(lengths[1])) if sum(lengths) < 700 else 0.0
    if costs.num_replicas < 2:  # its death is the loss of all, and counted as that
        deaths = 0.0
    still = (deaths * (costs.stall_s + costs.join_s) + losses * costs.durable_s) / seconds
    missing = deaths * costs.replaced_s / (seconds * costs.num_replicas) if deaths else 0.0
    return useful * max(0.0, 1 - still) * max(0.0, 1 - missing)


def useful_beside(
    record: RunRecord, believed: Believed, events: Iterable[ev.AnyEvent], seen: UsefulSeen
) -> UsefulBeside:
    """What the record's own prior predicted of a run so long, at this run's costs, beside what was seen. The start,
    which every run has once, counts as it was."""
    costs, span_s = costs_of(record, believed, events), believed.watched_s
    begun = span_s / (span_s + costs.restart_s) if span_s > 0 else 0.0

    def ettr(deaths: float, losses: float) -> float:
        return begun * planned_useful(costs, span_s, deaths, losses)

    few, many = (predicted_counts(believed, tail, record.prior) for tail in _TAILS)
    means = (row.predicted for row in predicted_beside_observed(believed, record.prior))
    return UsefulBeside(ettr(*means), ettr(*many), ettr(*few), seen.ettr, seen.ettr_95, seen.failures, costs)


def useful_table(row: UsefulBeside) -> Table:
    """The row for a reader."""
    interval = "no interval yet" if row.seen_95 is None else _span(*row.seen_95)
    cells = (
        "useful time (ETTR)",
        share(row.predicted),
        _span(row.low, row.high),
        share(row.seen),
        f"{interval}{'  SURPRISE' if row.surprise else ''}",
    )
    columns = ("share of wall time", "predicted", "95 % predictive", "seen", "95 % interval")
    return Table(title="Useful time, predicted beside observed", columns=columns, rows=(cells,))


def useful_note(row: UsefulBeside) -> str:
    """What the prediction rests on, and what the interval is of."""
    costs = row.costs
    saves = f"a save of {duration(costs.save_s)} every {duration(costs.interval_s)}"
    if costs.interval_s == math.inf:
        saves = "no save before the end"
    said = (
        f"Predicted: the failures that the prior expects, at this run's own costs: {saves}; a death holds training up "
        f"for {duration(costs.stall_s)}, and its place is taken after {duration(costs.replaced_s)}; a start takes "
        f"{duration(costs.restart_s)}."
    )
    if row.seen_95 is None:
        return f"{said} Seen: an interval takes two failures that were outlasted; so far there are {row.failures}."
    return f"{said} Seen: the interval is from the stretches between {row.failures:,} failures."


def useful_data(row: UsefulBeside) -> dict[str, object]:
    """The row for a program."""
    low, high = row.seen_95 or (None, None)
    return {
        "predicted": row.predicted,
        "low": row.low,
        "high": row.high,
        "seen": row.seen,
        "seen_low": low,
        "seen_high": high,
        "failures": row.failures,
        "surprise": row.surprise,
    }


def _span(low: float, high: float) -> str:
    return f"{100 * low:.2f} to {share(high)}"
