"""Re-plan from a run's journal: what was believed beside what was seen, what the policies choose now, and its worth.

Invariant: every figure of belief and choice comes from the record that the coordinator decides with, folded from the
same events.
"""

from __future__ import annotations

from typing import Any

from outlast.core.events import AnyEvent, RunStarted
from outlast.core.policy import Believed, RunRecord
from outlast.core.reliability.check import positive

from .answers import Answer, Table
from .beliefs_beside import (
    believed_data,
    believed_table,
    beside_data,
    beside_note,
    beside_table,
    fold,
    observe_run,
    predicted_beside_observed,
)
from .number_words import duration, share
from .run_journal import open_journal
from .useful_time import UsefulSeen, useful_beside, useful_data, useful_note, useful_table

__all__ = ["rerun_answer"]


def rerun_answer(path: str, useful: UsefulSeen, write_s: float | None = None) -> Answer:
    """What a run's journal says, and what the run itself chooses at its last event; with `write_s`, the interval that
    it would choose if a save held training up for so long. `useful`: what the run's accounts make of its useful
    time."""
    if write_s is not None:
        positive("--write-seconds", write_s)
    journal = open_journal(path)
    seen, record = observe_run(journal), fold(journal.events)
    if write_s is not None:
        record.saved(write_s, record.durable_s)
    believed = record.believed(journal.events[-1].at_s)
    rows = predicted_beside_observed(believed)
    beside = useful_beside(record, believed, journal.events, useful)
    changes = _changes(journal.events, record, believed)
    measured = Table(
        title="Measured",
        columns=("quantity", "value"),
        rows=(
            ("mean recovery so far", duration(seen.recovery_s)),
            ("mean time to notice", duration(seen.detect_s)),
            ("mean step", duration(seen.step_s)),
            ("a save holds training up for", duration(record.blocked_s)),
        ),
    )
    data = {
        "seconds": seen.seconds,
        "replicas": seen.num_replicas,
        "failures": seen.failures,
        "recovery_s": seen.recovery_s,
        "detect_s": seen.detect_s,
        "write_s": record.blocked_s,
        **believed_data(believed),
        "changes": changes,
        "predicted": beside_data(rows),
        "useful_time": useful_data(beside),
        "accounts_s": seen.accounts_s,
    }
    total = sum(seen.failures.values())
    title = f"{path}: {duration(seen.seconds)}, {seen.num_replicas} replicas, {total} failures"
    tables = (beside_table(rows), useful_table(beside), believed_table(believed), _change_table(changes), measured)
    return Answer(
        title=title, tables=tables, data=data, notes=(beside_note(rows), useful_note(beside), believed.reason)
    )


def _changes(events: list[AnyEvent], record: RunRecord, believed: Believed) -> list[dict[str, Any]]:
    """What was set by hand, what the policies would choose instead, and the share of time that this is worth."""
    config = next((event.config for event in events if isinstance(event, RunStarted)), {})
    every, step_s = _number(config.get("checkpoint_every")), record.step_s
    own_s = every * step_s if every else believed.interval_s
    held, audit = float(record.num_spares), config.get("audit")
    share_now = _number(audit) if _is_number(audit) else believed.audit_share
    return [
        {
            "choice": "seconds from one save to the next",
            "now": own_s,
            "chosen": believed.interval_s,
            "worth": _waste(own_s, record.blocked_s, believed.mtbr_s)
            - _waste(believed.interval_s, record.blocked_s, believed.mtbr_s),
        },
        {
            "choice": "spares",
            "now": held,
            "chosen": believed.num_spares,
            "worth": believed.death_rate_s * record.replaced_s if believed.num_spares > held else 0.0,
        },
        {
            "choice": "share of microbatches computed twice",
            "now": share_now,
            "chosen": believed.audit_share,
            "worth": (share_now - believed.audit_share) / (1 + share_now),
        },
    ]


def _waste(interval_s: float, write_s: float, mtbr_s: float) -> float:
    """Share of time that saves take, and that is lost, to first order; without a save until the end only the latter."""
    if interval_s in (0.0, float("inf")):
        return 0.0
    return write_s / interval_s + interval_s / (2 * mtbr_s)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0


def _change_table(changes: list[dict[str, Any]]) -> Table:
    rows = tuple((c["choice"], f"{c['now']:.4g}", f"{c['chosen']:.4g}", share(c["worth"])) for c in changes)
    return Table(
        title="What it would change", columns=("choice", "now", "chosen", "share of time that is worth"), rows=rows
    )
