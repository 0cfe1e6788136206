"""Buckets, blocks and slices: every gradient in one place, and nothing depends on the number of members."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.runtime.exchange.plane import Reduction
from outlast.tensors import BLOCK, Layout, look

shapes = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3), min_size=1, max_size=8)


@settings(max_examples=60)
@given(shapes, st.sampled_from([64, 300, 4096]), st.booleans())
def test_views_tile_the_buckets_without_overlap(sizes: list[list[int]], bucket_bytes: int, mixed: bool) -> None:
    params = [torch.zeros(s, dtype=torch.float64 if mixed and i % 3 == 0 else None) for i, s in enumerate(sizes)]
    layout = Layout(params, bucket_bytes)
    flats = layout.flats(torch.zeros(layout.total_bytes, dtype=torch.uint8))
    views = layout.views(flats)
    for number, view in enumerate(views, 1):
        view.fill_(number)
    for number, (view, param) in enumerate(zip(views, params, strict=True), 1):
        assert view.shape == param.shape
        assert view.dtype == param.dtype
        assert bool((view == number).all())
    assert sorted(p for b in layout.buckets for p, _, _ in b.params) == list(range(len(params)))
    assert layout.buckets[0].params[0][0] == len(params) - 1  # the last parameter is ready first
    for bucket in layout.buckets:
        assert len({params[p].dtype for p, _, _ in bucket.params}) == 1
        assert bucket.offset_bytes % 64 == 0


@settings(max_examples=60)
@given(st.integers(1, 12 * BLOCK), st.integers(1, 9), st.integers(0, 5), st.sets(st.integers(0, 8), max_size=8))
def test_slices_are_whole_blocks_and_cover_once(numel: int, num_members: int, index: int, idle: set[int]) -> None:
    layout = Layout([torch.empty(numel, device="meta") for _ in range(index + 1)], 1)
    bucket = layout.buckets[index]
    idle = {member for member in idle if member < num_members - 1}
    slices = bucket.slices(num_members, idle)
    assert len(slices) == num_members
    assert all(lo == hi for lo, hi in (slices[member] for member in idle))
    assert slices[0][0] == 0
    assert slices[-1][1] == bucket.numel
    for (_, end), (start, _) in itertools.pairwise(slices):
        assert end == start
    assert all(lo % BLOCK == 0 or lo == hi for lo, hi in slices)
    sizes = [-(-(hi - lo) // BLOCK) for member, (lo, hi) in enumerate(slices) if member not in idle]
    assert max(sizes) - min(sizes) <= 1


def test_what_is_noted_of_slices_does_not_depend_on_the_cut() -> None:
    flat = torch.randn(3 * BLOCK + 17, generator=torch.Generator().manual_seed(2))
    whole, cut = Reduction(norms={}), Reduction(norms={})
    for found, edges in ((whole, (0, flat.numel())), (cut, (0, 2 * BLOCK, flat.numel()))):
        for lo, hi in itertools.pairwise(edges):
            found.note(lo // BLOCK, look(flat[lo:hi], lo // BLOCK, squares=True))
    assert whole == cut
    assert sorted(whole.norms) == [0, 1, 2, 3]
    assert sum(whole.norms.values()) == pytest.approx(float(flat.double().square().sum()), rel=1e-12)


def test_half_precision_takes_float32_and_integers_are_refused() -> None:
    layout = Layout([torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16), torch.zeros(1)])
    assert {b.dtype for b in layout.buckets} == {torch.float32}
    with pytest.raises(ValueError, match="floating"):
        Layout([torch.zeros(3, dtype=torch.int64)])


def test_an_empty_layout_is_sound() -> None:
    layout = Layout([])
    assert layout.buckets == []
    assert layout.num_blocks == 0
    assert layout.views(layout.flats(torch.zeros(0, dtype=torch.uint8))) == []
