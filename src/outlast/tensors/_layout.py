"""Where each parameter's gradient lies in flat buckets, and how buckets fall into blocks and slices.

Blocks of 32 Ki elements never depend on membership; slices are whole blocks, so every per-block number (norm,
fingerprint) is the same however many members share the work (protocol, 9). Knows shapes, not values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outlast.tensors._shards import Grid

__all__ = ["BLOCK", "Bucket", "Layout"]

BLOCK = 32768
_ALIGN = 64  # bytes; every parameter and bucket starts on a cache line
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive gradients of one dtype. `params`: (parameter index, offset in elements, elements). `runs`: of shards,
    the stretches (first element, end, number of the first block) in which blocks follow each other; none: all of it."""

    index: int
    dtype: torch.dtype
    params: tuple[tuple[int, int, int], ...]
    numel: int
    offset_bytes: int  # in a buffer that holds all buckets
    first_block: int
    runs: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_blocks(self) -> int:
        return sum(-(-(hi - lo) // BLOCK) for lo, hi, _ in self.runs) if self.runs else -(-self.numel // BLOCK)

    def slices(
        self, num_members: int, idle: Collection[int] = (), turn: int | None = None
    ) -> tuple[tuple[int, int], ...]:
        """Element range of each member's slice, ascending; whole blocks. Who gets one more turns with the bucket, or as
        `turn` says; those that are `idle` get none."""
        num = num_members - len(idle)
        n, turn = self.num_blocks, (self.index if turn is None else turn) % num
        starts = [at for lo, hi, _ in self.runs for at in range(lo, hi, BLOCK)] or list(range(0, self.numel, BLOCK))
        before = itertools.accumulate((member not in idle for member in range(num_members)), initial=0)
        starts[:1], edges = [0], [(n * i + turn) // num for i in before]
        return tuple(itertools.pairwise([starts[edge] if edge < n else self.numel for edge in edges]))

    def place(self, lo: int) -> int:
        """Which of the bucket's blocks, in the order of elements, begins at this element."""
        before = 0
        for start, stop, _ in self.runs:
            if start <= lo < stop:
                return before + (lo - start) // BLOCK
            before += -(-(stop - start) // BLOCK)
        return lo // BLOCK

    def stretches(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Yield the stretches of a slice (first element, end, number of the first block) in which blocks follow each
        other."""
        for start, stop, first in self.runs or ((0, self.numel, self.first_block),):
            begin, end = max(lo, start), min(hi, stop)
            if begin < end:
                yield begin, end, first + (begin - start) // BLOCK


class Layout:
    """Buckets for a list of parameters, last parameter first (the order in which a backward finishes them).

    Gradients of bf16 and fp16 parameters are summed and exchanged in float32: stated, so that the tree's bits do not
    depend on who adds. `groups`: a number for each parameter; those of one group come together, and no bucket holds two
    groups. `grid`: of shards, where their blocks are. `device`: where sums lie; none: with the
    parameters. ValueError if a parameter is not a floating-point tensor.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        bucket_bytes: int = 4 << 20,
        groups: Sequence[int] | None = None,
        grid: Grid | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.shapes = [tuple(p.shape) for p in params]
        self.device = device or (params[0].device if params else torch.device("cpu"))
        self.buckets: list[Bucket] = []
        self._grid = grid
        self._place(params, bucket_bytes, list(groups) if groups is not None else [0] * len(params))
        self.num_blocks = sum(b.num_blocks for b in self.buckets) if grid is None else grid.num_blocks
        last = self.buckets[-1] if self.buckets else None
        end = last.offset_bytes + last.numel * last.dtype.itemsize if last else 0
        self.total_bytes = math.ceil(end / 4096) * 4096
        self.bucket_of = {p: b.index for b in self.buckets for p, _, _ in b.params}

    def _place(self, params: Sequence[Tensor], bucket_bytes: int, groups: list[int]) -> None:
        pending: list[tuple[int, int, int]] = []
        size = offset = block = 0
        dtype: torch.dtype | None = None

        def close() -> None:
            nonlocal pending, size, offset, block
            if pending and dtype is not None:
                bucket = Bucket(
                    index=len(self.buckets),
                    dtype=dtype,
                    params=tuple(pending),
                    numel=size,
                    offset_bytes=offset,
                    first_block=block,
                    runs=self._runs(pending),
                )
                self.buckets.append(bucket)
                offset += math.ceil(size * dtype.itemsize / _ALIGN) * _ALIGN
                block += bucket.num_blocks
            pending, size = [], 0

        order = sorted(range(len(params)), key=lambda index: (groups[index], index), reverse=True)
        for index in order:
            param = params[index]
            if not param.is_floating_point():
                raise ValueError(f"parameter {index} has dtype {param.dtype}; gradients are floating point")
            wanted = torch.float32 if param.dtype in _HALF else param.dtype
            other = bool(pending) and groups[pending[-1][0]] != groups[index]
            if dtype is not wanted or other or (size and (size + param.numel()) * wanted.itemsize > bucket_bytes):
                close()
                dtype = wanted
            pending.append((index, size, param.numel()))
            unit = _ALIGN // wanted.itemsize
            size += math.ceil(param.numel() / unit) * unit
        close()

    def _runs(self, params: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
        """Stretches of a bucket with these parameters."""
        runs: list[tuple[int, int, int]] = []
        for index, offset, _ in params if self._grid is not None else ():
            assert self._grid is not None
            for elements, first in self._grid.cells[index]:
                runs.append((offset, offset + elements, first))
                offset += elements
        return tuple(runs)

    def flats(self, storage: Tensor) -> list[Tensor]:
        """One flat tensor a bucket, viewing `storage` (1-D uint8 of at least `total_bytes`)."""
        out = []
        for b in self.buckets:
            raw = storage[b.offset_bytes : b.offset_bytes + b.numel * b.dtype.itemsize]
            out.append(raw.view(b.dtype))
        return out

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """One view a parameter, in parameter order and shape."""
        out: list[Tensor] = [flats[0][:0]] * len(self.shapes) if flats else []
        for b, flat in zip(self.buckets, flats, strict=True):
            for index, start, numel in b.params:
                out[index] = flat[start : start + numel].view(self.shapes[index])
        return out
