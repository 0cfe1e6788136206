"""The exchange in two levels: which member of a host carries what between hosts (protocol, 33).

Every host reduces an equal part of each bucket, whatever its number of members, as every host's link carries the same.
That part is cut twice: among the host's own members, who reduce it, and among the members of each other host, who bring
their host's sums of it and take the result home. Both cuts fall on the edges of one fine cut, so that what two members
exchange is one stretch. Pure; the same on every member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.core.protocol.tree import Node, cover, leaves_of

__all__ = ["HostCuts", "Span", "host_nodes", "overlap", "together"]

Span = tuple[int, int]


def together(places: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Indices of the members of each host, hosts in the order of their first member."""
    found: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        found.setdefault(place, []).append(index)
    return tuple(map(tuple, found.values()))


def overlap(one: Span, other: Span) -> Span:
    """What is in both; empty, and at the first's edge, where nothing is."""
    lo, hi = max(one[0], other[0]), min(one[1], other[1])
    return (lo, hi) if lo < hi else (one[0], one[0])


def host_nodes(hosts: Sequence[Sequence[int]], nodes: Sequence[Sequence[Node]], num_leaves: int) -> list[list[Node]]:
    """The fewest sums that stand for all that a host's members hold, host by host. `nodes`: of each member."""
    return [list(cover(leaves_of(n for i in host for n in nodes[i]), num_leaves)) for host in hosts]


@dataclass(frozen=True, slots=True)
class HostCuts:
    """Cuts buckets for one view: first among hosts, then among each host's members. `hosts`: as `together` has them;
    `idle`: members that reduce nothing (a host, if all of it are)."""

    hosts: tuple[tuple[int, ...], ...]
    idle: frozenset[int] = frozenset()

    @property
    def num_fine(self) -> int:
        """Into how many slices a bucket is cut: as many for each host."""
        return len(self.hosts) * self._each

    @property
    def idle_fine(self) -> frozenset[int]:
        """Those of them that are empty."""
        each = self._each
        idle = [h for h, host in enumerate(self.hosts) if self.idle.issuperset(host)]
        found = (each * h + i for h in idle for i in range(each))
        return frozenset() if len(idle) == len(self.hosts) else frozenset(found)

    def turns(self, num_buckets: int) -> list[int]:
        """By how much each bucket's cut is turned, so that blocks that do not come out even fall to every member of a
        host in time, also where hosts are of unequal size: by about 5/8 of a turn more for each, through all slices."""
        num = self.num_fine - len(self.idle_fine)
        step = next(step for step in range(num * 5 // 8, num + 2) if math.gcd(step, num) == 1)
        return [bucket * step % num for bucket in range(num_buckets)]

    @property
    def _each(self) -> int:
        return math.lcm(*map(len, self.hosts))

    def host_of(self, member: int) -> int:
        """The number of the member's host."""
        return next(h for h, host in enumerate(self.hosts) if member in host)

    def carried(self, fine: Sequence[Span], host: int, member: int) -> Span:
        """The span that a member reduces of the part that `host` reduces, if it is of that host; else what it brings
        and takes home for its own. `fine`: the bucket's slices."""
        mine = self.hosts[self.host_of(member)]
        each, place = self._each, mine.index(member)
        lo, hi = (each * host + each * at // len(mine) for at in (place, place + 1))
        return fine[lo][0], fine[hi - 1][1]

    def owned(self, fine: Sequence[Span], member: int) -> Span:
        """What this member reduces."""
        return self.carried(fine, self.host_of(member), member)
