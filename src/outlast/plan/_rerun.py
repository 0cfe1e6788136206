"""Re-plan from a run's journal: what was believed beside what was seen, and the plan that follows.

Invariant: the belief is the policies' own `Belief`, updated by the run's failures; a run that saw none keeps its prior.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from outlast.core import reliability as rel
from outlast.core.policy import Belief, ClassPrior, IntervalPolicy, IntervalState

from ._answer import Answer, Table, duration, significant
from .traces._journal import RunJournal, open_journal

__all__ = ["Observed", "belief_from_run", "observe_run", "predicted_beside_observed", "rerun_answer"]

_PRIOR_HOST_H = 1000.0
"""Without a plan: one failure per 1,000 machine-hours, worth half a failure of evidence (Jeffreys' weight)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """A run so far: seconds, replicas, failures by cause, mean seconds from notice to work, mean seconds a step."""

    seconds: float
    num_replicas: int
    failures: dict[str, int]
    recovery_s: float
    detect_s: float
    step_s: float
    accounts_s: dict[str, float]


def observe_run(journal: RunJournal) -> Observed:
    """The figures of a journal that a plan needs; 0 where the run has none yet."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    return Observed(
        seconds=journal.span_s(),
        num_replicas=journal.num_hosts(),
        failures=dict(Counter(kind for _, _, kind, _ in journal.failures())),
        recovery_s=mean(journal.down_s),
        detect_s=mean(journal.detect_s),
        step_s=mean(journal.step_s),
        accounts_s=journal.seconds,
    )


def belief_from_run(seen: Observed, prior: Belief | None = None) -> Belief:
    """The posterior after the run; causes that the prior does not know are added with the default prior."""
    default = ClassPrior(rate=1 / (_PRIOR_HOST_H * 3600), weight=0.5)
    names = tuple(seen.failures) or ("failure",)
    belief = prior or Belief.from_priors(dict.fromkeys(names, default))
    for name, num in seen.failures.items():
        if name in belief.classes:
            belief = belief.observe(name, num)
    return belief.expose(seen.seconds * seen.num_replicas)


def predicted_beside_observed(
    seen: Observed, prior: Belief | None = None
) -> list[tuple[str, float, int, float, float]]:
    """Per class: (name, failures the prior predicted for this run, failures seen, 95 % low and high of the prediction).

    The interval is the prior's predictive (negative binomial): what one run of this length can show.
    """
    before = prior or belief_from_run(
        Observed(
            seconds=0.0,
            num_replicas=seen.num_replicas,
            failures=dict.fromkeys(seen.failures, 0),
            recovery_s=0.0,
            detect_s=0.0,
            step_s=0.0,
            accounts_s={},
        )
    )
    exposure = seen.seconds * seen.num_replicas
    rows = []
    for k, name in enumerate(before.classes):
        posterior = rel.gamma_poisson(0, 0, prior_alpha=float(before.alpha[k]), prior_beta=before.beta_s[k])
        low, high = (float(x) for x in posterior.predictive(exposure, [0.025, 0.975]))
        rows.append((name, posterior.mean * exposure, seen.failures.get(name, 0), low, high))
    return rows


def rerun_answer(path: str, write_s: float) -> Answer:
    """What a run's journal says, and the interval that its own policy would choose now for a write of `write_s`."""
    seen = observe_run(open_journal(path))
    belief = belief_from_run(seen)
    decision = IntervalPolicy().decide(belief, IntervalState(machines=float(seen.num_replicas), write_s=write_s))
    rows = tuple(
        (
            name,
            significant(predicted),
            str(num),
            f"{low:.0f} to {high:.0f}" + ("" if low <= num <= high else "  SURPRISE"),
        )
        for name, predicted, num, low, high in predicted_beside_observed(seen)
    )
    tables = (
        Table(
            title="Failures, predicted beside observed",
            columns=("class", "predicted", "seen", "95 % predictive"),
            rows=rows,
        ),
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
        "predicted": [
            {"class": n, "predicted": p, "seen": s, "low": lo, "high": hi}
            for n, p, s, lo, hi in predicted_beside_observed(seen)
        ],
        "accounts_s": seen.accounts_s,
    }
    note = f"Prior: one failure per {_PRIOR_HOST_H:g} machine-hours and class, worth half a failure."
    total = sum(seen.failures.values())
    title = f"{path}: {duration(seen.seconds)}, {seen.num_replicas} replicas, {total} failures"
    return Answer(title=title, tables=tables, data=data, notes=(note,))
