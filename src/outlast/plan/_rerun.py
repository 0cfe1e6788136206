"""Re-plan from a run's journal: what was believed beside what was seen, and the plan that follows.

Invariant: rate and interval come from the record that the coordinator decides with, folded from the same events.
"""

from __future__ import annotations

from outlast.core.policy import RunRecord
from outlast.core.reliability._check import positive

from ._answer import Answer, Table, duration
from ._beside import beside_data, beside_note, beside_table, observe_run, predicted_beside_observed
from ._journal import open_journal

__all__ = ["rerun_answer"]


def rerun_answer(path: str, write_s: float | None = None) -> Answer:
    """What a run's journal says, and the interval that the run itself chooses at its last event; with `write_s`, the
    one that it would choose if a save held training up for so long."""
    if write_s is not None:
        positive("--write-seconds", write_s)
    journal = open_journal(path)
    seen = observe_run(journal)
    record = RunRecord()
    for event in journal.events:
        record.take(event)
    if write_s is not None:
        record.saved(write_s, record.durable_s)
    decision = record.saving(journal.events[-1].at_s)
    rows = predicted_beside_observed(seen)
    tables = (
        beside_table(rows),
        Table(
            title="The plan from here",
            columns=("quantity", "value"),
            rows=(
                ("believed mean time between losses of work", duration(decision.mtbr_s)),
                ("checkpoint interval", duration(decision.interval_s)),
                ("mean recovery so far", duration(seen.recovery_s)),
                ("mean time to notice", duration(seen.detect_s)),
                ("mean step", duration(seen.step_s)),
            ),
        ),
    )
    data = {
        "seconds": seen.seconds,
        "replicas": seen.num_replicas,
        "failures": seen.failures,
        "recovery_s": seen.recovery_s,
        "detect_s": seen.detect_s,
        "mtbr_s": decision.mtbr_s,
        "interval_s": decision.interval_s,
        "write_s": record.blocked_s,
        "reason": decision.reason,
        "predicted": beside_data(rows),
        "accounts_s": seen.accounts_s,
    }
    total = sum(seen.failures.values())
    title = f"{path}: {duration(seen.seconds)}, {seen.num_replicas} replicas, {total} failures"
    return Answer(title=title, tables=tables, data=data, notes=(beside_note(rows),))
