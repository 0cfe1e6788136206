"""What a run's failures say of what was believed: predicted beside observed, and the belief that follows.

Invariant: `outlast why` and `outlast plan --from-run` both answer from here, by the record that the coordinator decides
with, so all three agree to the last digit; plain numbers throughout, so that `why` stays instant (no numpy).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from outlast.core.events import AnyEvent
from outlast.core.policy import Believed, Losses, RunPrior, RunRecord

from .answers import Table
from .number_words import duration, share, significant
from .run_journal import RunJournal

__all__ = [
    "Beside", "Observed", "believed_data", "believed_table", "beside_data", "beside_note",
    "beside_table", "fold", "observe_run", "predicted_beside_observed", "predicted_counts", "record_of_events",
]  # fmt: skip

_PRIOR_NOTE = (
    "Prior: {replica} between deaths of a replica, {fleet} between losses of all, as the run itself begins with."
)

_Cell = tuple[float, float, float]
"""(share, shape, rate in seconds) of one of the Gammas that a prior mixes."""


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


def fold(events: Sequence[AnyEvent], prior: RunPrior | None = None) -> RunRecord:
    """The record that the run's coordinator decides with, from the journal."""
    record = RunRecord(prior=prior)
    for event in events:
        record.take(event)
    return record


def predicted_beside_observed(seen: Believed, prior: RunPrior | None = None) -> list[Beside]:
    """Deaths of replicas and losses of all: what the record's own prior predicted for so long, beside what was seen.

    The interval is the prior's predictive (negative binomial; for losses a mixture of them, as the prior is one of
    several rates): what one run of this length can show.
    """
    deaths, losses = _rates(prior)
    return [
        _beside("a replica dies", deaths, seen.exposed_s, seen.num_deaths),
        _beside("all work since a save is lost", losses, seen.watched_s, seen.num_losses),
    ]


def predicted_counts(seen: Believed, p: float, prior: RunPrior | None = None) -> tuple[float, float]:
    """How many deaths of replicas, and how many losses of all, one run of this length has at most with probability `p`,
    each by its own predictive distribution."""
    deaths, losses = _rates(prior)
    return _quantile(p, _odds(deaths, seen.exposed_s)), _quantile(p, _odds(losses, seen.watched_s))


def _rates(prior: RunPrior | None) -> tuple[Sequence[_Cell], Sequence[_Cell]]:
    """What the prior says of deaths of one replica, and of losses of all."""
    before = prior or RunPrior()
    replica = before.replica
    return [(1.0, replica.weight, replica.weight / replica.rate)], Losses(prior_s=before.fleet_s).rates()


def _odds(cells: Sequence[_Cell], exposure_s: float) -> list[_Cell]:
    return [(part, alpha, beta_s / (beta_s + exposure_s)) for part, alpha, beta_s in cells]


def _beside(name: str, cells: Sequence[_Cell], exposure_s: float, seen: int) -> Beside:
    mean = sum(part * alpha / beta_s for part, alpha, beta_s in cells) * exposure_s
    odds = _odds(cells, exposure_s)
    low, high = (_quantile(p, odds) for p in (0.025, 0.975))
    return Beside(name, mean, seen, low, high)


def record_of_events(events: Iterable[AnyEvent]) -> tuple[RunRecord, Believed] | None:
    """The record of these events, and what the run believes at the last of them; None before its first view has formed.
    All events give what the coordinator's record gives; of a long journal, whose progress is sampled, other last digits
    come out."""
    record, at_s = RunRecord(), 0.0
    for event in events:
        record.take(event)
        at_s = event.at_s
    return (record, record.believed(at_s)) if record.begun else None


def believed_table(seen: Believed) -> Table:
    """The belief and what the policies decide by it, for a reader."""
    return Table(
        title="What the run believes now, and what its policies choose by it",
        columns=("quantity", "value"),
        rows=(
            ("time between deaths of one replica", duration(1 / seen.death_rate_s)),
            ("time between losses of work", duration(seen.mtbr_s)),
            ("from one save to the next", duration(seen.interval_s)),
            ("spares worth holding", str(seen.num_spares)),
            ("microbatches worth computing twice", share(seen.audit_share)),
        ),
    )


def believed_data(seen: Believed) -> dict[str, object]:
    """The same for a program: as in `Believed`."""
    return asdict(seen)


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
    prior = RunPrior()
    said = _PRIOR_NOTE.format(replica=duration(1 / prior.replica.rate), fleet=duration(prior.fleet_s))
    return said if any(row.tells for row in rows) else f"{said} The run is too short to hold what was seen against it."


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


def _quantile(p: float, cells: Sequence[_Cell]) -> float:
    """The smallest n with P(N <= n) >= p, where P(N <= n) = sum of share * I_odds(alpha, n + 1); odds in (0, 1]."""

    def below(n: int) -> float:
        return sum(part * _beta_share(odds, alpha, n + 1) for part, alpha, odds in cells)

    low, high = -1, 1
    while below(high) < p and high < 2**50:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if below(middle) >= p else (middle, high)
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
