"""Each rule against its definition, written from the papers as plain loops in float64, on random and hostile stacks."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outlast.core.policy import largest_f
from outlast.tensors import aggregate

rounds = partial(settings, derandomize=True)
TINY = float(np.float32(1e-45))
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0, 2.0, TINY, -TINY, 3 * TINY, 1e-38, 1e20, -1e20, 3e30]),
    st.floats(-10, 10, width=32),
)


@st.composite
def stacks(draw, rule, pre=()):
    """(stack float32, f): rows with ties, duplicates, a common offset, far rows, denormals, n down to the limit."""
    n = draw(st.integers(3, 11))
    most = largest_f(rule, n, pre)
    assume(most >= 0)
    f = draw(st.integers(max(0, most - 1), most))
    d = draw(st.integers(1, 7))
    rows = draw(st.lists(st.lists(VALUES, min_size=d, max_size=d), min_size=n, max_size=n))
    stack = np.array(rows, dtype=np.float32)
    for source, target in draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=4)):
        stack[target] = stack[source]
    offset = draw(st.sampled_from([0.0, 0.0, 1e4, -1e7]))
    return np.asarray(stack + np.float32(offset), dtype=np.float32), f


def ours(stack, rule, f, **options):
    return aggregate(torch.from_numpy(stack.copy()), rule, f=f, **options).double().numpy()


def near(a, b, stack):
    """Equal to float32's rounding, relative to the values at hand."""
    assert a == pytest.approx(b, rel=3e-7, abs=2e-45), stack


# --- coordinate-wise rules: exact up to the last rounding ---


@given(data=stacks("mean"))
@rounds(max_examples=80)
def test_mean(data):
    stack, _ = data
    wide = stack.astype(np.float64)
    expected = [math.fsum(column) / len(column) for column in wide.T]
    scale = np.abs(wide).max()
    assert ours(stack, "mean", 0) == pytest.approx(np.array(expected), rel=3e-7, abs=1e-14 * scale + 2e-45)


@given(data=stacks("median"))
@rounds(max_examples=80)
def test_median(data):
    stack, f = data
    near(ours(stack, "median", f), np.median(stack.astype(np.float64), axis=0), stack)


def trimmed(column, f):
    kept = sorted(column)[f : len(column) - f]
    return math.fsum(kept) / len(kept)


@given(data=stacks("trimmed_mean"))
@rounds(max_examples=80)
def test_trimmed_mean(data):
    stack, f = data
    wide = stack.astype(np.float64)
    for column, got in zip(wide.T, ours(stack, "trimmed_mean", f), strict=True):
        kept = sorted(column)[f : len(column) - f]
        assert got == pytest.approx(trimmed(column, f), rel=3e-7, abs=1e-14 * max(map(abs, kept)) + 2e-45)


def nearest_sets(column, keep):
    """All means that the definition allows: the `keep` values nearest to the median, ties broken any way."""
    median = float(np.median(column))
    order = sorted(column, key=lambda value: abs(value - median))
    edge = abs(order[keep - 1] - median)
    inside = [value for value in column if abs(value - median) < edge]
    ties = [value for value in column if abs(value - median) == edge]
    return [math.fsum([*inside, *some]) / keep for some in itertools.combinations(ties, keep - len(inside))]


@given(data=stacks("mean_around_median"))
@rounds(max_examples=60)
def test_mean_around_median(data):
    stack, f = data
    wide, keep = stack.astype(np.float64), len(stack) - f
    for column, got in zip(wide.T, ours(stack, "mean_around_median", f), strict=True):
        allowed = nearest_sets(column, keep)
        slack = 3e-7 * max(abs(value) for value in allowed) + 1e-14 * sorted(np.abs(column))[keep - 1] + 2e-45
        assert min(abs(got - value) for value in allowed) <= slack


# --- distance rules: exact decisions up to a stated tolerance ---


def squared(stack):
    wide = stack.astype(np.float64)
    return ((wide[:, None, :] - wide[None, :, :]) ** 2).sum(axis=2)


def tolerance(stack, f):
    """What the Gram matrix may be off by, for each pair: its grid is 2^-21 of each row's largest centred value."""
    wide = stack.astype(np.float64)
    first = min(len(wide), 2 * f + 1)
    center = np.sort(wide[:first], axis=0)[(first - 1) // 2]
    size = np.abs(wide - center).max(axis=1)
    error = (size[:, None] + size[None, :]) * 2.0**-20
    apart = np.sqrt(squared(stack))
    return math.sqrt(stack.shape[1]) * error * (2 * apart + error) * 2 + 1e-14 * (size[:, None] + size[None, :]) ** 2


def scores(distance, num_neighbours):
    others = [sorted(np.delete(row, i))[:num_neighbours] for i, row in enumerate(distance)]
    return np.array([math.fsum(row) for row in others])


@pytest.mark.parametrize(("rule", "less"), [("krum", 2), ("krum_all_honest", 1)])
@given(data=st.data())
@rounds(max_examples=60)
def test_krum(rule, less, data):
    stack, f = data.draw(stacks(rule))
    result = ours(stack, rule, f)
    score = scores(squared(stack), len(stack) - f - less)
    slack = (len(stack) - f) * tolerance(stack, f).max(axis=1)
    chosen = [i for i, row in enumerate(stack) if (row == result.astype(np.float32)).all()]
    assert chosen, "Krum's result is one of the rows"
    assert min(score[i] - slack[i] for i in chosen) <= min(score + slack)


@given(data=stacks("multi_krum"), m=st.integers(1, 8))
@rounds(max_examples=60)
def test_multi_krum(data, m):
    stack, f = data
    m = min(m, len(stack) - f)
    score = scores(squared(stack), len(stack) - f - 2)
    slack = float(((len(stack) - f) * tolerance(stack, f)).max())
    bound = sorted(score)[m - 1]
    sure = [i for i, s in enumerate(score) if s < bound - 2 * slack]
    maybe = [i for i, s in enumerate(score) if abs(s - bound) <= 2 * slack]
    wide = stack.astype(np.float64)
    allowed = [wide[[*sure, *some]].mean(axis=0) for some in itertools.combinations(maybe, m - len(sure))]
    result, size = ours(stack, "multi_krum", f, m=m), np.abs(wide).max()
    assert any(np.allclose(result, value, rtol=3e-7, atol=1e-13 * size + 2e-45) for value in allowed)


def diameter(distance, rows):
    return max((distance[i, j] for i, j in itertools.combinations(rows, 2)), default=0.0)


@given(data=stacks("minimum_diameter"))
@rounds(max_examples=50)
def test_minimum_diameter(data):
    stack, f = data
    distance, slack, wide = squared(stack), tolerance(stack, f), stack.astype(np.float64)
    subsets = list(itertools.combinations(range(len(stack)), len(stack) - f))
    best = min(diameter(distance + slack, rows) for rows in subsets)
    allowed = [wide[list(rows)].mean(axis=0) for rows in subsets if diameter(distance - slack, rows) <= best]
    result, size = ours(stack, "minimum_diameter", f), np.abs(wide).max()
    assert any(np.allclose(result, value, rtol=3e-7, atol=1e-13 * size + 2e-45) for value in allowed)


@given(data=stacks("geometric_median"))
@rounds(max_examples=40)
def test_geometric_median_has_the_least_sum_of_distances(data):
    stack, f = data
    wide = stack.astype(np.float64)
    result = ours(stack, "geometric_median", f)

    def cost(point):
        return math.fsum(np.sqrt(((wide - point) ** 2).sum(axis=1)))

    candidates = [*wide, np.median(wide, axis=0), wide.mean(axis=0), weiszfeld(wide)]
    spread = float(np.median(np.sqrt(((wide - np.median(wide, axis=0)) ** 2).sum(axis=1))))
    rounding = 1e-7 * float(np.abs(result).max() + 1e-38) * math.sqrt(stack.shape[1])
    best = min(cost(point) for point in candidates)
    assert cost(result) <= best * (1 + 1e-6) + len(stack) * (1e-5 * spread + rounding)


def weiszfeld(wide):
    point = np.median(wide, axis=0)
    for _ in range(500):
        weight = 1.0 / np.maximum(np.sqrt(((wide - point) ** 2).sum(axis=1)), 1e-12 * (1 + np.abs(point).max()))
        point = (weight[:, None] * wide).sum(axis=0) / weight.sum()
    return point


def test_bulyan_by_the_paper_s_two_phases():
    for seed in range(30):
        draw = np.random.default_rng(seed)
        f = int(draw.integers(0, 3))
        n = 4 * f + 3 + int(draw.integers(0, 3))
        stack = draw.normal(size=(n, 5)).astype(np.float32)
        stack[:f] += 50
        left, picked = list(range(n)), []
        while len(picked) < n - 2 * f:
            distance = squared(stack[left])
            score = scores(distance, max(1, len(left) - f - 2))
            picked.append(left.pop(int(np.argmin(score))))
        chosen = stack[sorted(picked)].astype(np.float64)
        keep = len(chosen) - 2 * f
        expected = [nearest_sets(column, keep)[0] for column in chosen.T]
        assert ours(stack, "bulyan", f) == pytest.approx(np.array(expected), rel=1e-6)


def test_centered_clipping_by_its_equation_with_memory():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        stack = draw.normal(size=(9, 6)).astype(np.float32)
        memory = draw.normal(size=6).astype(np.float32)
        point = memory.astype(np.float64)
        for _ in range(4):
            away = stack - point
            length = np.sqrt((away**2).sum(axis=1))
            point = point + (away * np.minimum(1, 0.7 / length)[:, None]).mean(axis=0)
        state = torch.from_numpy(memory)
        result = aggregate(torch.from_numpy(stack), "centered_clipping", f=2, state=state, radius=0.7, iterations=4)
        assert result.numpy() == pytest.approx(point, rel=1e-5, abs=1e-6)


def test_nearest_neighbour_mixing_clipping_and_bucketing_by_definition():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        n, f = 11, 3
        stack = draw.normal(size=(n, 7)).astype(np.float32) * 10 ** draw.uniform(-1, 1, size=(n, 1)).astype(np.float32)
        distance = squared(stack)
        mixed = np.array(
            [stack[np.argsort(row, kind="stable")[: n - f]].astype(np.float64).mean(axis=0) for row in distance]
        )
        expected = [trimmed(column, f) for column in mixed.T]
        assert ours(stack, "trimmed_mean", f, pre="nnm") == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)
        length = np.sqrt((stack.astype(np.float64) ** 2).sum(axis=1))
        cut = sorted(length, reverse=True)[2 * f * (n - f) // n]
        clipped = stack * np.minimum(1, cut / length)[:, None]
        expected = [trimmed(column, f) for column in clipped.T]
        assert ours(stack, "trimmed_mean", f, pre="clip") == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)


def test_bucketing_partitions_the_rows_by_seed():
    stack = torch.eye(10, dtype=torch.float64)
    results = {seed: aggregate(stack, "mean", pre="bucketing", bucket_size=3, seed=seed) for seed in range(5)}
    assert len({tuple(result.tolist()) for result in results.values()}) > 1
    for result in results.values():  # four groups of 3, 3, 3 and 1: a row counts 1/(4 x its group's size)
        assert sorted(round(1 / (4 * value)) for value in result.tolist()) == [1] + [3] * 9
    assert torch.equal(results[1], aggregate(stack, "mean", pre="bucketing", bucket_size=3, seed=1))
