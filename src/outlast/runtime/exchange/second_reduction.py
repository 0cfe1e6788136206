"""Is what a member reduced what the sums give? A second member reduces a drawn share of the slices once more (25).

The mean's counterpart of a rule's checked reducers: after the gather a member that is not the reducer computes the
slice again from the same sums; over a network, where it has none of others', it asks for them first (`c10d_plane.py`).
A difference holds the step: then everybody computes the slice, reducer and checker for the second time, which tells a
transient fault from a lasting one, and who was wrong by counting replicas (`core/protocol/slices.py`). The view is
left; sums survive, so the step is done again at the price of the exchange. Which slices are checked is drawn by the
checker alone, after they were reduced: a reducer cannot know.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from outlast.core.protocol.slices import checked_by

__all__ = ["Checks"]


class Checks:
    """What this replica checks. `share()`: of all slices, now; `always`: spans of elements of a bucket that are checked
    in every step."""

    def __init__(self, share: Callable[[], float], seed: int) -> None:
        self.share, self.seed = share, seed
        self.always: dict[int, list[tuple[int, int]]] = {}
        self.num_checked = 0
        self._draw = random.Random()  # seeded by the system: nobody else can know it

    @property
    def active(self) -> bool:
        """Whether anybody may check anything in this step: the same on all members."""
        return bool(self.share() or self.always)

    def due(self, step: int, ranges: Sequence[Sequence[tuple[int, int]]], me: int) -> Iterator[tuple[int, int]]:
        """(bucket, index of its reducer) of the slices that are mine to check in this step."""
        share, num_members = self.share(), len(ranges[0]) if ranges else 0
        if (not share and not self.always) or num_members < 2:
            return
        for bucket, slices in enumerate(ranges):
            reducer = checked_by(self.seed, step, bucket, me, num_members)
            lo, hi = slices[reducer]
            if hi == lo:
                continue
            watched = any(lo < end and start < hi for start, end in self.always.get(bucket, ()))
            if watched or self._draw.random() < share:
                self.num_checked += 1
                yield bucket, reducer
