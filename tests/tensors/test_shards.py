"""The grid of blocks that no number of ranks can be read from."""

from __future__ import annotations

import math

import pytest
import torch

from outlast.core.protocol import combine, partials
from outlast.tensors import BLOCK, WIDEST, Layout, grid_of, is_shard, like, local, look, whole
from outlast.tensors import combine as total

SHAPES = [(333, 24), (333,), (24, 333), (5,), (1, 7), (1000, 300), (8, 1)]


def _found(width: int, num_members: int) -> tuple[float, int]:
    """Norm and fingerprint of fixed gradients: ranks hold rows of them, and members reduce slices of those."""
    draw = torch.Generator().manual_seed(3)
    wholes = [torch.randn(shape, generator=draw) for shape in SHAPES]
    norms: dict[int, float] = {}
    prints = []
    parts: list[tuple[int, int, float]] = []
    num_blocks = 0
    for place in range(width):
        grid = grid_of(SHAPES, place, width, BLOCK)
        num_blocks = grid.num_blocks
        shards = [torch.chunk(w, width)[place] if place < len(torch.chunk(w, width)) else w[:0] for w in wholes]
        layout = Layout(shards, bucket_bytes=50_000, grid=grid)
        assert layout.num_blocks == num_blocks
        flats = layout.flats(torch.zeros(layout.total_bytes, dtype=torch.uint8))
        for view, shard in zip(layout.views(flats), shards, strict=True):
            view.copy_(shard)
        norms.clear()
        for bucket, flat in zip(layout.buckets, flats, strict=True):
            for lo, hi in bucket.slices(num_members):
                for begin, end, first in bucket.stretches(lo, hi):
                    seen = look(flat[begin:end], first, squares=True)
                    prints.append(seen.print)
                    assert not set(norms) & set(range(first, first + len(seen.squares)))
                    norms.update(enumerate(seen.squares, first))
        parts += partials(norms, num_blocks)
    return math.sqrt(combine(parts, (0, num_blocks))), total(prints)


@pytest.mark.parametrize("num_members", [1, 3])
def test_norm_and_fingerprint_do_not_depend_on_the_number_of_ranks(num_members: int) -> None:
    found = {_found(width, num_members) for width in (1, 2, 4, WIDEST)}
    assert len(found) == 1
    assert found == {_found(1, 2)}


def test_slices_of_shards_tile_a_bucket_at_blocks() -> None:
    layout = Layout([torch.empty(500, 300)], grid=grid_of([(1000, 300)], 1, 2, BLOCK))
    (bucket,) = layout.buckets
    slices = bucket.slices(4)
    assert [lo for lo, _ in slices] == [0, *(hi for _, hi in slices[:-1])]
    assert slices[-1][1] == bucket.numel == 150_000
    starts = {start for lo, hi, _ in bucket.runs for start in range(lo, hi, BLOCK)}
    assert {lo for lo, hi in slices if hi > lo} <= starts


def test_a_tensor_that_is_not_spread_is_itself() -> None:
    tensor = torch.ones(3)
    assert not is_shard(tensor)
    assert local(tensor) is whole(tensor) is like(tensor, tensor) is tensor
