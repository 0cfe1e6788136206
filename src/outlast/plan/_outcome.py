"""What a batch of simulated runs shows: accounts, clocks, intervals.

Invariant: the six accounts add up to the wall time in every replication (ProtocolViolation otherwise). It summarises;
it draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.errors import ProtocolViolation

from ._source import Floats, Ints

__all__ = ["ACCOUNTS", "Estimate", "Outcome", "estimate"]

ACCOUNTS = ("productive", "checkpoint", "lost", "recovery", "degraded", "idle")


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over replications: its 95 % confidence interval, and where 95 % of single runs fall."""

    mean: float
    low: float
    high: float
    run_low: float
    run_high: float


def estimate(values: Floats) -> Estimate:
    """Mean with normal 95 % interval, and the 2.5 % and 97.5 % quantiles of single runs."""
    mean = float(values.mean())
    half = 1.959963985 * float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")
    low, high = (float(x) for x in np.quantile(values, [0.025, 0.975]))
    return Estimate(mean=mean, low=mean - half, high=mean + half, run_low=low, run_high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Results of n replications of `wall_s` seconds.

    accounts_s: (6, n) in the order of ACCOUNTS; failures: (classes, n); rollbacks, planned, masked, waits: (n,) events;
    spares: (n,) held, on average over the run; efficiency: failure-free share of progress (not part of ETTR).
    """

    wall_s: float
    efficiency: float
    classes: tuple[str, ...]
    accounts_s: Floats
    failures: Ints
    rollbacks: Ints
    planned: Ints
    masked: Ints
    waits: Ints
    interval_s: Floats
    spares: Floats
    seed: int

    def __post_init__(self) -> None:
        gap = float(np.abs(self.accounts_s.sum(axis=0) - self.wall_s).max())
        least = float(self.accounts_s.min())
        if gap > 1e-9 * self.wall_s + 1e-6 or least < -1e-6:
            raise ProtocolViolation(
                f"accounts miss the wall time by {gap:g} s, least {least:g} s", where=f"seed {self.seed}"
            )

    @property
    def num_runs(self) -> int:
        return int(self.accounts_s.shape[1])

    def ettr(self) -> Estimate:
        """Productive over wall time."""
        return estimate(self.accounts_s[0] / self.wall_s)

    def breakdown(self) -> dict[str, float]:
        """Mean share of wall time per account."""
        shares = self.accounts_s.mean(axis=1) / self.wall_s
        return dict(zip(ACCOUNTS, (float(x) for x in shares), strict=True))

    def clocks_h(self) -> dict[str, float]:
        """Hours. MTBF: anything fails; MTBI: the job stops, rolled back or as planned; MTBR: work is rolled back."""
        hours = self.wall_s / 3600 * self.num_runs
        hardware = sum(int(self.failures[k].sum()) for k, name in enumerate(self.classes) if name != "false alarm")
        stops = int(self.rollbacks.sum() + self.planned.sum())
        counts = {"mtbf_h": hardware, "mtbi_h": stops, "mtbr_h": int(self.rollbacks.sum())}
        return {name: hours / count if count else float("inf") for name, count in counts.items()}

    def mtbr_interval_h(self) -> tuple[float, float, float]:
        """(mean, low, high) of MTBR in hours: exact Poisson interval over all replications pooled."""
        from outlast.core.reliability import count_interval

        total, hours = int(self.rollbacks.sum()), self.wall_s / 3600 * self.num_runs
        low, high = count_interval(total)
        return hours / max(total, 1e-12), hours / high, hours / low if low else float("inf")

    def failures_by_class(self) -> dict[str, Estimate]:
        """Failures a run, per class."""
        return {name: estimate(self.failures[k].astype(np.float64)) for k, name in enumerate(self.classes)}


def merge(parts: list[Outcome]) -> Outcome:
    """One outcome of several blocks."""
    first = parts[0]
    return Outcome(
        wall_s=first.wall_s,
        efficiency=first.efficiency,
        classes=first.classes,
        seed=first.seed,
        accounts_s=np.concatenate([p.accounts_s for p in parts], axis=1),
        failures=np.concatenate([p.failures for p in parts], axis=1),
        rollbacks=np.concatenate([p.rollbacks for p in parts]),
        planned=np.concatenate([p.planned for p in parts]),
        masked=np.concatenate([p.masked for p in parts]),
        waits=np.concatenate([p.waits for p in parts]),
        interval_s=np.concatenate([p.interval_s for p in parts]),
        spares=np.concatenate([p.spares for p in parts]),
    )
