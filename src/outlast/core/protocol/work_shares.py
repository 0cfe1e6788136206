"""Shares of work as ranges of microbatches, in the members' order (protocol, 35).

How many each member gets where they are not equally fast is `core.policy.WorkPolicy`'s. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from outlast.core.protocol.tree import shares

__all__ = ["even", "ranges_of"]


def even(num_members: int, num_leaves: int) -> tuple[int, ...]:
    """Microbatches of each member where all are equally fast."""
    return tuple(hi - lo for lo, hi in shares(num_members, num_leaves))


def ranges_of(work: Sequence[int], num_members: int, num_leaves: int) -> tuple[tuple[int, int], ...]:
    """Each member's range, where it has so many; what does not fit the view is as even as it goes."""
    if len(work) != num_members or sum(work) != num_leaves or min(work, default=0) < 0:
        return shares(num_members, num_leaves)
    edges = list(itertools.accumulate(work, initial=0))
    return tuple(itertools.pairwise(edges))
