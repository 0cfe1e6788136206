"""All that stands beside what was planned for a run: its failures, its useful time, and what it believes of both now.

Role: one answer for terminal and page (`outlast why`, `outlast serve`), in plain numbers so that `why` stays instant.
Invariant: the rows are those of `outlast plan --from-run`, of the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outlast.core.events import AnyEvent
from outlast.core.policy import Believed

from .answers import Table
from .beliefs_beside import (
    Beside,
    believed_data,
    believed_table,
    beside_data,
    beside_note,
    beside_table,
    predicted_beside_observed,
    record_of_events,
)
from .useful_time import UsefulBeside, UsefulSeen, useful_beside, useful_data, useful_note, useful_table

__all__ = ["RunBeside", "run_beside", "run_data", "worth_telling"]


class RunBeside(NamedTuple):
    """Nothing of a run whose first view has not formed."""

    believed: Believed | None = None
    failures: Sequence[Beside] = ()
    useful: UsefulBeside | None = None


def run_beside(events: Sequence[AnyEvent], seen: UsefulSeen) -> RunBeside:
    """What was predicted of a run, from the events of its story and what it came to."""
    found = record_of_events(events)
    if found is None:
        return RunBeside()
    record, believed = found
    return RunBeside(believed, predicted_beside_observed(believed), useful_beside(record, believed, events, seen))


def worth_telling(run: RunBeside) -> list[tuple[Table, str]]:
    """What terminal and page show, each table with what to say under it: nothing where the run was too short for any
    number of failures to say something, no useful time without either that or an interval, and no belief that no death
    has changed."""
    told, tells = [], any(row.tells for row in run.failures)
    if tells:
        told.append((beside_table(run.failures), beside_note(run.failures)))
    if run.useful is not None and (tells or run.useful.seen_95 is not None):
        told.append((useful_table(run.useful), useful_note(run.useful)))
    if run.believed is not None and run.believed.num_deaths:
        told.append((believed_table(run.believed), "`outlast plan --from-run` says what that would change."))
    return told


def run_data(run: RunBeside) -> dict[str, object]:
    """The same for a program."""
    return {
        "predicted": beside_data(run.failures),
        "useful_time": useful_data(run.useful) if run.useful is not None else None,
        "believed": believed_data(run.believed) if run.believed is not None else None,
    }
