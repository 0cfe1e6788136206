"""The exchange in two levels: through shared memory within a host, over torch.distributed between hosts (protocol, 33).

Members of a host read each other's sums where they lie. Each of them adds those of its lane up to the few sums of the
tree that stand for the whole host, and only these cross the network, once; what the other hosts reduced comes back once
a host as well, and is shared in memory. So a host sends and takes what it would in a ring all-reduce of hosts, however
many members it has. All members carry, none leads: a death is a death like any other, and a host whose members die down
to one sends the same. The tree is that of one host, so are the bits.

Which bucket is sent, reduced, brought and gathered when: `core/protocol/step/host_order.py`. Who carries what:
`core/protocol/host_cuts.py`. Robust rules, audits and replicas of several ranks take `c10d_plane.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.protocol import Node, schedule
from outlast.core.protocol.host_cuts import HostCuts, Span, host_nodes, overlap, together
from outlast.core.protocol.step.host_order import Awaited, HostOrder
from outlast.core.protocol.tree import within
from outlast.runtime.exchange._c10d_transfers import Points
from outlast.runtime.exchange.c10d_plane import NetworkPlane
from outlast.runtime.exchange.plane import Enter, ExchangeTask, Reduction, reduce_and_note
from outlast.runtime.exchange.slots import OUTCOME, Memory
from outlast.runtime.host.environment import Environment
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import Reduced, SumsReady
from outlast.tensors import Layout, reduce_slice

__all__ = ["HostPlane"]


class HostPlane(NetworkPlane):
    """Exchanges buckets in two levels: one sum of each host crosses the network. `peers`: memory of the members that
    are on this host; `places`: where each member is, in the view's order."""

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        mine: Memory,
        peers: dict[str, Memory],
        out: list[Tensor],
        enter: Enter,
        env: Environment,
        places: Sequence[str],
    ) -> None:
        super().__init__(mesh, layout, mine, out, enter, env, None, "")
        idle = frozenset(index for index, name in enumerate(self.members) if name in mesh.view.relieved)
        self.cuts = cuts = HostCuts(together(places), idle)
        self.host = cuts.host_of(self.index)
        here = cuts.hosts[self.host]
        self.near = [self.members[index] for index in here if index != self.index]
        self._memories = {index: peers[self.members[index]] for index in here if index != self.index} | {
            self.index: mine
        }
        num, idle, turns = cuts.num_fine, cuts.idle_fine, cuts.turns(len(layout.buckets))
        self._fine = [bucket.slices(num, idle, turn) for bucket, turn in zip(layout.buckets, turns, strict=True)]
        self.ranges = [tuple(cuts.owned(fine, index) for index in range(len(self.members))) for fine in self._fine]
        self._added: dict[tuple[int, Node], Tensor] = {}  # my lane's sums of my host: memory that late sends may read
        self._host_order = HostOrder(len(layout.buckets), self)
        self._nodes: list[list[Node]] = []

    # --- a step --------------------------------------------------------------------------------------------------
    def begin(self, task: ExchangeTask) -> None:
        """A new step."""
        super().begin(task)
        self._host_order = HostOrder(len(self.layout.buckets), self)
        self._nodes = host_nodes(self.cuts.hosts, task.nodes, task.num_leaves)
        here = [node for index in self.cuts.hosts[self.host] for node in task.nodes[index]]
        there = [node for host, nodes in enumerate(self._nodes) if host != self.host for node in nodes]
        self._schedule = list(schedule((*here, *there), task.num_leaves))

    def offer(self, bucket: int) -> None:
        """My sums of this bucket are final. Never waits; goes on with earlier buckets as far as it can."""
        task = self._now()
        self.enter(Phase.SCATTER, bucket)
        self.mesh.broadcast(SumsReady(task.step, bucket, task.slots))
        self._host_order.offer()

    def finish(self) -> Reduction:
        """Wait for the others, and do what follows. Raises ViewAbandoned when the view ends first."""
        for what, bucket in self._host_order.rest():
            phase = Phase.GATHERED if what in ("lane", "brought") else Phase.SCATTERED
            self.enter(phase, bucket)
            self._await(what, bucket, phase)
        return self._found

    def _await(self, what: Awaited, bucket: int, phase: Phase) -> None:
        step = self._now().step
        if what == "near":
            self.mesh.collect(SumsReady, step, bucket, phase, self.near)
        elif what == "all":
            self.mesh.collect(SumsReady, step, bucket, phase)
        elif what == "brought":
            self.mesh.collect(Reduced, step, bucket, phase, self.near)
        else:
            self.mesh.until(self._host_order.ready, self._late(bucket), phase)

    def _late(self, bucket: int) -> list[str]:
        offered = self.mesh.boxes[SumsReady, self._now().step, bucket]
        return [name for name in self.mesh.peers if name not in offered] or self.mesh.peers

    # --- what has come (`core/protocol/step/host_order.py`) --------------------------------------------------------
    def near_offered(self, bucket: int) -> bool:
        return self.mesh.has_all(SumsReady, self._now().step, bucket, self.near)

    def all_offered(self) -> bool:
        return self.mesh.has_all(SumsReady, self._now().step, 0)

    def sums_here(self, bucket: int) -> bool:
        return self._scattering[bucket].done.is_set()

    def lane_here(self, bucket: int) -> bool:
        return self._gathering[bucket].done.is_set()

    # --- sums of this host go to who reduces them -----------------------------------------------------------------
    def send(self, bucket: int) -> None:
        self.enter(Phase.REDUCE, bucket)
        parts, fine = self._near_parts(bucket), self._fine[bucket]
        pieces: list[list[Tensor]] = [[] for _ in self.members]
        sizes: list[list[int]] = [[] for _ in self.members]
        for host, others in self._far():
            lane = lo, _ = self.cuts.carried(fine, host, self.index)
            sums = [self._sum(bucket, parts, node, host, lane) for node in self._nodes[self.host]]
            for other in others:
                begin, end = overlap(lane, self.cuts.owned(fine, other))
                pieces[other] = [total[begin - lo : end - lo] for total in sums]
                begin, end = self._mine_of(fine, other)
                sizes[other] = [end - begin] * len(self._nodes[host])
        wires = self._points()
        self._scattering.append(wires.scatter(bucket, pieces, sizes, self.layout.buckets[bucket].dtype))

    def _far(self) -> list[tuple[int, tuple[int, ...]]]:
        """Other hosts, beginning with the next one, so that not everybody begins with the same."""
        hosts, num = self.cuts.hosts, len(self.cuts.hosts)
        return [((self.host + i) % num, hosts[(self.host + i) % num]) for i in range(1, num)]

    def _near_parts(self, bucket: int) -> dict[Node, Tensor]:
        """The sums of my host's members, where they lie."""
        task, offers = self._now(), self.mesh.boxes[SumsReady, self._now().step, bucket]
        parts: dict[Node, Tensor] = {}
        for index, memory in self._memories.items():
            slots = task.slots if index == self.index else offers[self.members[index]].slots
            for node, slot in zip(task.nodes[index], slots, strict=True):
                parts[node] = memory.flats(slot)[bucket]
        return parts

    def _sum(self, bucket: int, parts: dict[Node, Tensor], node: Node, host: int, lane: Span) -> Tensor:
        """One sum of my host's, of what I bring to another host."""
        (lo, hi), adds = lane, within(parts.keys(), node)
        if not adds:
            return parts[node][lo:hi]
        key = bucket * len(self.cuts.hosts) + host, node
        if key not in self._added:
            self._added[key] = torch.empty(hi - lo, dtype=self.layout.buckets[bucket].dtype)
        total = self._added[key]
        reduce_slice({n: part[lo:hi] for n, part in parts.items()}, adds, node, 1.0, total)
        return total

    def _mine_of(self, fine: Sequence[Span], other: int) -> Span:
        """The range of my slice that this member of another host brings, and takes home."""
        return overlap(self.cuts.carried(fine, self.host, other), self.cuts.owned(fine, self.index))

    def _points(self) -> Points:
        wires = self._ends()
        assert isinstance(wires, Points)
        return wires

    # --- my slice -----------------------------------------------------------------------------------------------------
    def reduce(self, bucket: int) -> None:
        task, fine = self._now(), self._fine[bucket]
        rows = self._scattering[bucket].result()
        self.enter(Phase.REDUCE, bucket)
        parts, target = self._near_parts(bucket), self.mine.flats(OUTCOME)[bucket]
        brought = [(self._mine_of(fine, other), host, other) for host, others in self._far() for other in others]
        brought = [row for row in brought if row[0][0] < row[0][1]]
        lo, hi = self.cuts.owned(fine, self.index)
        edges = sorted({lo, hi, *(edge for span, _, _ in brought for edge in span)})
        for begin, end in itertools.pairwise(edges):
            piece = {node: part[begin:end] for node, part in parts.items()}
            for (start, stop), host, other in brought:
                if start <= begin and end <= stop:
                    sums = zip(self._nodes[host], rows[other], strict=True)
                    piece |= {node: part[begin - start : end - start] for node, part in sums}
            for a, b, first in self.layout.buckets[bucket].stretches(begin, end):
                stretch = {node: part[a - begin : b - begin] for node, part in piece.items()}
                reduce_and_note(task, self._found, bucket, first, stretch, self._schedule, target[a:b])
        self.enter(Phase.GATHER, bucket)
        self._send_home(bucket, target)

    def _send_home(self, bucket: int, target: Tensor) -> None:
        fine, whole = self._fine[bucket], self.out[bucket]
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        for host, others in self._far():
            lane = self.cuts.carried(fine, host, self.index)
            for other in others:
                sends.append((target[slice(*self._mine_of(fine, other))], other))
                receives.append((whole[slice(*overlap(lane, self.cuts.owned(fine, other)))], other))
        wires = self._points()
        self._gathering[bucket] = wires.bring(bucket, receives, sends)
        wires.release(self._scattering[bucket])

    # --- the others' --------------------------------------------------------------------------------------------------
    def bring(self, bucket: int) -> None:
        """My lane is whole: my host may read it. What arrives goes into private memory first, where a late write of an
        abandoned exchange harms nobody (protocol, 14)."""
        self._gathering[bucket].result()
        for host, _ in self._far() if self.near else ():
            lo, hi = self.cuts.carried(self._fine[bucket], host, self.index)
            self.mine.flats(OUTCOME)[bucket][lo:hi].copy_(self.out[bucket][lo:hi])
        for name in self.near:
            self.mesh.send(name, Reduced(self._now().step, bucket))

    def gather(self, bucket: int) -> None:
        fine = self._fine[bucket]
        for index, memory in self._memories.items():
            hosts = [self.host] if index == self.index else range(len(self.cuts.hosts))  # the rest came to `out`
            for host in hosts:
                lo, hi = self.cuts.carried(fine, host, index)
                if hi > lo:
                    self.out[bucket][lo:hi].copy_(memory.flats(OUTCOME)[bucket][lo:hi])
