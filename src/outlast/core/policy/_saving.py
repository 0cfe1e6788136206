"""When to save next, decided again whenever something is learnt: from failures, costs, the loss, and what is left.

Role: `IntervalPolicy` and `Belief` at run time. Failures of replicas that others outlast lose nothing, so they count by
the small share that redundancy does not mask; the loss of a whole fleet counts fully. Both hazards have a shape below
one: real failures cluster, so soon after one the next is likelier. While the loss is out of its band, saves come twice
as often. No save is taken shortly before the end of the loop, which saves anyway. Pure: times are passed in (seconds,
one monotonic clock); what it returns says why.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from outlast.core.policy._belief import Belief, ClassPrior
from outlast.core.policy._interval import IntervalPolicy, IntervalState

__all__ = ["Pacer", "SaveDecision", "is_unstable"]

_DAY_S = 86_400.0
_REPLICA_PRIOR = ClassPrior(rate=6.5 / 1000 / _DAY_S, weight=1.0, shape=0.7)  # 6.5 per 1,000 node-days (2410.21680)
_FLEET_PRIOR_S = 7 * _DAY_S  # mean time between losses of the whole fleet, before any was seen
_SHAPE = 0.7  # of the Weibull hazard between losses
_UNMASKED = 0.05  # share of replica deaths that survivors do not outlast
_SOONEST_S = 60.0  # the hazard just after a failure is taken as at this age: below one, the shape has no limit at 0
_WINDOW, _FEWEST, _BAND = 64, 8, 6.0
_FIRST_S = 30.0  # the first save of a run is early: it measures what a save costs


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveDecision:
    """`interval_s` from one save's begin to the next, `mtbr_s` the mean time between losses behind it, and why."""

    interval_s: float
    mtbr_s: float
    reason: str


def is_unstable(losses: deque[float]) -> bool:
    """Whether the newest loss is no number, or above the others' median by six of their median deviations."""
    if not losses or not math.isfinite(losses[-1]):
        return bool(losses)
    rest = [value for value in list(losses)[:-1] if math.isfinite(value)]
    if len(rest) < _FEWEST:
        return False
    middle = median(rest)
    spread = median(abs(value - middle) for value in rest)
    return losses[-1] > middle + _BAND * max(spread, 1e-3 * abs(middle), 1e-12)


class Pacer:
    """Says when the next save is due. `min_s`: never more often. `now_s`: when training begins."""

    def __init__(self, now_s: float, *, min_s: float, num_replicas: int) -> None:
        self._policy = IntervalPolicy(kind="exact", min_s=min_s)
        fleet = ClassPrior(rate=1.0 / (_FLEET_PRIOR_S * num_replicas), weight=1.0, shape=_SHAPE)
        self._belief = Belief.from_priors({"replica": _REPLICA_PRIOR, "fleet": fleet})
        self._min_s, self._machines = min_s, num_replicas
        self._exposed_s = self._began_s = self._last_s = now_s
        self._failed_s: float | None = None
        self._blocked_s = self._durable_s = 0.0
        self._measured = False
        self._num_failed = 0
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._ends_s = math.inf

    # --- what is learnt ------------------------------------------------------------------------------------------
    def running(self, now_s: float, machines: int) -> None:
        """So many replicas trained since the last call."""
        self._belief = self._belief.expose(max(0.0, now_s - self._exposed_s) * self._machines)
        self._exposed_s, self._machines = now_s, max(1, machines)

    def died(self, now_s: float, *, fleet: bool) -> None:
        """A replica died, or (`fleet`) the last one that held the state."""
        self._belief = self._belief.observe("fleet" if fleet else "replica")
        self._failed_s = now_s

    def loss(self, value: float) -> None:
        """A step's loss."""
        self._losses.append(value)

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

    # --- what follows --------------------------------------------------------------------------------------------
    def decide(self, now_s: float) -> SaveDecision:
        """The interval as of now."""
        weights = (_UNMASKED if self._machines > 1 else 1.0, 1.0)
        since_s = max(_SOONEST_S, now_s - (self._began_s if self._failed_s is None else self._failed_s))
        hazard = sum(w * self._belief.hazard(k, self._machines, since_s) for k, w in enumerate(weights))
        mtbr_s = 1.0 / hazard
        now = Belief.from_priors({"all": ClassPrior(rate=hazard)})
        cost = IntervalState(machines=1, write_s=max(self._blocked_s, 1e-3), durable_s=self._durable_s)
        interval_s = float(self._policy.decide(now, cost).interval_s)
        reasons = [f"a loss is expected every {mtbr_s:.3g} s", f"a save holds training up for {cost.write_s:.3g} s"]
        if self._failed_s is not None:
            reasons.append(f"the last failure was {now_s - self._failed_s:.3g} s ago")
        if not self._measured:
            interval_s = min(interval_s, max(self._min_s, _FIRST_S))
            reasons.append("the first save measures what one costs")
        if is_unstable(self._losses):
            interval_s = max(self._min_s, self._durable_s, interval_s / 2)
            reasons.append("the loss is out of its band")
        if self._num_failed:
            interval_s = min(interval_s, self._min_s * 2.0**self._num_failed)
            reasons.append(f"the last {self._num_failed} came to nothing")
        return SaveDecision(interval_s=interval_s, mtbr_s=mtbr_s, reason="; ".join(reasons))

    def due_s(self, now_s: float) -> float:
        """Seconds from now to the next save; 0 or less: now. inf where the end of the loop comes first."""
        decision = self.decide(now_s)
        due = self._last_s + decision.interval_s
        return math.inf if due + decision.interval_s / 4 >= self._ends_s else due - now_s
