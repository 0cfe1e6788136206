"""When to save next, decided again whenever something is learnt: from failures, costs, the loss, and what is left.

Role: `next_save_s` and `Losses` (`_hazard.py`, whose waste `benchmarks/interval.py` holds against fixed intervals) at
run time. What loses work is the loss of a whole fleet; deaths of replicas that others outlast count by the small share
that redundancy does not mask. While the loss is out of its band, going back is likelier. Before anything was measured a
save is due at once: it measures what one costs. Pure: times are passed in (seconds, one monotonic clock); what it
returns says why.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from outlast.core.policy._bands import Band
from outlast.core.policy._belief import Belief, ClassPrior
from outlast.core.policy._hazard import Losses, next_save_s

__all__ = ["Pacer", "SaveDecision"]

_DAY_S = 86_400.0
_REPLICA_PRIOR = ClassPrior(rate=6.5 / 1000 / _DAY_S)  # 6.5 failures per 1,000 node-days (arXiv 2410.21680)
_FLEET_PRIOR_S = 7 * _DAY_S  # mean time between losses of the whole fleet, before any was seen
_UNMASKED = 0.05  # share of replica deaths that survivors do not outlast
_REWIND_S = 900.0  # mean time to a rewind while the loss is out of its band
_CALM = 16  # so many losses inside the band in a row end that
_LEAST_COST_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveDecision:
    """`interval_s` from one save's begin to the next (inf: none before the end), `mtbr_s` the mean time between losses
    that the hazard of now stands for, and why."""

    interval_s: float
    mtbr_s: float
    reason: str


class Pacer:
    """Says when the next save is due. `min_s`: never more often. `now_s`: when training begins."""

    def __init__(self, now_s: float, *, min_s: float, num_replicas: int) -> None:
        self._losses = Losses(prior_s=_FLEET_PRIOR_S)
        self._replicas = Belief.from_priors({"replica": _REPLICA_PRIOR})
        self._min_s, self._machines = min_s, num_replicas
        self._exposed_s = self._last_s = self._loss_s = now_s
        self._failed_s: float | None = None
        self._blocked_s = self._durable_s = 0.0
        self._measured = False
        self._num_failed = 0
        self._band = Band()
        self._outside: deque[bool] = deque(maxlen=_CALM)
        self._ends_s = math.inf

    # --- what is learnt ------------------------------------------------------------------------------------------
    def running(self, now_s: float, machines: int) -> None:
        """So many replicas train from now on."""
        self._replicas = self._replicas.expose(max(0.0, now_s - self._exposed_s) * self._machines)
        self._exposed_s, self._machines = now_s, max(1, machines)

    def died(self, now_s: float, *, fleet: bool) -> None:
        """A replica died, or (`fleet`) the last one that held the state."""
        if fleet:
            self._losses.observe(now_s - self._loss_s)
            self._loss_s = now_s
        else:
            self._replicas = self._replicas.observe("replica")
        self._failed_s = now_s

    def loss(self, value: float) -> None:
        """A step's loss."""
        reading, self._band = self._band.read(value)
        self._outside.append(reading.finding in ("spike", "nonfinite"))

    def began(self, now_s: float) -> None:
        """A save was taken now."""
        self._last_s = now_s

    def saved(self, blocked_s: float, durable_s: float, *, ends_s: float = math.inf) -> None:
        """A save was published: what it cost, and when the loop will end."""
        self._blocked_s, self._durable_s, self._measured, self._num_failed = blocked_s, durable_s, True, 0
        self._ends_s = ends_s

    def failed(self) -> None:
        """A save came to nothing: the next one is tried later and later, but not later than it would be due."""
        self._num_failed += 1

    @property
    def _since_s(self) -> float:
        """From when on work would be lost: the last save, or the loss after it, which took that work already."""
        return max(self._last_s, self._loss_s)

    # --- what follows --------------------------------------------------------------------------------------------
    def decide(self, now_s: float) -> SaveDecision:
        """The interval as of now."""
        age_s = max(0.0, now_s - self._loss_s)
        extra = _UNMASKED * self._replicas.rate(0) * self._machines if self._machines > 1 else 0.0
        unstable = any(self._outside)
        extra += 1.0 / _REWIND_S if unstable else 0.0
        cost_s = max(self._blocked_s, _LEAST_COST_S)
        interval_s = next_save_s(
            self._losses, age_s=max(1.0, self._since_s - self._loss_s), cost_s=cost_s,
            least_s=max(self._min_s, self._durable_s), extra=extra, left_s=max(1.0, self._ends_s - self._since_s),
        )  # fmt: skip
        mtbr_s = 1.0 / (extra + self._losses.course(age_s).at(max(1.0, age_s)))
        reasons = [f"a loss is expected every {mtbr_s:.3g} s", f"a save holds training up for {cost_s:.3g} s"]
        if self._failed_s is not None:
            reasons.append(f"the last failure was {now_s - self._failed_s:.3g} s ago")
        if unstable:
            reasons.append("the loss is out of its band")
        if self._num_failed:
            interval_s = min(interval_s, self._min_s * 2.0**self._num_failed)
            reasons.append(f"the last {self._num_failed} came to nothing")
        elif not self._measured:
            interval_s = self._min_s
            reasons.append("the first save measures what one costs")
        if interval_s == math.inf:
            reasons.append(f"the loop ends in {self._ends_s - now_s:.3g} s, and saves then")
        return SaveDecision(interval_s=interval_s, mtbr_s=mtbr_s, reason="; ".join(reasons))

    def due_s(self, now_s: float) -> float:
        """Seconds from now to the next save; 0 or less: now. inf where the end of the loop comes first."""
        return self._since_s + self.decide(now_s).interval_s - now_s
