"""The exchange with a robust rule over torch.distributed: what `row_plane.py` does through shared memory.

One all-to-all and one all-gather a bucket, as for the mean. What is computed again by a second member travels to it in
the same all-to-all, so the sample is drawn by the run's seed and a reducer can know it: this finds broken reducers, and
liars who do not look. With momentum for each row, whole rows go to everybody (protocol: rows/2 times the mean's bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.position import position_seed
from outlast.core.protocol import Node
from outlast.core.protocol.step.exchange_order import ExchangeOrder
from outlast.runtime.exchange.c10d_plane import NetworkPlane
from outlast.runtime.exchange.plane import ExchangeTask
from outlast.runtime.exchange.robust_rows import Robust
from outlast.runtime.exchange.row_plane import RowSteps, with_momentum, without_momentum
from outlast.runtime.transport.peer_messages import SumsReady

__all__ = ["NetworkRowPlane"]

Range = tuple[int, int]


class NetworkRowPlane(RowSteps, NetworkPlane):
    """Members that reach each other through a c10d group."""

    AHEAD_BYTES = float("inf")  # rows are kept until the step is checked

    def __init__(self, robust: Robust, *args: Any) -> None:
        self.robust = robust
        NetworkPlane.__init__(self, *args)
        self._parts: dict[int, dict[Range, dict[Node, Tensor]]] = {}

    def begin(self, task: ExchangeTask) -> None:
        """A new step."""
        self._found, self._task = self.start(task), task
        self._scattering, self._gathering, self._parts = [], {}, {}
        self._order = ExchangeOrder(len(self.layout.buckets), self)
        if self._wires is not None:
            self._wires.begin()

    def offer(self, bucket: int) -> None:
        """Start the bucket's all-to-all; never waits."""
        task = self._now()
        self.enter(Phase.SCATTER, bucket)
        self.mesh.broadcast(SumsReady(task.step, bucket, task.slots))
        if self._wires is None:
            return
        sums = [self.mine.flats(slot)[bucket] for slot in task.slots]
        wanted = [self._wanted(bucket, index) for index in range(len(self.members))]
        pieces = [[total[lo:hi] for lo, hi in ranges for total in sums] for ranges in wanted]
        sizes = [[hi - lo for lo, hi in wanted[self.index] for _ in nodes] for nodes in task.nodes]
        dtype = self.layout.buckets[bucket].dtype
        others = (piece for index, row in enumerate(pieces) for piece in row if index != self.index)
        self.sent_bytes += sum(map(len, others)) * dtype.itemsize
        self._scattering.append(self._wires.scatter(bucket, pieces, sizes, dtype))

    def _wanted(self, bucket: int, index: int) -> list[Range]:
        """Ranges of the bucket that a member needs everybody's rows of: its slice, and those that it checks."""
        if self.robust.settings.momentum:
            return [(0, self.layout.buckets[bucket].numel)]
        return [self.ranges[bucket][index], *(self.ranges[bucket][r] for r in self._checked(bucket, index))]

    def _checked(self, bucket: int, index: int) -> list[int]:
        """Members whose slices of this bucket this member computes again."""
        step, share = self._now().step, self.robust.settings.check_share
        if not share or len(self.members) == 1:
            return []
        others = [r for r in range(len(self.members)) if r != index and self.checker(step, bucket, r) == index]
        return [r for r in others if position_seed(self.robust.seed, step, bucket, r, 0x5A3) / (1 << 63) < share]

    def _await_sums(self, bucket: int) -> None:
        self._parts[bucket] = self._own(bucket) if self._wires is None else self._received(bucket)

    def _own(self, bucket: int) -> dict[Range, dict[Node, Tensor]]:  # type: ignore[override]
        task, whole = self._now(), (0, self.layout.buckets[bucket].numel)
        return {whole: {n: self.mine.flats(s)[bucket] for n, s in zip(task.nodes[0], task.slots, strict=True)}}

    def _received(self, bucket: int) -> dict[Range, dict[Node, Tensor]]:  # type: ignore[override]
        self._all_entered(bucket)
        rows = self._wait(self._scattering[bucket], bucket, Phase.SCATTERED)
        parts: dict[Range, dict[Node, Tensor]] = {}
        wanted = self._wanted(bucket, self.index)
        for nodes, row in zip(self._now().nodes, rows, strict=True):
            pieces = iter(row)
            for lo, hi in wanted:
                for node in nodes:
                    parts.setdefault((lo, hi), {})[node] = next(pieces)
        return parts

    def _slice(self, bucket: int, lo: int, hi: int) -> dict[Node, Tensor]:
        """Everybody's sums of a range that I asked for, or that lies in one."""
        held = self._parts[bucket]
        if (lo, hi) in held:
            return held[lo, hi]
        return {node: part[lo:hi] for node, part in held[0, self.layout.buckets[bucket].numel].items()}

    def _target(self, bucket: int) -> Tensor:
        lo, hi = self.ranges[bucket][self.index]
        return self.out[bucket][lo:hi]

    def reduce(self, bucket: int) -> None:
        """My slice; of a rule by distance its rows are kept until all buckets are there."""
        self.enter(Phase.REDUCE, bucket)
        lo, hi = self.ranges[bucket][self.index]
        if self.robust.settings.momentum:
            self.robust.move(bucket, self._slice(bucket, 0, self.layout.buckets[bucket].numel))
        if self.robust.rule_of(bucket).needs_gram:
            if hi > lo:
                self.robust.keep(bucket, self._slice(bucket, lo, hi), lo, hi)
            return
        target = self._target(bucket)
        if hi > lo:
            self.robust.reduce(bucket, self._slice(bucket, lo, hi), lo, hi, target)
        self._offer_slice(bucket, target)

    def choose(self) -> None:
        """What rules by distance take of the rows that were kept."""
        for bucket in self.decide(self._now()):
            target = self._target(bucket)
            if len(target):
                self.robust.combine(bucket, *self.ranges[bucket][self.index], target)
            self._offer_slice(bucket, target)

    def _offer_slice(self, bucket: int, target: Tensor) -> None:
        self.note(self._now(), self._found, bucket, target)
        self.enter(Phase.GATHER, bucket)
        if self._wires is not None:
            self.sent_bytes += len(target) * target.element_size() * (len(self.members) - 1)
            self._gathering[bucket] = self._wires.gather(bucket, self.out[bucket], self.ranges[bucket])

    # --- checks ------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """The slices whose rows came for it."""
        for bucket in range(len(self.layout.buckets)):
            for reducer in self._checked(bucket, self.index):
                lo, hi = self.ranges[bucket][reducer]
                again = self.robust.again(bucket, self._slice(bucket, lo, hi), lo, hi) if hi > lo else None
                if again is not None and self.differs(bucket, again, lo, hi):
                    self.robust.accused.add((bucket, self.members[reducer]))

    def false(self, bucket: int, reducer: int) -> bool | None:
        """Only the checker has the rows: nobody else can tell."""
        return None

    # --- hand-over ---------------------------------------------------------------------------------------------------
    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None:
        """Does what the plane of the mean does, with the rows' momentum."""
        super().give(step, with_momentum(self.robust, meta), to)

    def take(self, step: int, donor: str) -> bytes:
        """Does what the plane of the mean does, with the rows' momentum."""
        return without_momentum(self.robust, donor, super().take(step, donor))

    def close(self) -> None:
        """Does what the plane of the mean does; what was received goes with the group."""
        super().close()
        self._parts = {}
