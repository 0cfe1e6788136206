"""The exchange with a robust rule in place of the mean, through shared memory (`c10d_row_plane.py`: over a network).

The same steps and bytes as the mean's: all-to-all of slices, reduce, all-gather. Coordinate rules reduce bucket by
bucket under the backward. Distance rules keep their slices of the rows until everybody's part of the Gram matrix of
all buckets is there (n² floats for each node of the tree over blocks that a member covers), then weight and gather.
After the gather a drawn share of other members' slices is computed again from the same rows: `Robust.accused`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.protocol import RowsNote, leaves_of
from outlast.core.protocol.slices import checker_of
from outlast.core.protocol.step.exchange_order import ExchangeOrder
from outlast.runtime.exchange.plane import Enter, ExchangeTask, Onward, Reduction, SharedPlane
from outlast.runtime.exchange.robust_rows import Robust
from outlast.runtime.exchange.slots import OUTCOME, Memory
from outlast.runtime.transport.connections import decoded
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import Extra, Reduced, SumsReady
from outlast.runtime.view.rounds import GRAMS
from outlast.tensors import Layout, look

__all__ = ["OneRank", "RowSteps", "SharedRowPlane", "same_bits", "with_momentum", "without_momentum"]


Tamper = Callable[[int, Tensor], None]


class OneRank:
    """The other ranks of a replica that has none. A lead's tells `parts` of all ranks, and tells these what was chosen;
    a rank that `follows` asks its lead."""

    follows = False

    def parts(self, mine: list[bytes]) -> list[list[bytes]]:
        """Gram parts of each of the replica's ranks: one for each group of parameters."""
        return [mine]

    def tell(self, totals: list[bytes]) -> None:
        """The whole matrices, one a group."""

    def ask(self, mine: list[bytes]) -> list[bytes]:
        """The whole matrices, from the lead."""
        raise AssertionError("a replica of one rank follows nobody")


class RowSteps:
    """What both planes share. A plane has reduced bucket b once its slice is written and noted."""

    mesh: Mesh
    layout: Layout
    robust: Robust
    out: list[Tensor]
    enter: Enter
    members: tuple[str, ...]
    index: int
    ranges: list[tuple[tuple[int, int], ...]]
    tamper: Tamper | None = None  # a lying reducer, in tests
    ranks = OneRank()
    sent_bytes: int = 0  # handed over for other members, in all steps of the view; through shared memory Grams alone

    def start(self, task: ExchangeTask) -> Reduction:
        """A new step's rules; returns its empty findings."""
        self.mesh.forget(task.step)
        self.robust.begin(task.step, (node for nodes in task.nodes for node in nodes))
        self._leaves = {name: leaves_of(nodes) for name, nodes in zip(self.members, task.nodes, strict=True)}
        return Reduction(norms={})

    def note(self, task: ExchangeTask, found: Reduction, bucket: int, target: Tensor) -> None:
        """My slice of the bucket is final: fingerprint and norms, as of the mean's."""
        lo, hi = self.ranges[bucket][self.index]
        if hi == lo:
            return
        if self.tamper is not None:
            self.tamper(bucket, target)
        if task.on_reduced is not None:
            task.on_reduced(bucket, target)
        for begin, end, first in self.layout.buckets[bucket].stretches(lo, hi):
            found.note(first, look(target[begin - lo : end - lo], first, squares=task.with_norms))

    def decide(self, task: ExchangeTask) -> list[int]:
        """The distance rules' choices, once all their buckets are kept; returns these. One message for all groups."""
        asked = [index for index, group in enumerate(self.robust.groups) if group.rule.needs_gram]
        if not asked:
            return []
        mine, ranks = [self.robust.grams(group) for group in asked], self.ranks
        totals = ranks.ask(mine) if ranks.follows else self._totals(task, asked, ranks.parts(mine))
        for group, total in zip(asked, totals, strict=True):
            self.robust.select(group, total, self._leaves)
        ranks.tell(totals)
        return [bucket for group in asked for bucket in self.robust.groups[group].buckets]

    def _totals(self, task: ExchangeTask, asked: list[int], parts: list[list[bytes]]) -> list[bytes]:
        """Each group's matrix. `parts`: of all ranks of this replica."""
        body = msgspec.msgpack.encode(parts)
        self.mesh.broadcast(Extra(task.step, GRAMS, body))
        self.sent_bytes += len(body) * len(self.mesh.peers)
        box = self.mesh.collect(Extra, task.step, GRAMS, Phase.SCATTERED)
        said = [body if name == self.mesh.me else box[name].body for name in self.members]
        told = [decoded(name, each, list[list[bytes]]) for name, each in zip(self.members, said, strict=True)]
        return [self.robust.total(g, [rank[n] for each in told for rank in each]) for n, g in enumerate(asked)]

    def differs(self, bucket: int, again: Tensor, lo: int, hi: int) -> bool:
        """Whether a slice that was gathered has other bits. What lies between blocks of shards is no part of it."""
        runs, out = self.layout.buckets[bucket].stretches(lo, hi), self.out[bucket]
        return any(not same_bits(again[begin - lo : end - lo], out[begin:end]) for begin, end, _ in runs)

    def look_again(self, slices: Sequence[tuple[int, str]]) -> dict[tuple[int, str], tuple[int, int]]:
        """Two numbers for each slice (bucket, reducer), which differ if it is false; nothing where I cannot tell."""
        told = {key: self.false(key[0], self.members.index(key[1])) for key in slices}
        return {key: (0, int(false)) for key, false in told.items() if false is not None}

    def false(self, bucket: int, reducer: int) -> bool | None:
        """Whether the slice that I gathered from this member is not what the rows give; None: I cannot tell."""
        raise NotImplementedError

    def refuse_bad_rows(self, notes: Sequence[RowsNote], leaves: Mapping[str, Sequence[int]]) -> None:
        """See `Robust`."""
        self.robust.refuse_bad_rows(notes, leaves)

    def checker(self, step: int, bucket: int, reducer: int) -> int:
        """The member that would check this slice: anyone but who reduced it."""
        return checker_of(self.robust.seed, step, bucket, reducer, len(self.members))


class SharedRowPlane(RowSteps, SharedPlane):
    """Members of one host. `draw`: which slices I check is known to me alone."""

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        mine: Memory,
        peers: dict[str, Memory],
        out: list[Tensor],
        enter: Enter,
        robust: Robust,
        draw: random.Random,
        onward: Onward | None = None,
    ) -> None:
        SharedPlane.__init__(self, mesh, layout, mine, peers, out, enter, onward)
        self.robust, self._draw = robust, draw

    def begin(self, task: ExchangeTask) -> None:
        """A new step; sums may still be under way."""
        self._found, self._task = self.start(task), task
        self._order = ExchangeOrder(len(self.layout.buckets), self)

    def offer(self, bucket: int) -> None:
        """My sums of this bucket are final. Never waits; reduces earlier buckets whose sums have all arrived."""
        task = self._now()
        self.enter(Phase.SCATTER, bucket)
        self.mesh.broadcast(SumsReady(task.step, bucket, task.slots))
        self.reduce_before(bucket)

    def _target(self, bucket: int) -> Tensor:
        lo, hi = self.ranges[bucket][self.index]
        return (self.out if len(self.members) == 1 else self.mine.flats(OUTCOME))[bucket][lo:hi]

    def reduce(self, bucket: int) -> None:
        """My slice; of a rule by distance its rows are kept until all buckets are there."""
        self.enter(Phase.REDUCE, bucket)
        lo, hi = self.ranges[bucket][self.index]
        if self.robust.settings.momentum:
            self.robust.move(bucket, self._parts(bucket, 0, self.layout.buckets[bucket].numel))
        if self.robust.rule_of(bucket).needs_gram:
            if hi > lo:
                self.robust.keep(bucket, self._parts(bucket, lo, hi), lo, hi)
            return
        if hi > lo:
            self.robust.reduce(bucket, self._parts(bucket, lo, hi), lo, hi, self._target(bucket))
        self._offer_slice(bucket)

    def choose(self) -> None:
        """What rules by distance take of the rows that were kept."""
        for bucket in self.decide(self._now()):
            self._combine(bucket)

    def _combine(self, bucket: int) -> None:
        lo, hi = self.ranges[bucket][self.index]
        if hi > lo:
            self.robust.combine(bucket, lo, hi, self._target(bucket))
        self._offer_slice(bucket)

    def _offer_slice(self, bucket: int) -> None:
        self.note(self._now(), self._found, bucket, self._target(bucket))
        self.enter(Phase.GATHER, bucket)
        self.mesh.broadcast(Reduced(self._now().step, bucket))

    # --- checks ----------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """A drawn share of others' slices, from the same rows."""
        task, share = self._now(), self.robust.settings.check_share
        if not share or len(self.members) == 1:
            return
        for bucket, ranges in enumerate(self.ranges):
            for reducer, (lo, hi) in enumerate(ranges):
                mine = reducer != self.index and self.checker(task.step, bucket, reducer) == self.index
                if mine and hi > lo and self._draw.random() < share and self.false(bucket, reducer):
                    self.robust.accused.add((bucket, self.members[reducer]))

    def false(self, bucket: int, reducer: int) -> bool | None:
        """Whether the slice that I gathered from this member is not what the rows give; None: I cannot tell."""
        lo, hi = self.ranges[bucket][reducer]
        if hi == lo:
            return False
        return self.differs(bucket, self.robust.again(bucket, self._parts(bucket, lo, hi), lo, hi), lo, hi)

    # --- hand-over: the rows' momentum is part of the outcome ---------------------------------------------------------
    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None:
        """Does what the plane of the mean does."""
        super().give(step, with_momentum(self.robust, meta), to)

    def take(self, step: int, donor: str) -> bytes:
        """Does what the plane of the mean does."""
        return without_momentum(self.robust, donor, super().take(step, donor))


def with_momentum(robust: Robust, meta: bytes) -> bytes:
    """An outcome's meta, with the rows' momentum after it behind it."""
    flats = robust.memory.committed()
    return msgspec.msgpack.encode((meta, [_bytes(flat) for flat in flats])) if flats else meta


def without_momentum(robust: Robust, donor: str, body: bytes) -> bytes:
    """Inverse: the momentum goes to where that of the step in progress lies, until `applied`."""
    flats = robust.memory.incoming()
    if not flats:
        return body
    meta, raw = decoded(donor, body, tuple[bytes, list[bytes]])
    for flat, data in zip(flats, raw, strict=True):
        flat.copy_(torch.frombuffer(bytearray(data), dtype=flat.dtype))
    return meta


def _bytes(flat: Tensor) -> bytes:
    return flat.cpu().view(torch.uint8).numpy().tobytes()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also tells 0.0 from -0.0, and a NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
