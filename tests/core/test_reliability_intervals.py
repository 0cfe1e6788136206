"""Intervals, ladders and makespans: against brute force, quadrature and simulation of the definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from outlast.core import reliability as rel
from outlast.errors import ConfigError

sizes = st.floats(min_value=1e-3, max_value=10)


def test_the_facts_intervals() -> None:
    write, mtbf = 1.0, 50_000 / 512 * 60  # minutes
    assert rel.young_interval(write, mtbf) == pytest.approx(108.25, abs=0.01)
    assert rel.exact_interval(write, mtbf) == pytest.approx(107.59, abs=0.01)
    assert rel.first_order_waste(rel.young_interval(write, mtbf), write, mtbf) == pytest.approx(0.0185, abs=5e-5)
    assert rel.daly_interval(write, mtbf) == pytest.approx(rel.exact_interval(write, mtbf), rel=1e-4)


@given(sizes, st.floats(min_value=0.0, max_value=5))
@settings(max_examples=60)
def test_exact_interval_is_the_minimum(ratio: float, recovery: float) -> None:
    def cost(log_t: float) -> float:
        t = np.exp(log_t)
        return float(np.log(rel.expected_segment(t, ratio, 1.0, recovery) / t))

    best = minimize_scalar(cost, bounds=(-12, 4), method="bounded", options={"xatol": 1e-10})
    assert rel.exact_interval(ratio, 1.0) == pytest.approx(np.exp(best.x), rel=1e-4)


@given(st.floats(min_value=1e-9, max_value=1e-3))
@settings(max_examples=40)
def test_exact_interval_keeps_its_digits_when_writes_are_cheap(ratio: float) -> None:
    t = float(rel.exact_interval(ratio, 1.0))  # the root of 1 - t = exp(-(t + c)), in a form that does not cancel
    assert np.log1p(-t) + t + ratio == pytest.approx(0.0, abs=1e-7 * ratio)


def _simulate_segment(rng: np.random.Generator, length: float, mtbf: float, recovery: float, size: int) -> np.ndarray:
    total = np.zeros(size)
    target, left = np.full(size, length), np.ones(size, dtype=bool)
    while left.any():
        fail = rng.exponential(mtbf, size)
        done = left & (fail >= target)
        total[left] += np.minimum(fail, target)[left]
        finished = done & (target == length)
        target = np.where(done, length, recovery)  # a recovery that passes leads to a new try; a failure to a recovery
        left &= ~finished
    return total


@pytest.mark.parametrize(("length", "recovery"), [(0.5, 0.2), (1.5, 0.7), (0.01, 0.3)])
def test_segment_mean_and_variance(length: float, recovery: float) -> None:
    drawn = _simulate_segment(np.random.default_rng(1), length, 1.0, recovery, 200_000)
    assert rel.expected_segment(length, 0.0, 1.0, recovery) == pytest.approx(drawn.mean(), rel=0.02)
    assert rel.segment_variance(length, 0.0, 1.0, recovery) == pytest.approx(drawn.var(), rel=0.05)


def test_makespan_without_failures_is_the_work_and_its_writes() -> None:
    span = rel.makespan(100.0, 10.0, 1.0, 1e12, 5.0)
    assert span.mean == pytest.approx(109.0, rel=1e-6)
    assert span.sd < 0.02
    assert rel.makespan(100.0, 10.0, 1.0, 50.0, 5.0).quantile(0.9) > rel.makespan(100.0, 10.0, 1.0, 50.0, 5.0).mean


def test_one_level_ladder_is_the_closed_form() -> None:
    ladder = rel.Ladder(interval=0.3, every=(1,))
    assert rel.ladder_ettr(ladder, [0.05], [1.0], [0.2]) == pytest.approx(
        float(rel.ettr(0.3, 0.05, 1.0, 0.2)), rel=1e-12
    )


def test_ladder_where_all_failures_need_the_far_tier_is_one_level_with_longer_segments() -> None:
    far = rel.ladder_ettr(rel.Ladder(interval=0.1, every=(1, 4)), [0.01, 0.05], [0.0, 1.0], [0.1, 0.2])
    same = 0.4 / float(rel.expected_segment(0.4, 0.09, 1.0, 0.2))
    assert far == pytest.approx(same, rel=1e-12)


def test_optimal_ladder_beats_its_neighbours() -> None:
    writes, rates, recoveries = [0.002, 0.05], [0.9, 0.1], [0.02, 0.2]
    ladder, value = rel.optimal_ladder(writes, rates, recoveries)
    for factor in (0.8, 1.25):
        other = rel.Ladder(interval=ladder.interval * factor, every=ladder.every)
        assert rel.ladder_ettr(other, writes, rates, recoveries) < value
    single = rel.ettr(rel.exact_interval(0.052, 1.0), 0.052, 1.0, 0.2)
    assert value > float(single) + 0.05
    with pytest.raises(ConfigError, match="no multiple"):
        rel.Ladder(interval=1.0, every=(1, 4, 6))


@pytest.mark.parametrize("far_rate", [0.0, 1e-7])
def test_a_level_that_hardly_fails_is_written_rarely(far_rate: float) -> None:
    writes, rates, recoveries = [5.0, 60.0], [1 / 1_209_600, far_rate / 1_209_600], [60.0, 60.0]
    ladder, value = rel.optimal_ladder(writes, rates, recoveries)
    assert ladder.every == (1, 64)
    assert value > rel.ladder_ettr(rel.Ladder(interval=ladder.interval, every=(1, 4)), writes, rates, recoveries)


def test_silent_overhead_against_simulation() -> None:
    rng, t, v, c, r, lf, ls = np.random.default_rng(2), 0.4, 0.02, 0.05, 0.1, 0.5, 0.8
    total, rounds = 0.0, 20_000
    for _ in range(rounds):
        while True:
            fail, silent = rng.exponential(1 / lf), rng.exponential(1 / ls)
            if fail < t + v:
                total += fail
            elif silent < t:
                total += t + v
            else:
                fail = rng.exponential(1 / lf)
                total += t + v + min(fail, c)
                if fail >= c:
                    break
            while (fail := rng.exponential(1 / lf)) < r:
                total += fail
            total += r
    assert rel.silent_overhead(t, c, v, lf, ls, r) == pytest.approx(total / rounds / t, rel=0.02)
    best = minimize_scalar(
        lambda x: float(rel.silent_overhead(x, 1e-4, 1e-4, lf, ls)), bounds=(1e-3, 1), method="bounded"
    )
    assert rel.silent_interval(1e-4, 1e-4, lf, ls) == pytest.approx(best.x, rel=0.05)


def test_general_interval_is_the_exact_one_for_an_exponential() -> None:
    life = rel.Exponential(rate=1.0)
    assert rel.general_interval(life, 0.02) == pytest.approx(float(rel.exact_interval(0.02, 1.0)), rel=1e-3)
    # infant mortality makes long lives longer: fewer writes are better than the exponential with the same mean
    assert rel.general_interval(rel.Weibull(shape=0.6, scale=1.0), 0.02) != pytest.approx(0.2, rel=0.01)


def test_prediction_and_overlap() -> None:
    assert rel.predicted_interval(1.0, 100.0, 0.75) == pytest.approx(2 * rel.young_interval(1.0, 100.0))
    assert rel.async_interval(1.0, 60.0, 1e4) == pytest.approx(float(rel.exact_interval(1.0, 1e4)))
    assert rel.async_interval(0.01, 600.0, 1e4) == 600.0
    waste = [float(rel.predicted_waste(10.0, 1.0, 500.0, 5.0, recall, 0.8, 1.0)) for recall in (0.0, 0.5, 0.9)]
    assert waste == sorted(waste, reverse=True)


def test_cluster_formula() -> None:
    assert rel.ettr_cluster(100, 6.5e-3 / 24, 0.5, 1.0, 0.05) == pytest.approx((1 - 100 * 6.5e-3 / 24 * 1.0) / 1.05)
    assert rel.ettr_cluster(1e9, 1.0, 1.0, 1.0, 0.0) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: rel.young_interval(-1, 10),
        lambda: rel.exact_interval(1, 0),
        lambda: rel.ettr(1, 1, float("nan")),
        lambda: rel.predicted_interval(1, 10, 1.0),
        lambda: rel.silent_interval(1, 1, 0, 0),
        lambda: rel.async_interval(5, 1, 10),
        lambda: rel.optimal_ladder([1, 2], [0, 0], [1, 1]),
    ],
)
def test_nonsense_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        call()
