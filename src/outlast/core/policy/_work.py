"""How many microbatches each member gets where they are not equally fast (protocol, 35).

One object decides in the run and for the simulator's mixed hardware. Bits depend on no share, so work may follow speed.
Invariant: each member has one microbatch at least; shares change only where that makes a step a tenth shorter, and go
back to even ones for a twentieth.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.errors import ConfigError

__all__ = ["WorkDecision", "WorkPolicy", "WorkState", "longest_s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkState:
    """Microbatches of each member where all are equally fast, and those that they have now: () if these are even, or of
    other members."""

    even: Sequence[int]
    now: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkDecision:
    """Microbatches of each member; () for as even as they go."""

    work: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkPolicy:
    """worth: other shares are taken where a step is expected to take at most so much of what it does.

    back: and even ones in place of other shares. Whole microbatches often leave little between the two: who is measured
    now a little faster, now a little slower would have them change in every window.
    """

    worth: float = 0.9
    back: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.worth <= self.back <= 1:
            raise ConfigError(f"worth {self.worth}, back {self.back}", remedy="0 < worth <= back <= 1")

    def decide(self, belief: Sequence[float], state: WorkState) -> WorkDecision:
        """`belief`: seconds that a microbatch takes each member, 0 of whom nothing is known, who counts as the
        median."""
        known = [leaf_s for leaf_s in belief if leaf_s > 0.0]
        plain, num_leaves = tuple(state.even), sum(state.even)
        if not known or num_leaves < len(belief):
            return WorkDecision(work=())
        usual_s = statistics.median(known)
        each = [leaf_s or usual_s for leaf_s in belief]
        have = tuple(state.now) if len(state.now) == len(each) and sum(state.now) == num_leaves else plain
        best = _least(each, num_leaves)
        if longest_s(best, each) > self.worth * longest_s(have, each):
            best = have
        # Fewer sums stand for even shares: of new ones they are taken where nothing is lost by it.
        least = self.back if best == have != plain else 1.0
        return WorkDecision(work=() if longest_s(plain, each) <= least * longest_s(best, each) else best)


def longest_s(work: Sequence[int], leaf_s: Sequence[float]) -> float:
    """How long the slowest computes."""
    return max((n * each for n, each in zip(work, leaf_s, strict=True)), default=0.0)


def _least(each: Sequence[float], num_leaves: int) -> tuple[int, ...]:
    """One for each, and the next always to whom would then be through first: the least longest time."""
    work = [1] * len(each)
    queue = [(2 * leaf_s, index) for index, leaf_s in enumerate(each)]
    heapq.heapify(queue)
    for _ in range(num_leaves - len(each)):
        _, index = queue[0]
        work[index] += 1
        heapq.heapreplace(queue, ((work[index] + 1) * each[index], index))
    return tuple(work)
