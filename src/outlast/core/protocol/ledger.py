"""Where the time of training went, from the times of commits: each second once, whoever measured it.

A member measures every step by its own clock, from its last commit to this one, and divides that by use (`StepTime`).
All members measure the same steps, a few milliseconds apart; `Ledger` takes each moment from whoever tells it first and
lays the spans end to end. Between steps of which some are missing lies a gap, and it is told as unexplained. One
between two steps that follow each other is that of members' clocks where it is no longer than the step itself; a longer
one held all up, as where all are stopped when some have committed a step and others have yet to. Pure; all clocks are
one host's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

__all__ = ["Ledger", "Span", "StepTime"]

_CLIPPED = ("recovery", "stalled", "lost", "checkpoint", "degraded", "productive")
"""What an overlap with a span that is counted already is taken from, in this order."""
_GAPS = 16  # the newest, for who has yet to tell of them


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """One step as one member measured it: `took_s` until its commit at `end_s`. The seconds in between that were no
    work of this step: `held_s` by a save, `stalled_s` beyond what steps usually take (in `phase` for the longest),
    `outage_s` by a change of the view, `redone_s` for microbatches of the dead. `members`: in the view that made it.
    `first`: the first commit after a view had formed."""

    step: int
    end_s: float
    took_s: float
    held_s: float = 0.0
    stalled_s: float = 0.0
    outage_s: float = 0.0
    redone_s: float = 0.0
    phase: int = 0
    members: int = 0
    first: bool = False

    def seconds(self, wanted: int = 0) -> dict[str, float]:
        """By the account that they belong to; they sum to `took_s`. `wanted`: replicas that the run is to have, whose
        share of the step's own time is degraded where they were missing; 0: as many as there were."""
        parts = {
            "checkpoint": self.held_s, "stalled": self.stalled_s, "recovery": self.outage_s, "lost": self.redone_s,
        }  # fmt: skip
        own_s = self.took_s - sum(parts.values())
        missing_s = own_s * max(0, wanted - self.members) / wanted if wanted else 0.0
        return {"productive": own_s - missing_s, "degraded": missing_s, **parts}


@dataclass(slots=True)
class Span:
    """Steps `first` up to, not including, `committed`, one after the other until `until_s`; their seconds by use."""

    first: int
    committed: int
    until_s: float
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, parts: dict[str, float]) -> None:
        for name, value in parts.items():
            if value > 0:
                self.seconds[name] = self.seconds.get(name, 0.0) + value


class Ledger:
    """Counts which steps all members of a view have committed. `committed`, `until_s`: what an earlier coordinator had
    counted. `patience_s`: how long a step that is told before the one in front of it waits for that one, which another
    member may be about to tell; so does a joiner's first step, which took it no time that it knows of, for others who
    made it too. `wanted`: replicas that the run is to have now, as `StepTime.seconds` takes it."""

    def __init__(self, committed: int = 0, until_s: float = 0.0, *, patience_s: float = 0.0) -> None:
        self.committed, self.until_s, self.patience_s, self.wanted = committed, until_s, patience_s, 0
        self._newest = (until_s, until_s)  # of the newest step: when who told it began it, and when anybody had made it
        self._spans: list[Span] = []
        self._early: dict[int, StepTime] = {}
        self._held_up: deque[tuple[float, float]] = deque(maxlen=_GAPS)  # that no member has explained yet

    def take(self, time: StepTime, now_s: float) -> list[tuple[float, float]]:
        """Count the step if it is news, and those that waited for it: (the commit before it, by whoever made that one
        first, its commit) of each. The same step told by another member began before the commit that is counted; a step
        done anew after a loss began after all of them."""
        began_s, made_s = self._newest
        if time.step == self.committed - 1 and time.took_s and began_s < time.end_s < made_s:
            self._newest = began_s, time.end_s  # its teller was not the first to make it, but to tell it
        if self.until_s and (time.step > self.committed or not time.took_s):
            known = self._early.get(time.step)
            if known is None or not known.took_s:
                self._early[time.step] = time
            return self.settle(now_s)
        news = [self._count(time)] if self._is_news(time) else []
        return news + self.settle(now_s)

    def settle(self, now_s: float, *, last: bool = False) -> list[tuple[float, float]]:
        """Count what waited long enough, or (`last`) all that waits."""
        news = []
        for step in sorted(self._early):
            time = self._early[step]
            waits = step > self.committed or not (time.took_s or step < self.committed)
            if waits and not last and now_s - time.end_s <= self.patience_s:
                break
            del self._early[step]
            if self._is_news(time):
                news.append(self._count(time))
        return news

    def _is_news(self, time: StepTime) -> bool:
        anew = time.took_s > 0 and time.end_s - time.took_s >= self.until_s
        return time.end_s > self.until_s and (time.step >= self.committed or anew)

    def _count(self, time: StepTime) -> tuple[float, float]:
        before_s, begin_s, (_, made_s) = self.until_s, time.end_s - time.took_s, self._newest
        span = self._span_for(time.step)
        gap_s = begin_s - before_s if before_s else 0.0
        if gap_s > 0:
            span.add(self._of_gap(time, gap_s))
        span.add(_clipped(time.seconds(self.wanted), max(0.0, -gap_s)))
        span.committed = self.committed = time.step + 1
        span.until_s = self.until_s = time.end_s
        self._newest = begin_s, time.end_s
        return min(made_s, begin_s) if before_s else begin_s, time.end_s

    def _of_gap(self, time: StepTime, gap_s: float) -> dict[str, float]:
        """By use, the time between what is counted and this step."""
        if time.first:
            return {"recovery": gap_s}
        if time.step != self.committed:
            return {"unexplained": gap_s}
        apart_s = min(gap_s, time.took_s or gap_s)
        if gap_s > apart_s:
            self._held_up.append((self.until_s, self.until_s + gap_s))
        return {"productive": apart_s, "stalled": gap_s - apart_s}

    def explains(self, time: StepTime) -> bool:
        """Whether a step that a member was held up in, and that is no news, is why nothing was counted for a while. Of
        each while that is said once."""
        for gap in self._held_up:
            begin_s, end_s = gap
            if min(end_s, time.end_s) - max(begin_s, time.end_s - time.took_s) > (end_s - begin_s) / 2:
                self._held_up.remove(gap)
                return True
        return False

    def drain(self) -> list[Span]:
        """What was counted since the last call; a new span begins where steps are done anew."""
        spans, self._spans = self._spans, []
        return spans

    def _span_for(self, step: int) -> Span:
        if not self._spans or step < self.committed:
            self._spans.append(Span(step, step, self.until_s))
        return self._spans[-1]


def _clipped(parts: dict[str, float], excess_s: float) -> dict[str, float]:
    left = dict(parts)
    for name in _CLIPPED:
        cut = min(max(0.0, left[name]), excess_s)
        left[name] -= cut
        excess_s -= cut
    return left
