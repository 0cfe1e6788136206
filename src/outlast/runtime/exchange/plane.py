"""The exchange: all-to-all of slices, reduce my slice by the fixed tree, all-gather. Through shared memory.

One `Plane` a view. Buckets are offered in one fixed order, under the backward; `finish` ends when every slice of every
bucket is in `out`. Each member writes only its own memory: partial sums before it offers them, its slices after all
members offered theirs (which proves that all have copied the last step's). See `c10d_plane.py` for the same over a
network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.protocol import Node, schedule
from outlast.core.protocol.step.exchange_order import ExchangeOrder
from outlast.runtime.exchange.second_reduction import Checks
from outlast.runtime.exchange.slots import OUTCOME, Memory
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import Hand, Reduced, SumsReady
from outlast.tensors import BLOCK, Bucket, Layout, Looked, combine, fingerprint, look, reduce_and_look, reduce_slice

__all__ = ["Onward", "Plane", "Reduction", "SharedPlane", "ExchangeTask", "print_of_slice", "reduce_and_note"]

Sent = dict[Node, tuple[str, bytes]]  # of each part of a slice: whose, and its blocks' fingerprints as made
Enter = Callable[[Phase, int], None]  # publish the phase and the bucket, and pass the fault point


class ExchangeTask(msgspec.Struct, kw_only=True):
    """One step's exchange. `nodes`: each member's partial sums in view order; `slots`: where mine lie."""

    step: int
    nodes: tuple[tuple[Node, ...], ...]
    slots: tuple[int, ...]
    num_leaves: int
    scale: float
    with_norms: bool
    on_scattered: Callable[[], None]
    sent: Callable[[Node, int, int], bytes] | None = None  # (node, slot, bucket): its blocks' fingerprints
    checks: Checks | None = None  # of what others reduce
    on_reduced: Callable[[int, Tensor], None] | None = None  # tests put wrong bits in


class Reduction(msgspec.Struct, kw_only=True):
    """What I found while reducing my slices: fingerprint, and sums of squares by block."""

    fingerprint: int = 0
    norms: dict[int, float] = {}
    others: tuple[tuple[int, int, float], ...] = ()  # of other ranks' lanes, partial trees
    unlike: set[str] = set()  # members whose sums were not what they fingerprinted
    false: dict[tuple[int, str], int] = {}  # (bucket, reducer): what I compute, where they reduced to something else

    def note(self, first: int, looked: Looked) -> None:
        """A slice of mine, as it goes out; `first`: number of its first block."""
        self.fingerprint = combine((self.fingerprint, looked.print))
        self.norms.update(enumerate(looked.squares, first))


def reduce_and_note(
    task: ExchangeTask,
    found: Reduction,
    bucket: int,
    first: int,
    parts: dict[Node, Tensor],
    schedule: list[Any],
    out: Tensor,
    sent: Sent | None = None,
) -> None:
    """out = the mean's slice, noted in `found`; `first`: number of its first block. `sent`: whose part each one is, and
    the fingerprints of its blocks as it was made: where it is another now, the step is held (protocol, 25)."""
    root, compare = (0, task.num_leaves), bool(sent)
    looked = reduce_and_look(parts, schedule, root, task.scale, out, first, squares=task.with_norms, compare=compare)
    found.unlike |= {name for node, (name, prints) in (sent or {}).items() if looked.parts[node] != prints}
    if task.on_reduced is not None:  # tests put wrong bits in before anybody looks
        task.on_reduced(bucket, out)
        looked = look(out, first, squares=task.with_norms)
    found.note(first, looked)


def print_of_slice(bucket: Bucket, values: Tensor, lo: int) -> int:
    """Return the fingerprint of the blocks in a slice that begins at element `lo`; what lies between blocks of shards
    counts nothing."""
    stretches = bucket.stretches(lo, lo + values.numel())
    return combine([fingerprint(values[begin - lo : end - lo], first) for begin, end, first in stretches])


class Plane(Protocol):
    """How gradients travel in one view."""

    def begin(self, task: ExchangeTask) -> None: ...
    def offer(self, bucket: int) -> None: ...
    def finish(self) -> Reduction: ...
    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None: ...
    def take(self, step: int, donor: str) -> bytes: ...
    def look_again(self, slices: Sequence[tuple[int, str]]) -> dict[tuple[int, str], tuple[int, int]]: ...
    def close(self) -> None: ...


class Onward(Protocol):
    """Copies an outcome on to a device from where its slices lie (`training/_straight_copies.py`)."""

    def begin(self, memories: Sequence[Memory]) -> None: ...
    def take(self, bucket: int, slices: Sequence[tuple[Memory, int, int]], out: Tensor) -> bool: ...
    def settle(self) -> None: ...
    def forget(self) -> None: ...


class SharedPlane:
    """Members of one host read each other's memory; the mesh says when. `onward`: what copies the outcome to where it
    is applied, if that is a device."""

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        mine: Memory,
        peers: dict[str, Memory],
        out: list[Tensor],
        enter: Enter,
        onward: Onward | None = None,
    ) -> None:
        self.mesh, self.layout, self.mine, self.peers, self.out, self.enter = mesh, layout, mine, peers, out, enter
        self.onward = onward
        self.members = mesh.view.members
        self.index = self.members.index(mesh.me)
        self.ranges = [bucket.slices(len(self.members)) for bucket in layout.buckets]
        self._task: ExchangeTask | None = None
        self._order = ExchangeOrder(len(layout.buckets), self)
        self._found = Reduction()
        self._said: list[tuple[bytes, ...]] = []  # of my sums, bucket by bucket

    def begin(self, task: ExchangeTask) -> None:
        """A new step; sums may still be under way."""
        self.mesh.forget(task.step)
        self._task, self._found = task, Reduction(norms={}, unlike=set(), false={})
        self._order, self._said = ExchangeOrder(len(self.layout.buckets), self), []
        flat_nodes = tuple(node for nodes in task.nodes for node in nodes)
        self._schedule = list(schedule(flat_nodes, task.num_leaves))

    def offer(self, bucket: int) -> None:
        """My sums of this bucket are final. Never waits; reduces earlier buckets whose sums have all arrived."""
        task = self._now()
        self.enter(Phase.SCATTER, bucket)
        self._said.append(self._own(bucket))
        self.mesh.broadcast(SumsReady(task.step, bucket, task.slots, self._said[bucket]))
        self.reduce_before(bucket)

    def reduce_before(self, bucket: int) -> None:
        """As far as sums have arrived."""
        order, step = self._order, self._now().step
        while order.reduces_before(bucket) and self.mesh.has_all(SumsReady, step, order.bucket):
            order.arrived()

    def finish(self) -> Reduction:
        """Wait for the others, and do what follows. Raises ViewAbandoned when the view ends first."""
        order, step = self._order, self._now().step
        if self.onward is not None:
            self.enter(Phase.SCATTERED, 0)  # a wait, as the others' sums are: a driver may take long over large slots
            # who is alone reduces into `out`, and nobody reads its slots
            self.onward.begin([self._memory(name) for name in self.members if len(self.members) > 1])
        try:
            while order.awaits is not None:
                kind, phase = (SumsReady, Phase.SCATTERED) if order.awaits == "sums" else (Reduced, Phase.GATHERED)
                self.enter(phase, order.bucket)
                self.mesh.collect(kind, step, order.bucket, phase)
                order.arrived()
        finally:
            self._settle()  # before anybody writes the outcome slots again, in the next step or in another view
        return self._found

    # --- the stages of the order (`core/protocol/step/exchange_order.py`) ----------------------------------------
    def scattered(self) -> None:
        self._now().on_scattered()

    def reduce(self, bucket: int) -> None:
        task = self._now()
        self.enter(Phase.REDUCE, bucket)
        lo, hi = self.ranges[bucket][self.index]
        alone = len(self.members) == 1
        target = (self.out if alone else self.mine.flats(OUTCOME))[bucket][lo:hi]
        for begin, end, first in self.layout.buckets[bucket].stretches(lo, hi):
            parts = self._parts(bucket, begin, end)
            sent = self._sent(bucket, begin, end) if task.sent is not None else None
            out = target[begin - lo : end - lo]
            reduce_and_note(task, self._found, bucket, first, parts, self._schedule, out, sent)
        self.enter(Phase.GATHER, bucket)
        self.mesh.broadcast(Reduced(task.step, bucket))

    def choose(self) -> None:
        """A mean has no choice."""

    def _parts(self, bucket: int, lo: int, hi: int) -> dict[Node, Tensor]:
        task = self._now()
        offers = self.mesh.boxes[SumsReady, task.step, bucket]
        parts: dict[Node, Tensor] = {}
        for name, nodes in zip(self.members, task.nodes, strict=True):
            memory, slots = self._memory(name), task.slots if name == self.mesh.me else offers[name].slots
            for node, slot in zip(nodes, slots, strict=True):
                parts[node] = memory.flats(slot)[bucket][lo:hi]
        return parts

    def _own(self, bucket: int) -> tuple[bytes, ...]:
        task = self._now()
        if task.sent is None:
            return ()
        rows = zip(task.nodes[self.index], task.slots, strict=True)
        return tuple(task.sent(node, slot, bucket) for node, slot in rows)

    def _sent(self, bucket: int, lo: int, hi: int) -> Sent:
        """The owner of each part of a slice, and what was said of its blocks when it was made."""
        task, offers = self._now(), self.mesh.boxes[SumsReady, self._now().step, bucket]
        first = self.layout.buckets[bucket].place(lo)
        blocks = slice(8 * first, 8 * (first - (lo - hi) // BLOCK))
        sent: Sent = {}
        for name, nodes in zip(self.members, task.nodes, strict=True):
            prints = self._said[bucket] if name == self.mesh.me else offers[name].prints
            sent |= {node: (name, row[blocks]) for node, row in zip(nodes, prints, strict=True)}
        return sent

    def gather(self, bucket: int) -> None:
        if len(self.members) == 1:
            return
        ranges, out = zip(self.members, self.ranges[bucket], strict=True), self.out[bucket]
        slices = [(self._memory(name), lo, hi) for name, (lo, hi) in ranges if hi > lo]
        if self.onward is None or not self.onward.take(bucket, slices, out):
            for memory, lo, hi in slices:
                out[lo:hi].copy_(memory.flats(OUTCOME)[bucket][lo:hi])
        if bucket + 1 == len(self.ranges):
            self._settle()  # checks read `out`

    def _memory(self, name: str) -> Memory:
        return self.mine if name == self.mesh.me else self.peers[name]

    def _settle(self) -> None:
        if self.onward is not None:
            self.onward.settle()

    # --- what others reduced -------------------------------------------------------------------------------------
    def check(self) -> None:
        task = self._now()
        if task.checks is None or len(self.members) == 1:
            return
        for bucket, reducer in task.checks.due(task.step, self.ranges, self.index):
            self.enter(Phase.REDUCE, bucket)
            gathered, mine = self._prints(bucket, reducer)
            if gathered != mine:
                self._found.false[bucket, self.members[reducer]] = mine

    def _prints(self, bucket: int, reducer: int) -> tuple[int, int]:
        lo, hi = self.ranges[bucket][reducer]
        gathered = self.out[bucket][lo:hi]
        again = torch.empty_like(gathered)
        parts, task = self._parts(bucket, lo, hi), self._now()
        reduce_slice(parts, self._schedule, (0, task.num_leaves), task.scale, again)
        if task.on_reduced is not None:
            task.on_reduced(bucket, again)
        layout = self.layout.buckets[bucket]
        return print_of_slice(layout, gathered, lo), print_of_slice(layout, again, lo)

    def look_again(self, slices: Sequence[tuple[int, str]]) -> dict[tuple[int, str], tuple[int, int]]:
        """Fingerprints of these slices (bucket, reducer): as I gathered them, and as I compute them now."""
        return {(bucket, name): self._prints(bucket, self.members.index(name)) for bucket, name in slices}

    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None:
        """Hand the step's outcome to members that are behind: through my outcome slot."""
        for own, out in zip(self.mine.flats(OUTCOME), self.out, strict=True):
            own.copy_(out)
        for name in to:
            self.mesh.send(name, Hand(step, meta))

    def take(self, step: int, donor: str) -> bytes:
        """Receive a step's outcome into `out`; returns its meta."""
        message = self.mesh.collect(Hand, step, 0, Phase.HAND_OVER_RECEIVE, [donor])[donor]
        for out, theirs in zip(self.out, self.peers[donor].flats(OUTCOME), strict=True):
            out.copy_(theirs)
        return bytes(message.meta)

    def close(self) -> None:
        """What was gathered and not applied counts no more; the next outcome may be handed to me, also as a spare."""
        if self.onward is not None:
            self.onward.forget()

    def _now(self) -> ExchangeTask:
        assert self._task is not None
        return self._task
