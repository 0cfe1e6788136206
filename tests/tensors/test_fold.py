"""One pass that adds and fingerprints gives the bits and the fingerprints of two, on every processor and without C."""

from __future__ import annotations

import math
import platform
import shutil
from pathlib import Path

import pytest
import torch

from outlast.tensors import (
    Fold,
    _native,
    add_and_print_blocks,
    block_prints,
    fingerprint_all,
    look_at_block,
    prepare_fold,
    sum_of_squares,
)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here: there are two passes")

LENGTHS = [1, 60, 61, 63, 64, 65, 80, 255, 256, 257, 271, 272, 273, 511, 512, 513, 4096, 4097, 10_007]
FLAGS = ["", "-march=x86-64", "-mavx2", "-mavx512f"]


@pytest.fixture(params=FLAGS)
def compiled(request, tmp_path, monkeypatch):
    """The one pass for this processor, or for lesser ones."""
    if request.param:
        words = Path("/proc/cpuinfo").read_text().split()
        if platform.machine() != "x86_64" or request.param[2:] not in ["arch=x86-64", *words]:
            pytest.skip(f"this processor cannot run {request.param}")
        flags = [request.param if flag == "-march=native" else flag for flag in _native.FLAGS]
        monkeypatch.setattr(_native, "FLAGS", tuple(flags))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _native._object_path.cache_clear()
    _native.forget()
    assert prepare_fold()
    yield
    monkeypatch.undo()
    _native._object_path.cache_clear()
    _native.forget()


def values(length: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(length, generator=draw) * 10.0 ** (60 * torch.rand(length, generator=draw) - 30)
    found[::7], found[::11], found[3::50] = -0.0, 1e-45, float("inf")
    return found


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
    assert add_and_print_blocks(to, source, 512, 11) == block_prints(wanted, 512, 11)
    assert bits(to) == bits(wanted)


@pytest.mark.parametrize("length", [*LENGTHS, 32768, 3 * 64, 6 * 64 + 1, 7 * 64 - 1])
def test_a_block_is_fingerprinted_and_measured_in_one_pass(compiled, length):
    block = values(length, length).nan_to_num(posinf=1.0).clamp(-1e16, 1e16)
    found, squares = look_at_block(block, 9)
    assert found == fingerprint_all([block], [9])
    assert squares == sum_of_squares(block)
    assert squares == pytest.approx(float(block.double().square().sum()), rel=1e-12)
    assert look_at_block(block.double(), 9)[1] == squares
    block[length // 2] = 1e20  # a float32 holds it, and not its square
    assert look_at_block(block, 9)[1] == sum_of_squares(block) == math.inf
    assert math.isfinite(look_at_block(block.double(), 9)[1])
    block[length // 2] = float("nan")
    assert math.isnan(look_at_block(block, 9)[1])


def test_without_the_one_pass_the_results_are_the_same(compiled, monkeypatch):
    rows = [[values(n, n + k) for n in LENGTHS] for k in range(2)]
    keys = list(range(len(LENGTHS)))
    one = [row.clone() for row in rows[0]], values(2000, 1)
    two = [row.clone() for row in rows[0]], values(2000, 1)
    first = Fold(one[0], keys).add(rows[1], fresh=False), add_and_print_blocks(one[1], values(2000, 2), 512, 0)
    monkeypatch.setattr(_native, "library", lambda _: None)
    second = Fold(two[0], keys).add(rows[1], fresh=False), add_and_print_blocks(two[1], values(2000, 2), 512, 0)
    assert first == second
    assert [bits(row) for row in [*one[0], one[1]]] == [bits(row) for row in [*two[0], two[1]]]
