"""The exchange of the simulated world in two levels: members of a host read each other's memory (protocol, 33).

The order is `core/protocol/step/host_order.py`'s and the cuts are `core/protocol/host_cuts.py`'s, for the runtime too
(`runtime/exchange/host_plane.py`). Memory is read when it is used: who reads it too early, or too late, has what lies
there then. Nothing is audited here, as in the runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

from outlast.core.protocol import Exchange, Node
from outlast.core.protocol.host_cuts import HostCuts, Span, host_nodes, overlap, together
from outlast.core.protocol.step.effects import Act
from outlast.core.protocol.step.host_order import Awaited
from outlast.core.protocol.tree import within
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._surroundings import Owner

__all__ = ["HostExchange", "in_two_levels"]

_OFFERED, _SUMS, _HOME, _BROUGHT = "offered", "host sums", "home", "brought"
_KINDS: Mapping[Awaited, tuple[str, ...]] = {
    "near": (_OFFERED,), "all": (_OFFERED,), "sums": (_OFFERED, _SUMS), "lane": (_HOME,), "brought": (_BROUGHT,),
}  # fmt: skip
"""Who is late is who has yet to send one of these."""


def in_two_levels(places: Sequence[str]) -> bool:
    """Whether members at these places exchange in two levels: on several hosts, of which some have several of them."""
    return 1 < len(set(places)) < len(places)


@lru_cache(maxsize=256)
def _cut(hosts: tuple[tuple[int, ...], ...]) -> tuple[HostCuts, tuple[tuple[Span, ...], ...]]:
    """The cuts of a view, and each bucket's slices: whole blocks, and who gets one more turns."""
    cuts = HostCuts(hosts)
    num = cuts.num_fine
    edges = ([(algebra.BLOCKS * i + turn) // num for i in range(num + 1)] for turn in cuts.turns(algebra.BUCKETS))
    return cuts, tuple(tuple(itertools.pairwise(row)) for row in edges)


class HostExchange:
    """One exchange; its stages are `HostStages`. `places`: where each member is; `norms`: takes my blocks as they are
    reduced."""

    def __init__(
        self,
        owner: Owner,
        todo: Exchange,
        places: Sequence[str],
        norms: list[tuple[int, int]],
        scattered: Callable[[], None],
    ) -> None:
        self.owner, self.todo, self.scattered, self._norms = owner, todo, scattered, norms
        self.members = todo.view.members
        self.index = self.members.index(owner.name)
        self.cuts, self._fine = _cut(together(places))
        here = self.cuts.hosts[self.cuts.host_of(self.index)]
        self._near = [self.members[index] for index in here if index != self.index]
        self._far = [index for index in range(len(self.members)) if index not in here]
        self._sums = host_nodes(self.cuts.hosts, todo.nodes, owner.member.num_microbatches)  # of each host
        self._order = owner.world.variant.host_order(algebra.BUCKETS, self)
        self._rest: Iterator[tuple[Awaited, int]] | None = None
        self._waiting: tuple[Awaited, int] | None = None

    def exchange(self, _: Act) -> bool:
        """Go as far as possible; whether the gradient is whole. Raises ViewAbandoned."""
        mesh = self.owner.in_view()
        if self._rest is None:
            for bucket in range(algebra.BUCKETS):
                self._expect(bucket)
                mesh.broadcast((_OFFERED, self.todo.step, bucket), None)
                self._order.offer()
            self._rest = self._order.rest()
            self._next(self._rest)
        while self._waiting is not None:
            if not self._is_here(*self._waiting):
                return False
            self._next(self._rest)
        return True

    def _next(self, rest: Iterator[tuple[Awaited, int]]) -> None:
        self._waiting = next(rest, None)
        if self._waiting is not None:
            what, bucket = self._waiting
            self.owner.awaiting(*((kind, self.todo.step, bucket) for kind in _KINDS[what]))

    def _is_here(self, what: Awaited, bucket: int) -> bool:
        if what == "near":
            return self.near_offered(bucket)
        if what == "all":
            return self.all_offered()
        return self._whole(_BROUGHT, bucket) if what == "brought" else self._order.ready()

    def _expect(self, bucket: int) -> None:
        """From whom what comes: who carries nothing to me, or has no sums, sends me nothing."""
        expected, fine = self.owner.in_view().expected, self._fine[bucket]
        full = [i for i in self._far if self._sums[self.cuts.host_of(i)]]
        for kind, names in (
            (_SUMS, [self.members[i] for i in full if _filled(self._mine_of(fine, i))]),
            (_HOME, [self.members[i] for i in self._far if _filled(self._theirs_of(fine, i))]),
            (_BROUGHT, self._near),
        ):
            expected[kind, self.todo.step, bucket] = names

    # --- what has come -------------------------------------------------------------------------------------------
    def near_offered(self, bucket: int) -> bool:
        return self.owner.in_view().heard((_OFFERED, self.todo.step, bucket)) >= set(self._near)

    def all_offered(self) -> bool:
        return self._whole(_OFFERED, 0)

    def sums_here(self, bucket: int) -> bool:
        return self._whole(_SUMS, bucket)

    def lane_here(self, bucket: int) -> bool:
        return self._whole(_HOME, bucket)

    def _whole(self, kind: str, bucket: int) -> bool:
        return self.owner.in_view().whole((kind, self.todo.step, bucket))

    # --- the stages ----------------------------------------------------------------------------------------------
    def send(self, bucket: int) -> None:
        mesh, fine, base = self.owner.in_view(), self._fine[bucket], bucket * algebra.BLOCKS
        parts = self._near_parts()
        sums = [_added(parts, node) for node in self._sums[self.cuts.host_of(self.index)]]
        for other in self._far if sums else ():
            lo, hi = self._theirs_of(fine, other)
            if lo < hi:
                rows = [row[base + lo : base + hi] for row in sums]
                mesh.send(self.members[other], (_SUMS, self.todo.step, bucket), rows)

    def reduce(self, bucket: int) -> None:
        owner, fine, base = self.owner, self._fine[bucket], bucket * algebra.BLOCKS
        mesh, parts = owner.in_view(), self._near_parts()
        got = mesh.take((_SUMS, self.todo.step, bucket))
        lo, hi = self.cuts.owned(fine, self.index)
        for at in range(lo, hi):
            sums = {node: part[base + at] for node, part in parts.items()}
            for name, rows in got.items():
                other = self.members.index(name)
                begin, end = self._mine_of(fine, other)
                if begin <= at < end:
                    theirs = self._sums[self.cuts.host_of(other)]
                    sums |= {node: row[at - begin] for node, row in zip(theirs, rows, strict=True)}
            block = algebra.reduce_block(tuple(sums), list(sums.values()), owner.member.num_microbatches)
            owner.shown[base + at] = block
            self._norms.append((base + at, block))
        for other in self._far:
            begin, end = self._mine_of(fine, other)
            if begin < end:
                blocks = owner.shown[base + begin : base + end]
                mesh.send(self.members[other], (_HOME, self.todo.step, bucket), blocks)

    def bring(self, bucket: int) -> None:
        owner, mesh, base, key = self.owner, self.owner.in_view(), bucket * algebra.BLOCKS, (self.todo.step, bucket)
        for name, blocks in mesh.take((_HOME, *key)).items():
            lo, hi = self._theirs_of(self._fine[bucket], self.members.index(name))
            owner.out[base + lo : base + hi] = owner.shown[base + lo : base + hi] = blocks
        for name in self._near:
            mesh.send(name, (_BROUGHT, *key), None)

    def gather(self, bucket: int) -> None:
        base, fine, hosts = bucket * algebra.BLOCKS, self._fine[bucket], self.cuts.hosts
        for index in hosts[self.cuts.host_of(self.index)]:
            memory = self.owner.world.replicas[self.members[index]].shown
            for host in range(len(hosts)):
                lo, hi = self.cuts.carried(fine, host, index)
                self.owner.out[base + lo : base + hi] = memory[base + lo : base + hi]

    # --- who has what --------------------------------------------------------------------------------------------
    def _near_parts(self) -> dict[Node, algebra.Gradient]:
        """The sums of my host's members, as they lie there now."""
        parts: dict[Node, algebra.Gradient] = {}
        for index in self.cuts.hosts[self.cuts.host_of(self.index)]:
            sums = self.owner.world.replicas[self.members[index]].sums
            parts |= {node: sums.get(node) or algebra.EMPTY for node in self.todo.nodes[index]}
        return parts

    def _mine_of(self, fine: Sequence[Span], other: int) -> Span:
        """The blocks of my slice that this member of another host brings, and takes home."""
        mine = self.cuts.host_of(self.index)
        return overlap(self.cuts.carried(fine, mine, other), self.cuts.owned(fine, self.index))

    def _theirs_of(self, fine: Sequence[Span], other: int) -> Span:
        """The blocks of this member's slice that I bring, and take home."""
        theirs = self.cuts.host_of(other)
        return overlap(self.cuts.carried(fine, theirs, self.index), self.cuts.owned(fine, other))


def _filled(span: Span) -> bool:
    return span[0] < span[1]


def _added(parts: Mapping[Node, algebra.Gradient], node: Node) -> algebra.Gradient:
    """One sum of my host's."""
    sums = dict(parts)
    for left, right, parent in within(parts.keys(), node):
        sums[parent] = algebra.add(sums[left], sums[right])
    return sums[node]
