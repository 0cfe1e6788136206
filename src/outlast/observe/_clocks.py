"""The three clocks of a run, with their intervals: how often something failed, stood still, was lost.

Role: counts over exposure. Pure, plain numbers (no numpy). Terms: MTBF, anything failed; MTBI, training stood still
for it; MTBR, steps were rolled back. They are never mixed: a fault that nobody waited for counts in the first only.
Source: Garwood (1936) for the exact interval of a Poisson mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import msgspec

from outlast.core import events as ev

__all__ = ["Clock", "clocks", "poisson_interval"]

_LEAVES = frozenset({"finished", "left"})
_MANY = 2000


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """One clock: `count` events in `exposure_s` of wall time. `mean_s` is None before the first; `low_s` and `high_s`
    are the 95 % interval of the mean time between them, `high_s` None where there is no upper bound."""

    name: str
    meaning: str
    count: int
    exposure_s: float
    mean_s: float | None
    low_s: float
    high_s: float | None


def clocks(events: Iterable[ev.AnyEvent], exposure_s: float) -> list[Clock]:
    """MTBF, MTBI and MTBR of a run that has gone on for `exposure_s`."""
    failed, still, lost = 0, set[tuple[int, ...]](), 0
    told: set[str] = set()
    alone: list[ev.ReplicaExited] = []
    for event in events:
        match event:
            case ev.Recovery():
                failed += 1
                told.add(event.replica)
                if event.downtime_s > 0:
                    still.add(tuple(event.view))
                lost += event.lost_steps > 0
            case ev.ReplicaExited() if event.cause not in _LEAVES:
                alone.append(event)
            case ev.FleetGone():
                lost += 1
            case ev.VerdictReached() if event.action == "rewind":
                lost += 1
    failed += sum(event.replica not in told for event in alone)
    return [
        _clock("MTBF", "anything failed", failed, exposure_s),
        _clock("MTBI", "training stood still for it", len(still), exposure_s),
        _clock("MTBR", "steps were rolled back", lost, exposure_s),
    ]


def _clock(name: str, meaning: str, count: int, exposure_s: float) -> Clock:
    low, high = poisson_interval(count)
    return Clock(
        name=name,
        meaning=meaning,
        count=count,
        exposure_s=exposure_s,
        mean_s=exposure_s / count if count else None,
        low_s=exposure_s / high,
        high_s=exposure_s / low if low > 0 else None,
    )


@functools.lru_cache(maxsize=1024)
def poisson_interval(count: int) -> tuple[float, float]:
    """The exact 95 % confidence interval of a Poisson mean of which `count` were seen."""
    if count > _MANY:  # Wilson and Hilferty's cube root, good to six digits by then
        return tuple(  # type: ignore[return-value]
            n * (1 - 1 / (9 * n) + sign * 1.959963984540054 / (3 * math.sqrt(n))) ** 3
            for n, sign in ((count, -1), (count + 1, 1))
        )
    low = _mean_at(lambda mean: 1 - _at_most(count - 1, mean), 0.025, count) if count else 0.0
    return low, _mean_at(lambda mean: 1 - _at_most(count, mean), 0.975, count)


def _mean_at(rising: Callable[[float], float], level: float, count: int) -> float:
    """Where a function that rises from 0 to 1 reaches `level`."""
    low, high = 0.0, count + 10.0 + 10.0 * math.sqrt(count + 1)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < level else (low, middle)
    return (low + high) / 2


def _at_most(count: int, mean: float) -> float:
    """P(N <= count) of a Poisson variable."""
    if mean <= 0:
        return 1.0
    log = math.log(mean)
    return math.fsum(math.exp(k * log - mean - math.lgamma(k + 1)) for k in range(count + 1))
