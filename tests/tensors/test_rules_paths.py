"""The same bits however it is computed: compiled or eager, in slices, in threads; and what must never be touched."""

from __future__ import annotations

import itertools
import math
import os
import platform
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from outlast.core.policy import RULES, largest_f
from outlast.tensors import BLOCK, _native, _paths, aggregate, make_rule, partial_grams, total_gram
from outlast.tensors._eager import center_and_round, tree_sum
from outlast.tensors._mixture import Mixture
from outlast.tensors._program import center_program, program_for

ALL = [(rule, pre) for rule in RULES for pre in [(), ("nnm",), ("clip",), ("bucketing",), ("clip", "nnm")]]
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler here: the eager path stands alone"
)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _native._object_path.cache_clear()
    _native.forget()
    yield tmp_path
    monkeypatch.undo()
    _native._object_path.cache_clear()
    _native.forget()


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kernels")))
        _native._object_path.cache_clear()
        _native.forget()
        yield
    _native._object_path.cache_clear()
    _native.forget()


def stack_of(n, d, *, seed=0, dtype=torch.float32, wild=False):
    draw = torch.Generator().manual_seed(seed)
    stack = torch.randn(n, d, generator=draw)
    if wild:
        stack *= 10.0 ** (60 * torch.rand(n, d, generator=draw) - 30)
        stack[torch.rand(n, d, generator=draw) < 0.2] = 0.0
        stack[1] = stack[0]
        stack[2, ::3] = -0.0
        stack[3, ::5] = 1e-45
    return stack.to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


@needs_compiler
@pytest.mark.parametrize("rule", ["mean", "median", "trimmed_mean", "mean_around_median"])
@pytest.mark.parametrize("n", [5, 16])
def test_compiled_programs_give_the_eager_bits(module_cache, rule, n):
    bound = make_rule(rule, num_rows=n, f=largest_f(rule, n) // 2)
    assert bound.prepare()
    for stack in (stack_of(n, 1000 + n), stack_of(n, 517, wild=True), stack_of(n, BLOCK + 3, dtype=torch.bfloat16)):
        rows = list(stack)
        assert bits(bound.aggregate(rows)) == bits(bound.aggregate(rows, compiled=False))


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "pre"),
    [("krum", ()), ("geometric_median", ()), ("trimmed_mean", ("nnm",)), ("bulyan", ()), ("median", ("clip", "nnm"))],
)
def test_compiled_distances_and_mixtures_give_the_eager_bits(module_cache, rule, pre):
    n = 11
    bound = make_rule(rule, num_rows=n, f=2, pre=pre)
    assert bound.prepare()
    for stack in (stack_of(n, 2 * BLOCK + 77), stack_of(n, 1033, wild=True), stack_of(n, 900, dtype=torch.float16)):
        rows = list(stack)
        a = bound.gram(rows)
        token = _paths.compiled_path.set(False)
        try:
            b = bound.gram(rows)
        finally:
            _paths.compiled_path.reset(token)
        assert bits(a) == bits(b)
        assert bits(bound.aggregate(rows)) == bits(bound.aggregate(rows, compiled=False))


@pytest.mark.parametrize("rows", [3, 8, 15])
def test_shared_sums_add_up_to_each_mixture_and_are_no_more_than_eleven_a_four(rows):
    draw = np.random.default_rng(rows)
    weights = (draw.random((rows, rows)) < 0.7) / rows
    weights[0] = draw.random(rows)  # not equal: row by row
    mixture = Mixture(weights=weights)
    pairs, numbers = mixture.shared
    held = [{row} for row in range(rows)]
    for left, right in pairs:
        assert not held[left] & held[right]
        held.append(held[left] | held[right])
    assert len(pairs) <= 11 * -(-rows // 4)
    assert numbers[0] == list(range(rows))
    for row, entry in zip(weights, numbers, strict=True):
        assert sorted(itertools.chain(*(held[number] for number in entry))) == np.flatnonzero(row).tolist()
    alone = Mixture(weights=np.full((1, rows), 1.0 / rows))
    assert alone.shared == ([], [list(range(rows))])


@needs_compiler
def test_centring_mixing_and_memory_give_the_eager_bits_with_more_rows_than_data(module_cache):
    stack = stack_of(9, 4001)
    bound = make_rule("centered_clipping", num_rows=9, f=2, pre=("clip", "nnm"))
    assert bound.prepare()
    state = stack_of(1, 4001, seed=5)[0]
    rows = list(stack)
    assert bits(bound.aggregate(rows, state)) == bits(bound.aggregate(rows, state, compiled=False))
    assert not torch.equal(bound.aggregate(rows, state), bound.aggregate(rows))


@pytest.mark.parametrize(("rule", "pre"), ALL)
def test_results_do_not_depend_on_slices(rule, pre):
    n, d = 11, 3 * BLOCK + 50
    f = min(1, largest_f(rule, n, pre))
    bound = make_rule(rule, num_rows=n, f=f, pre=pre)
    rows = list(stack_of(n, d)[:, ::1])
    whole = bound.aggregate(rows)
    for cuts in ([0, BLOCK, d], [0, 2 * BLOCK, 3 * BLOCK, d]):
        parts = [[row[a:b] for row in rows] for a, b in itertools.pairwise(cuts)]
        if not bound.needs_gram:
            assert torch.equal(torch.cat([bound.reduce(part) for part in parts]), whole)
            continue
        sums = [partial_grams(bound.gram(part), a // BLOCK, 4) for part, a in zip(parts, cuts[:-1], strict=True)]
        mixture = bound.select(total_gram(sums, 4))
        assert torch.equal(torch.cat([bound.combine(part, mixture) for part in parts]), whole)


def test_partial_grams_are_few_and_give_the_tree_s_bits():
    for num_blocks in range(1, 20):
        blocks = torch.randn(num_blocks, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(num_blocks))
        whole = tree_sum(blocks)
        for first in range(num_blocks):
            for second in range(first, num_blocks):
                pieces = [(0, first), (first, second), (second, num_blocks)]
                sums = [partial_grams(blocks[a:b], a, num_blocks) for a, b in pieces if b > a]
                assert all(len(part) <= 2 * num_blocks.bit_length() for part in sums)
                assert torch.equal(total_gram(sums, num_blocks), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_tiles_are_exact_so_any_order_gives_the_same_bits(dtype):
    stack = stack_of(6, 128, wild=True).to(dtype)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1)).tolist()
    for term in center_and_round(list(stack), stack.median(dim=0).values):
        for a, b in itertools.product(term[:, 0], repeat=2):
            products = (a * b).tolist()
            assert sum(products) == sum(products[k] for k in order) == math.fsum(products)


def test_the_number_of_threads_changes_nothing():
    rows = list(stack_of(9, 5 * BLOCK))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append([aggregate(rows, rule, f=2) for rule in ("trimmed_mean", "geometric_median")])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("whose", ["torch's", "its own"])
def test_threads_share_the_compiled_work(module_cache, three_threads, monkeypatch, whose):
    if whose == "its own":
        monkeypatch.setattr(_native, "_team", lambda: None)
    elif _native._team() is None:
        pytest.skip("torch runs its operations without OpenMP here")
    bound = make_rule("trimmed_mean", num_rows=5, f=1, pre="nnm")
    assert bound.prepare()
    rows = list(stack_of(5, 4 * BLOCK + 9))
    halves = [row.bfloat16() for row in rows]  # copied to be read, a few blocks at a time
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(bound.aggregate, of) for of in [rows, halves] * 3]
        shared = [call.result() for call in calls]
    alone = [bound.aggregate(of, compiled=False) for of in [rows, halves] * 3]
    assert all(torch.equal(a, b) for a, b in zip(shared, alone, strict=True))


FORKED = """
import os, signal, torch
from outlast.tensors import BLOCK, make_rule
torch.set_num_threads(2)
rule = make_rule("krum", num_rows=5, f=1)
assert rule.prepare()
rows = list(torch.randn(5, 3 * BLOCK))
before = rule.aggregate(rows).numpy().tobytes()  # torch's team of threads exists now, and a child has none of them
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    os._exit(0 if rule.aggregate(rows).numpy().tobytes() == before else 1)
assert os.waitpid(pid, 0)[1] == 0
"""


@needs_compiler
def test_a_fork_of_a_process_with_threads_does_not_wait_for_them(module_cache):
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of another processor")
@pytest.mark.parametrize("flags", ["-march=x86-64", "-mavx2 -mfma", "-mavx512f"])
def test_every_width_of_vectors_gives_the_same_bits(fresh_cache, monkeypatch, flags):
    words = [word.removeprefix("-m") for word in flags.split() if not word.startswith("-march")]
    have = Path("/proc/cpuinfo").read_text().split()
    if not all(word in have for word in words):
        pytest.skip(f"this processor cannot run {flags}")
    monkeypatch.setattr(_native, "FLAGS", (*flags.split(), *(f for f in _native.FLAGS if f != "-march=native")))
    _native._object_path.cache_clear()
    rows = list(stack_of(7, BLOCK + 200))
    for rule, pre in [("krum", ()), ("geometric_median", ("clip",)), ("trimmed_mean", ("nnm",)), ("median", ())]:
        bound = make_rule(rule, num_rows=7, f=1, pre=pre)
        assert bound.prepare()
        if bound.needs_gram:
            with_path = bound.gram(rows)
            token = _paths.compiled_path.set(False)
            assert torch.equal(with_path, bound.gram(rows))
            _paths.compiled_path.reset(token)
        assert torch.equal(bound.aggregate(rows), bound.aggregate(rows, compiled=False))


@pytest.mark.parametrize(("rule", "pre"), ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_float_type_comes_back_and_inputs_stay(rule, pre, dtype):
    stack = stack_of(11, 300, dtype=dtype)
    before = stack.clone()
    strided = stack.t().contiguous().t()
    assert strided.stride(1) != 1
    f = min(1, largest_f(rule, 11, pre))
    result = aggregate(stack, rule, f=f, pre=pre)
    assert result.dtype == dtype
    assert bool(torch.isfinite(result).all())
    assert torch.equal(result, aggregate(strided, rule, f=f, pre=pre))
    assert torch.equal(stack, before)
    assert aggregate(stack[:, :0], rule, f=f, pre=pre).shape == (0,)


def test_half_types_are_computed_in_float32():
    stack = stack_of(9, 500, dtype=torch.bfloat16)
    for rule in ("mean", "trimmed_mean", "krum", "geometric_median"):
        f = min(2, largest_f(rule, 9))
        wide = aggregate(stack.float(), rule, f=f)
        assert torch.equal(aggregate(stack, rule, f=f), wide.to(torch.bfloat16))


def test_a_parameter_that_wants_gradients_gets_none():
    stack = torch.randn(5, 8, requires_grad=True)
    assert not aggregate(stack, "median", f=2).requires_grad
    assert stack.grad is None


@needs_compiler
def test_objects_are_private_published_whole_and_found_again(fresh_cache):
    program = program_for("median", 3, 1)
    assert _native.library(program) is None
    assert _native.build(program)
    folder = _native.cache_folder()
    (made,) = folder.iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o500
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    _native.forget()
    assert _native.library(program) is not None
    made.chmod(0o722)  # someone else could have written it: not loaded
    _native.forget()
    assert _native.library(program) is None


def test_a_damaged_object_is_left_alone(fresh_cache):
    program = program_for("median", 3, 1)
    path = _native._object_path(program)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"not an object")
    path.chmod(0o500)
    assert _native.library(program) is None
    assert make_rule("median", num_rows=3, f=1).aggregate(list(stack_of(3, 9))).shape == (9,)


def test_without_a_compiler_everything_still_runs(fresh_cache, monkeypatch):
    monkeypatch.setattr(_native, "_compiler", lambda: None)
    _native._object_path.cache_clear()
    bound = make_rule("krum", num_rows=7, f=1)
    assert not bound.prepare()
    assert bound.aggregate(list(stack_of(7, 100))).shape == (100,)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_not_an_error(tmp_path, monkeypatch):
    (tmp_path / "outlast").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _native._object_path.cache_clear()
    _native.forget()
    try:
        assert not _native.build(center_program(3))
    finally:
        monkeypatch.undo()
        _native._object_path.cache_clear()
    assert os.environ.get("XDG_CACHE_HOME") != str(tmp_path)
