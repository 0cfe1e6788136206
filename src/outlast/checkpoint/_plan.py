"""Who writes what, decided before anything is copied: a pure function of shapes and owners. No torch.

Role: replicas that hold the same bytes split the writing of them; nobody stages what it will not write. Invariant:
every writer computes the same plan from the same schema, and over all writers each element of each tensor is written
exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outlast.checkpoint.boxes import Box, rows, whole
from outlast.checkpoint.fs import ALIGN
from outlast.checkpoint.manifest import DTYPE_BYTES, Piece, TensorSpec

__all__ = ["PartLayout", "Shard", "piece_bytes", "plan", "replicated"]

_SMALL_ALIGN = 64
_LARGE_BYTES = 1 << 20


class Shard(NamedTuple):
    """A box of a tensor and the writers that hold it."""

    box: Box
    owners: tuple[int, ...]


class PartLayout(NamedTuple):
    """One writer's stream: its pieces in order, and its size (a multiple of `ALIGN`; gaps are zero)."""

    pieces: tuple[Piece, ...]
    stream_bytes: int


def replicated(shape: Sequence[int], num_writers: int) -> list[Shard]:
    """A plain tensor, of which every writer has all."""
    return [Shard(whole(shape), tuple(range(num_writers)))]


def piece_bytes(piece: Piece, spec: TensorSpec) -> int:
    return Box(piece.offset, piece.shape).volume * DTYPE_BYTES[spec.dtype]


def plan(tensors: Sequence[TensorSpec], shards: Sequence[Sequence[Shard] | None], num_writers: int) -> list[PartLayout]:
    """One layout for each writer. `shards[i]`: distinct boxes that together hold tensor i once; None: all have it all.

    Large boxes with several owners are cut along their first dimension; then each box goes, largest first, to the
    least loaded of its owners.
    """
    target = sum(spec.bytes for spec in tensors) / max(1, num_writers)
    jobs: list[tuple[int, int, Shard]] = []
    for index, spec in enumerate(tensors):
        size = DTYPE_BYTES[spec.dtype]
        for shard in shards[index] or replicated(spec.shape, num_writers):
            jobs += [(cut.box.volume * size, index, cut) for cut in _cut(shard, size, target) if cut.box.volume]
    jobs.sort(key=lambda job: (-job[0], job[1], job[2]))
    loads = [0] * num_writers
    shares: list[list[tuple[int, Box]]] = [[] for _ in range(num_writers)]
    for size, index, shard in jobs:
        writer = min(shard.owners, key=lambda w: (loads[w], w))
        loads[writer] += size
        shares[writer].append((index, shard.box))
    return [_layout(tensors, sorted(share)) for share in shares]


def _cut(shard: Shard, itemsize: int, target: float) -> list[Shard]:
    """No piece larger than an eighth of a writer's fair share, so that the shares come out even."""
    num_bytes = shard.box.volume * itemsize
    if len(shard.owners) < 2 or num_bytes < _LARGE_BYTES or num_bytes * 8 <= target:
        return [shard]
    parts = min(len(shard.owners) * 8, int(num_bytes * 8 / target) + 1)
    first = shard.box.offset[0] if shard.box.offset else 0
    cuts = [Box((box.offset[0] + first, *shard.box.offset[1:]), box.shape) for box in rows(shard.box.shape, parts)]
    return [Shard(box, shard.owners) for box in cuts]


def _layout(tensors: Sequence[TensorSpec], share: list[tuple[int, Box]]) -> PartLayout:
    pieces, at = [], 0
    for index, box in share:
        size = box.volume * DTYPE_BYTES[tensors[index].dtype]
        align = ALIGN if size >= _LARGE_BYTES else _SMALL_ALIGN
        at = -(-at // align) * align
        pieces.append(Piece(index, box.offset, box.shape, at))
        at += size
    return PartLayout(tuple(pieces), -(-at // ALIGN) * ALIGN)
