"""How many microbatches each member gets where they are not equally fast (protocol, 35).

Bits depend on no share, so work may follow speed. Shares are ranges in the members' order, of one microbatch at least;
they change where that makes a step a tenth shorter at least, and go back to even for a twentieth. Pure.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Mapping, Sequence

from outlast.core.protocol.tree import shares

__all__ = ["BACK", "WORTH", "even", "longest_s", "ranges_of", "shares_by_speed"]

WORTH = 0.9
"""Other shares are taken where a step is expected to take at most so much of what it does."""
BACK = 0.95
"""And even ones in place of other shares. Whole microbatches often leave little between the two: who is measured now a
little faster, now a little slower would have them change in every window."""


def even(num_members: int, num_leaves: int) -> tuple[int, ...]:
    """Microbatches of each member where all are equally fast."""
    return tuple(hi - lo for lo, hi in shares(num_members, num_leaves))


def ranges_of(work: Sequence[int], num_members: int, num_leaves: int) -> tuple[tuple[int, int], ...]:
    """Each member's range, where it has so many; what does not fit the view is as even as it goes."""
    if len(work) != num_members or sum(work) != num_leaves or min(work, default=0) < 0:
        return shares(num_members, num_leaves)
    edges = list(itertools.accumulate(work, initial=0))
    return tuple(itertools.pairwise(edges))


def longest_s(work: Sequence[int], leaf_s: Sequence[float]) -> float:
    """How long the slowest computes."""
    return max((n * each for n, each in zip(work, leaf_s, strict=True)), default=0.0)


def shares_by_speed(
    members: Sequence[str], leaf_s: Mapping[str, float], num_leaves: int, now: Sequence[int] = ()
) -> tuple[int, ...]:
    """Microbatches of each member; () for as even as they go. `leaf_s`: seconds that a microbatch takes a member; of
    whom nothing is known it is the median. `now`: the shares that these members have, () if they are even, or new."""
    known = [leaf_s[name] for name in members if leaf_s.get(name, 0.0) > 0.0]
    if not known or num_leaves < len(members):
        return ()
    usual_s = statistics.median(known)
    each = [leaf_s.get(name, 0.0) or usual_s for name in members]
    plain = even(len(members), num_leaves)
    have = tuple(now) if len(now) == len(members) and sum(now) == num_leaves else plain
    best = _least(each, num_leaves)
    if longest_s(best, each) > WORTH * longest_s(have, each):
        best = have
    # Fewer sums stand for even shares: of new ones they are taken where nothing is lost by it.
    least = BACK if best == have != plain else 1.0
    return () if longest_s(plain, each) <= least * longest_s(best, each) else best


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
