"""What a rank should need beside its model: the formula of docs/explanation/costs.md, for one model and fleet.

Arithmetic on the layout of the gradients and the plan of an undisturbed step, and one measured constant. Parameters,
optimizer state, activations and interpreter are the same in every system and stand in no figure. Nobody is missing and
no spare is kept: else a donor holds its share of the state and of two outcomes besides.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from outlast.core.protocol import merges, plan_of
from outlast.tensors import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Needs", "needs"]

BUCKET_BYTES = 4 << 20
AHEAD_BYTES = 16 << 20
"""What a rank receives ahead over c10d (`NetworkPlane.AHEAD_BYTES`)."""
FIXED_BYTES = {"shm": -50 << 20, "c10d": -45 << 20}
"""Beyond DDP's, whatever the model: modules, threads and heaps, less what a replica that is forked from a process with
torch loaded has not mapped. Measured with three models, which differ by 4 MiB. Of replicas that load by themselves
(`preload = false`): 6.5 and 8.5 MiB."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes of the largest rank. `sums`: the most partial sums at a time; `own`: its own memory; `mapped`: peers'
    memory that it reads, resident here too, which the machine holds once; `fixed`: whatever the model; `ddp`: plain
    DDP's own."""

    gradient: int
    sums: int
    own: int
    mapped: int
    fixed: int
    ddp: int

    @property
    def over_ddp(self) -> int:
        """How much more is resident than under plain DDP."""
        return self.own + self.mapped + self.fixed - self.ddp


def needs(params: Sequence[Tensor], replicas: int, microbatches: int, exchange: str) -> Needs:
    """`exchange`: shm or c10d."""
    layout = Layout(params, BUCKET_BYTES)
    gradient = sum(bucket.numel * bucket.dtype.itemsize for bucket in layout.buckets)
    largest = max(bucket.numel * bucket.dtype.itemsize for bucket in layout.buckets)
    plan = plan_of([str(i) for i in range(replicas)], 0, microbatches)
    found = [_sums(leaves, microbatches) for leaves in plan.leaves.values()]
    sums, slice_ = max(most for most, _ in found), gradient / replicas
    offered = sum(left for _, left in found) - min(left for _, left in found)
    own, mapped = float(sums * gradient + gradient), 0.0
    if exchange == "shm" and replicas > 1:
        own += slice_
        mapped = offered * slice_ + (replicas - 1) * slice_
    elif replicas > 1:
        own += min(offered * slice_, AHEAD_BYTES + offered * largest / replicas)
    return Needs(
        gradient=gradient, sums=sums, own=round(own), mapped=round(mapped), fixed=FIXED_BYTES[exchange],
        ddp=2 * gradient,
    )  # fmt: skip


def _sums(leaves: Sequence[int], num_leaves: int) -> tuple[int, int]:
    """(the most sums held at a time, those left at the end) of who computes these microbatches in this order."""
    held: set[tuple[int, int]] = set()
    most = 0
    for leaf in leaves:
        done = merges(held, leaf, num_leaves)
        most = max(most, len(held) + (not done))  # a leaf that completes a sum is added to it where it lies
        held.add((leaf, leaf + 1))
        for left, right, parent in done:
            held -= {left, right}
            held.add(parent)
    return most, len(held)
