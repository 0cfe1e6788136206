"""What a run's failures say of what was believed: predicted beside observed, and the belief that follows.

Invariant: `outlast why` and `outlast plan --from-run` both answer from here, so they agree; plain numbers throughout,
so that `why` stays instant (no numpy). The belief is the policies' own `Belief`; a run that saw no failure keeps its
prior.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outlast.core.events import AnyEvent
from outlast.core.policy import Belief, ClassPrior

from ._answer import Table, significant
from ._journal import RunJournal

__all__ = [
    "Beside", "Observed", "belief_from_run", "beside_data", "beside_note", "beside_of_events",
    "beside_table", "observe_run", "predicted_beside_observed",
]  # fmt: skip

_PRIOR_HOST_H = 1000.0
"""Without a plan: one failure per 1,000 machine-hours, worth half a failure of evidence (Jeffreys' weight)."""

_PRIOR_NOTE = f"Prior: one failure per {_PRIOR_HOST_H:g} machine-hours and class, worth half a failure."


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """A run so far: seconds, replicas, failures by cause, mean seconds from notice to work, mean seconds a step."""

    seconds: float
    num_replicas: int
    failures: dict[str, int]
    recovery_s: float = 0.0
    detect_s: float = 0.0
    step_s: float = 0.0
    accounts_s: dict[str, float]


class Beside(NamedTuple):
    """One class: failures the prior predicted for this run, failures seen, 95 % low and high of the prediction."""

    name: str
    predicted: float
    seen: int
    low: float
    high: float

    @property
    def tells(self) -> bool:
        """Whether the run was long enough for a failure to be expected at all; else any number says nothing."""
        return self.high > 0

    @property
    def surprise(self) -> bool:
        """Whether what was seen lies outside what one run of this length can show."""
        return self.tells and not self.low <= self.seen <= self.high


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


def _prior(names: Sequence[str]) -> Belief:
    default = ClassPrior(rate=1 / (_PRIOR_HOST_H * 3600), weight=0.5)
    return Belief.from_priors(dict.fromkeys(names or ("failure",), default))


def belief_from_run(seen: Observed, prior: Belief | None = None) -> Belief:
    """The posterior after the run; without a prior, the default one for each cause seen."""
    belief = prior or _prior(tuple(seen.failures))
    for name, num in seen.failures.items():
        if name in belief.classes:
            belief = belief.observe(name, num)
    return belief.expose(seen.seconds * seen.num_replicas)


def predicted_beside_observed(seen: Observed, prior: Belief | None = None) -> list[Beside]:
    """Each class's prediction beside what was seen; a run without failures has the one class "failure".

    The interval is the prior's predictive (negative binomial): what one run of this length can show.
    """
    before = prior or _prior(tuple(seen.failures))
    exposure = seen.seconds * seen.num_replicas
    rows = []
    for name, weight, beta_s in zip(before.classes, before.alpha, before.beta_s, strict=True):
        alpha, odds = float(weight), beta_s / (beta_s + exposure)
        low, high = (_negative_binomial_quantile(p, alpha, odds) for p in (0.025, 0.975))
        rows.append(Beside(name, alpha * exposure / beta_s, seen.failures.get(name, 0), low, high))
    return rows


def beside_of_events(events: Sequence[AnyEvent]) -> list[Beside]:
    """The same from a run's events; none where the run has no event, or only one moment, yet."""
    if not events:
        return []
    seen = observe_run(RunJournal(list(events)))
    return predicted_beside_observed(seen) if seen.seconds > 0 else []


def beside_table(rows: Sequence[Beside]) -> Table:
    """The rows for a reader."""
    cells = tuple(
        (
            row.name,
            significant(row.predicted),
            str(row.seen),
            f"{row.low:.0f} to {row.high:.0f}{'  SURPRISE' if row.surprise else ''}" if row.tells else "-",
        )
        for row in rows
    )
    return Table(
        title="Failures, predicted beside observed",
        columns=("class", "predicted", "seen", "95 % predictive"),
        rows=cells,
    )


def beside_note(rows: Sequence[Beside]) -> str:
    """What the prediction rests on, and whether the run is long enough to hold anything against it."""
    if any(row.tells for row in rows):
        return _PRIOR_NOTE
    return f"{_PRIOR_NOTE} The run is too short to hold what was seen against it."


def beside_data(rows: Sequence[Beside]) -> list[dict[str, object]]:
    """The rows for a program."""
    return [
        {
            "class": row.name,
            "predicted": row.predicted,
            "seen": row.seen,
            "low": row.low,
            "high": row.high,
            "surprise": row.surprise,
        }
        for row in rows
    ]


def _negative_binomial_quantile(p: float, alpha: float, odds: float) -> float:
    """The smallest n with P(N <= n) >= p, where P(N <= n) = I_odds(alpha, n + 1); `odds` in (0, 1]."""
    low, high = -1, 1
    while _beta_share(odds, alpha, high + 1) < p and high < 2**50:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _beta_share(odds, alpha, middle + 1) >= p else (middle, high)
    return float(high)


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), x in [0, 1] (continued fraction, DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _beta_share(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    # the convergents A/B by their recurrence, scaled to B = 1 at each step
    num, num_before, den_before = 1.0, 1.0, 0.0
    for j in range(1, 100_000):
        m = j // 2
        term = (
            m * (b - m) * x / ((a + j - 1) * (a + j))
            if j % 2 == 0
            else -(a + m) * (a + b + m) * x / ((a + j - 1) * (a + j))
        )
        den = 1.0 + term * den_before
        num, num_before, den_before = (num + term * num_before) / den, num / den, 1.0 / den
        if abs(num - num_before * den) < 1e-15 * abs(num):
            break
    return front / num
