"""Fingerprints see every bit and every place, whatever the cut."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.tensors import _fingerprint, block_prints, combine, fingerprint, fingerprint_named
from outlast.tensors._fingerprint import _mixed, _mixed_all, _mixed_blocks


def blocks_of(flat: torch.Tensor, block: int, first: int) -> int:
    return combine(block_prints(flat, block, first))


def sample(numel: int = 257) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("how", [fingerprint, lambda t, key=0: _mixed(t.reshape(-1), key)], ids=["cpu", "device"])
class TestOneTensor:
    def test_every_single_bit_counts(self, how) -> None:  # type: ignore[no-untyped-def]
        tensor = sample(33)
        raw = tensor.view(torch.uint8)
        seen = {how(tensor)}
        for byte in range(raw.numel()):
            for bit in range(8):
                raw[byte] ^= 1 << bit
                seen.add(how(tensor))
                raw[byte] ^= 1 << bit
        assert len(seen) == 1 + 8 * raw.numel()
        assert how(tensor) in seen

    def test_swaps_and_paired_sign_flips_are_seen(self, how) -> None:  # type: ignore[no-untyped-def]
        tensor = sample()
        swapped = tensor.clone()
        swapped[[3, 200]] = swapped[[200, 3]]
        flipped = tensor.clone()
        flipped[[3, 200]] *= -1
        neighbours = tensor.clone()
        neighbours[[4, 5]] = neighbours[[5, 4]]
        negated = -tensor
        moved = tensor.roll(1)
        assert len({how(t) for t in (tensor, swapped, flipped, neighbours, negated, moved)}) == 6

    def test_keys_and_zeros_are_told_apart(self, how) -> None:  # type: ignore[no-untyped-def]
        zeros = torch.zeros(64)
        assert how(zeros) != how(-zeros)
        assert how(zeros, 1) != how(zeros, 2)
        assert how(torch.zeros(0)) == how(torch.zeros(0))
        assert how(torch.zeros(64, dtype=torch.bfloat16)) != how(torch.full((64,), 1.0, dtype=torch.bfloat16))


@settings(max_examples=50)
@given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=6))
def test_sums_of_blocks_do_not_depend_on_the_cut(num_blocks: int, cuts: list[int]) -> None:
    block = 16
    flat = sample(num_blocks * block - 3)
    whole = blocks_of(flat, block, 0)
    edges = sorted({0, num_blocks, *(cut for cut in cuts if cut < num_blocks)})
    parts = [blocks_of(flat[a * block : b * block], block, a) for a, b in itertools.pairwise(edges)]
    assert combine(parts) == whole
    assert combine(parts[::-1]) == whole


def test_blocks_in_each_other_s_places_are_seen() -> None:
    flat = sample(64)
    swapped = torch.cat([flat[16:32], flat[:16], flat[32:]])
    assert blocks_of(flat, 16, 0) != blocks_of(swapped, 16, 0)


def test_names_shapes_and_dtypes_count() -> None:
    x = torch.zeros(2, 3)
    variants = [("a", x), ("b", x), ("a", x.reshape(3, 2)), ("a", x.to(torch.float64)), ("a", x.int())]
    assert len({fingerprint_named([variant]) for variant in variants}) == 5
    two = [("a", sample(4)), ("b", sample(5))]
    assert fingerprint_named(two) == fingerprint_named(two[::-1])
    assert fingerprint_named([("a", two[1][1]), ("b", two[0][1])]) != fingerprint_named(two)


def test_views_that_are_not_contiguous_count_by_their_values() -> None:
    x = sample(64).reshape(8, 8)
    assert fingerprint(x.t()) == fingerprint(x.t().contiguous())
    assert fingerprint(x.t()) != fingerprint(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_prints_of_blocks_are_those_of_each_and_strides_do_not_count(dtype: torch.dtype) -> None:
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    each = tuple(fingerprint(flat[i : i + 64], 7 + i // 64) for i in range(0, 1000, 64))
    assert block_prints(flat, 64, 7) == each
    assert block_prints(flat[::2], 64, 7) == block_prints(flat[::2].clone(), 64, 7)
    assert block_prints(flat[:0], 64, 7) == ()
    row = flat[:4].clone()
    for same in (row[None].t(), row[:, None], row.reshape(2, 2), flat.clone()[:4].requires_grad_(True)):
        assert fingerprint(same, 3) == fingerprint(row, 3)
    assert fingerprint(flat[1::5][:1]) == fingerprint(flat[1:2].clone()) == fingerprint(flat[1])


def by_hand(data: bytes, key: int) -> int:
    """What a device mixes, word by word."""

    def signed(value: int) -> int:
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)

    total = 0
    for place, (word,) in enumerate(struct.iter_unpack("<q", data + bytes(-len(data) % 8))):
        keys = signed((place + key % (1 << 32)) * -7046029254386353131 + 1609587929392839161)
        mixed = word ^ signed(keys ^ (keys >> 29))
        product = signed(((mixed & 0xFFFFFFFF) | 1) * (mixed >> 32) + mixed * -4417276706812531889)
        total += (product ^ (product >> 31)) * -7046029254386353131
    return total % (1 << 64)


@pytest.mark.parametrize("length", [0, 1, 2, 33])
def test_what_a_device_gives_is_what_it_always_gave(length: int) -> None:
    flat = sample(length)
    for key in (0, 7, (1 << 63) + 5, -1):
        assert _mixed(flat, key) == by_hand(flat.numpy().tobytes(), key)


@pytest.mark.parametrize("together", [1, 20, 1 << 22])
def test_a_device_mixes_many_at_a_time_as_each_alone(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fingerprint, "_TOGETHER", together)
    draw = torch.Generator().manual_seed(2)
    sizes = [(1,), (2,), (5, 5), (0,), (16,), (), (31,), (400,)]
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    tensors += [torch.randn(7, generator=draw).bfloat16(), torch.randn(3, generator=draw).double(), sample(12)[::2]]
    rows = [(tensor, (place << 40) + place) for place, tensor in enumerate(tensors)]
    assert _mixed_all(rows) == combine([_mixed(tensor.reshape(-1), key) for tensor, key in rows])
    for length, first in itertools.product([0, 1, 15, 16, 33, 64, 111], [0, 9, (1 << 32) - 1]):
        for flat in (sample(length), sample(length).bfloat16(), sample(length).double()):
            each = [_mixed(flat[i : i + 16], first + i // 16) for i in range(0, length, 16)]
            assert _mixed_blocks(flat, 16, first) == tuple(each)
