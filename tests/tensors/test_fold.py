"""One pass that adds and fingerprints gives the bits and the fingerprints of two, on every processor and without C."""

from __future__ import annotations

import itertools
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch

from outlast.core.protocol import schedule
from outlast.tensors import (
    BLOCK,
    Fold,
    _native,
    add_and_print_blocks,
    block_prints,
    combine,
    fingerprint_all,
    look,
    prepare_fold,
    reduce_and_look,
    reduce_slice,
    sum_of_squares,
)
from outlast.tensors._fold import MOST, _squares_of_blocks

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here: there are two passes")

LENGTHS = [1, 60, 61, 63, 64, 65, 80, 255, 256, 257, 271, 272, 273, 511, 512, 513, 4096, 4097, 10_007]
FLAGS = ["-march=native", "-mavx2", "-mavx512f", "-march=x86-64"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Where they are kept, each under its text and flags: compiled once each."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=FLAGS)
def compiled(request, kernels, monkeypatch):
    """The one pass for this processor, or for lesser ones; for the least there is none."""
    words = Path("/proc/cpuinfo").read_text().split()
    if request.param[2:] not in ["arch=native", "arch=x86-64", *words]:
        pytest.skip(f"this processor cannot run {request.param}")
    flags = [request.param if flag == "-march=native" else flag for flag in _native.FLAGS]
    monkeypatch.setattr(_native, "FLAGS", tuple(flags))
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernels))
    _native._object_path.cache_clear()
    _native.forget()
    assert prepare_fold() == ("avx2" in words and request.param != "-march=x86-64")
    yield
    monkeypatch.undo()
    _native._object_path.cache_clear()
    _native.forget()


def values(length: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(length, generator=draw) * 10.0 ** (60 * torch.rand(length, generator=draw) - 30)
    found[::7], found[::11], found[3::50] = -0.0, 1e-45, float("inf")
    return found


def packed(flat: torch.Tensor, block: int, first: int) -> bytes:
    prints = block_prints(flat, block, first)
    return struct.pack(f"={len(prints)}Q", *prints)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


@pytest.mark.parametrize("fresh", [True, False])
def test_each_length_is_added_and_fingerprinted_as_in_two_passes(compiled, fresh):
    for key in (0, 5, (1 << 64) - 3):
        for length in LENGTHS:
            grad, into = values(length, length), values(length, length + 1)
            wanted = grad if fresh else into + grad
            found = Fold([into], [key]).add([grad], fresh=fresh)
            assert found == fingerprint_all([grad], [key]), length
            assert bits(into) == bits(wanted)


def test_what_the_one_pass_cannot_read_goes_through_two(compiled):
    grads = [values(600, 1), torch.randn(30, 20).t(), torch.randn(500, dtype=torch.float64), torch.ones(3)]
    into = [torch.randn_like(grad, memory_format=torch.contiguous_format) for grad in grads]
    wanted = [a + b for a, b in zip(into, grads, strict=True)]
    fold = Fold(into, [4, 9, 2, 7])
    assert fold.add(grads, fresh=False) == fingerprint_all(grads, [4, 9, 2, 7])
    assert all(torch.equal(a, b) for a, b in zip(into, wanted, strict=True))
    grads[1] = grads[1].contiguous()
    assert fold.add(grads, fresh=True) == fingerprint_all(grads, [4, 9, 2, 7])
    assert all(torch.equal(a, b) for a, b in zip(into, grads, strict=True))


@pytest.mark.parametrize("length", [1024, 1025, 1090, 3 * 512, 40])
def test_blocks_of_the_result_are_fingerprinted(compiled, length):
    to, source = values(length, 1), values(length, 2)
    wanted = to + source
    assert add_and_print_blocks(to, source, 512, 11) == packed(wanted, 512, 11)
    assert bits(to) == bits(wanted)


@pytest.mark.parametrize("length", [*LENGTHS, BLOCK, 3 * 64, 6 * 64 + 1, 7 * 64 - 1, BLOCK + 61, 2 * BLOCK + 1])
def test_a_flat_tensor_is_fingerprinted_and_measured_in_one_pass(compiled, length):
    flat = values(length, length).nan_to_num(posinf=1.0).clamp(-1e16, 1e16)
    blocks = flat.split(BLOCK)
    found = look(flat, 9, squares=True)
    assert found.print == combine(block_prints(flat, BLOCK, 9)) == look(flat, 9, squares=False).print
    assert found.squares == tuple(map(sum_of_squares, blocks)) == _squares_of_blocks(flat)
    assert found.squares == pytest.approx([float(b.double().square().sum()) for b in blocks], rel=1e-12)
    assert look(flat.double(), 9, squares=True).squares == found.squares
    flat[length // 2] = 1e20  # a float32 holds it, and not its square
    assert math.inf in look(flat, 9, squares=True).squares
    assert look(flat, 9, squares=True).squares == tuple(map(sum_of_squares, blocks)) == _squares_of_blocks(flat)
    assert all(map(math.isfinite, look(flat.double(), 9, squares=True).squares))
    flat[length // 2] = float("nan")
    assert any(map(math.isnan, look(flat, 9, squares=True).squares))


@pytest.mark.parametrize("length", [61, 500, BLOCK, 2 * BLOCK + 300, BLOCK + 60])
@pytest.mark.parametrize("nodes", [((0, 6),), ((0, 4), (4, 6)), ((0, 1), (1, 2), (2, 3), (3, 4), (4, 6))])
@pytest.mark.parametrize("scale", [1.0, 1 / 6])
def test_a_slice_is_reduced_compared_and_measured_in_one_pass(compiled, length, nodes, scale):
    parts = {node: values(length, node[0]) for node in nodes}
    kept = {node: part.clone() for node, part in parts.items()}
    steps, wanted, out = list(schedule(nodes, 6)), torch.empty(length), torch.empty(length)
    reduce_slice(parts, steps, (0, 6), scale, wanted)
    for compare, squares in itertools.product([False, True], repeat=2):
        out.fill_(float("nan"))
        found = reduce_and_look(parts, steps, (0, 6), scale, out, 4, squares=squares, compare=compare)
        assert bits(out) == bits(wanted)
        assert repr(found) == repr(look(out, 4, squares=squares)._replace(parts=found.parts))
        said = {node: packed(part, BLOCK, 4) for node, part in kept.items()}
        assert found.parts == (said if compare else {})
    assert all(bits(parts[node]) == bits(kept[node]) for node in nodes)


NANS = [0x7FC00000, -0x400000, 0x7FC00001, 0x7F800001, -0x7FFFFF]  # both signs, payloads, signalling ones


@pytest.mark.parametrize("length", [500, 2 * BLOCK + 300])
@pytest.mark.parametrize("nodes", [((0, 6),), ((0, 4), (4, 6))])
@pytest.mark.parametrize("scale", [1.0, 1 / 6])
def test_which_of_two_nans_a_reduction_keeps_does_not_depend_on_the_way(compiled, length, nodes, scale):
    """One that reduces in one pass and one that checks it in two would else accuse each other."""
    for at in (0, length - 1, length // 2):
        for pair in itertools.product(NANS, repeat=2):
            parts = {node: values(length, node[0]).nan_to_num(posinf=1.0) for node in nodes}
            for part, nan in zip(parts.values(), pair, strict=False):
                part.view(torch.int32)[at] = nan
            steps, wanted, out = list(schedule(nodes, 6)), torch.empty(length), torch.empty(length)
            reduce_slice(parts, steps, (0, 6), scale, wanted)
            found = reduce_and_look(parts, steps, (0, 6), scale, out, 4, squares=True, compare=True)
            assert bits(out) == bits(wanted)
            assert repr(found) == repr(look(out, 4, squares=True)._replace(parts=found.parts))
            assert found.parts == {node: packed(part, BLOCK, 4) for node, part in parts.items()}


def test_more_parts_than_the_one_pass_takes(compiled):
    nodes = tuple((i, i + 1) for i in range(MOST + 1))
    parts, steps = {node: values(200, node[0]) for node in nodes}, list(schedule(nodes, MOST + 1))
    one, two = torch.empty(200), torch.empty(200)
    found = reduce_and_look(parts, steps, (0, MOST + 1), 1.0, one, 0, squares=True, compare=True)
    reduce_slice(parts, steps, (0, MOST + 1), 1.0, two)
    assert bits(one) == bits(two)
    assert found.parts == {node: packed(part, BLOCK, 0) for node, part in parts.items()}


def test_without_the_one_pass_the_results_are_the_same(compiled, monkeypatch):
    rows = [[values(n, n + k) for n in LENGTHS] for k in range(2)]
    keys = list(range(len(LENGTHS)))
    one = [row.clone() for row in rows[0]], values(2000, 1)
    two = [row.clone() for row in rows[0]], values(2000, 1)
    nodes, out = {(0, 1): values(70_000, 1), (1, 2): values(70_000, 2)}, torch.empty(2, 70_000)

    def reduced(into: torch.Tensor) -> str:
        return repr(reduce_and_look(nodes, [(*nodes, (0, 2))], (0, 2), 0.1, into, 0, squares=True, compare=True))

    first = Fold(one[0], keys).add(rows[1], fresh=False), add_and_print_blocks(one[1], values(2000, 2), 512, 0)
    noted = reduced(out[0])
    monkeypatch.setattr(_native, "library", lambda _: None)
    second = Fold(two[0], keys).add(rows[1], fresh=False), add_and_print_blocks(two[1], values(2000, 2), 512, 0)
    assert first == second
    assert reduced(out[1]) == noted
    assert bits(out[0]) == bits(out[1])
    assert [bits(row) for row in [*one[0], one[1]]] == [bits(row) for row in [*two[0], two[1]]]
