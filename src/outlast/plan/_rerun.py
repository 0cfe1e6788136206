"""Re-plan from a run's journal: what was believed beside what was seen, and the plan that follows.

Invariant: the belief is the policies' own `Belief`, updated by the run's failures (`_beside.py`).
"""

from __future__ import annotations

from outlast.core.policy import IntervalPolicy, IntervalState
from outlast.core.reliability._check import positive

from ._answer import Answer, Table, duration
from ._beside import belief_from_run, beside_data, beside_note, beside_table, observe_run, predicted_beside_observed
from ._journal import open_journal

__all__ = ["rerun_answer"]


def rerun_answer(path: str, write_s: float) -> Answer:
    """What a run's journal says, and the interval that its own policy would choose now for a write of `write_s`."""
    positive("--write-seconds", write_s)
    seen = observe_run(open_journal(path))
    belief = belief_from_run(seen)
    decision = IntervalPolicy().decide(belief, IntervalState(machines=float(seen.num_replicas), write_s=write_s))
    rows = predicted_beside_observed(seen)
    tables = (
        beside_table(rows),
        Table(
            title="The plan from here",
            columns=("quantity", "value"),
            rows=(
                ("believed MTBF of the whole run", duration(decision.mtbr_s)),
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
        "mtbf_s": decision.mtbr_s,
        "interval_s": decision.interval_s,
        "write_s": write_s,
        "predicted": beside_data(rows),
        "accounts_s": seen.accounts_s,
    }
    total = sum(seen.failures.values())
    title = f"{path}: {duration(seen.seconds)}, {seen.num_replicas} replicas, {total} failures"
    return Answer(title=title, tables=tables, data=data, notes=(beside_note(rows),))
