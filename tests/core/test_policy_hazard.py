"""When the next save pays: Young's interval where the hazard is constant, and what each input changes."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from outlast.core.policy import Losses, next_save_s
from outlast.errors import ConfigError

MEAN_S, COST_S = 14_400.0, 30.0


def learnt(shape: float, num: int = 400) -> Losses:
    losses, rng = Losses(prior_s=MEAN_S), random.Random(3)
    for _ in range(num):
        losses.observe(rng.weibullvariate(MEAN_S / math.gamma(1 + 1 / shape), shape))
    return losses


def test_a_constant_hazard_gives_youngs_interval() -> None:
    young = math.sqrt(2 * MEAN_S * COST_S)
    for age_s in (600.0, MEAN_S, 3 * MEAN_S):
        assert next_save_s(learnt(1.0, 4000), age_s=age_s, cost_s=COST_S) == pytest.approx(young, rel=0.15)


@pytest.mark.parametrize("shape", [0.6, 0.7, 1.0])
def test_the_record_s_hazard_is_found_whatever_the_prior_said(shape: float) -> None:
    """0.7 lies between the shapes considered."""
    scale = MEAN_S / math.gamma(1 + 1 / shape)
    for prior in (0.1, 1.0, 10.0):
        losses, rng = Losses(prior_s=prior * MEAN_S), random.Random(5)
        for _ in range(400):
            losses.observe(rng.weibullvariate(scale, shape))
        for age_s in (1000.0, 5000.0, 20_000.0):
            assert losses.course(0.0).at(age_s) == pytest.approx(
                shape / scale * (age_s / scale) ** (shape - 1), rel=0.35
            )


def test_saves_are_dense_after_a_loss_and_sparse_long_after() -> None:
    losses = learnt(0.6)
    spans = [next_save_s(losses, age_s=age, cost_s=COST_S) for age in (0.0, 600.0, MEAN_S, 5 * MEAN_S)]
    assert spans == sorted(spans)
    assert spans[-1] > 2 * spans[0]


def test_the_density_integrates_to_one_between_two_saves() -> None:
    """Against a brute-force sum, at age 0 too, where the hazard has a pole."""
    losses = learnt(0.6)
    for age in (0.0, 50.0, 5000.0):
        span = next_save_s(losses, age_s=age, cost_s=COST_S)
        course, total, num = losses.course(age), 0.0, 20_000
        edges = [age + span * (i / num) ** 3 for i in range(num + 1)]
        for a, b in itertools.pairwise(edges):
            total += math.sqrt(course.at((a + b) / 2) / (2 * COST_S)) * (b - a)
        assert total == pytest.approx(1.0, rel=0.02)


def test_each_input_moves_the_interval_its_way() -> None:
    losses = learnt(0.6)
    plain = next_save_s(losses, age_s=600.0, cost_s=COST_S)
    assert next_save_s(losses, age_s=600.0, cost_s=COST_S, extra=1 / 900) < plain / 1.5
    assert next_save_s(losses, age_s=600.0, cost_s=COST_S, share=0.05) > 3 * plain
    assert next_save_s(losses, age_s=600.0, cost_s=COST_S, least_s=10 * plain) == 10 * plain
    assert next_save_s(losses, age_s=600.0, cost_s=0.0, least_s=7.0) == 7.0


def test_a_whole_number_of_saves_fits_what_is_left() -> None:
    losses = learnt(1.0, 4000)
    young = next_save_s(losses, age_s=MEAN_S, cost_s=COST_S)
    assert next_save_s(losses, age_s=MEAN_S, cost_s=COST_S, left_s=0.5 * young) == math.inf
    two = next_save_s(losses, age_s=MEAN_S, cost_s=COST_S, left_s=1.7 * young)
    assert two == pytest.approx(1.7 * young / 2, rel=0.1)
    assert next_save_s(losses, age_s=MEAN_S, cost_s=COST_S, left_s=200 * young) == pytest.approx(young, rel=0.01)


def test_before_the_first_loss_the_prior_speaks() -> None:
    short, long = (next_save_s(Losses(prior_s=p), age_s=60.0, cost_s=COST_S) for p in (MEAN_S, 100 * MEAN_S))
    assert 3 * short < long < 40 * short


def test_a_wrong_prior_yields_to_a_few_losses_and_to_none() -> None:
    """Told a tenth or ten times the truth: within a factor of two of the right rate after five losses."""
    for prior in (0.1, 10.0):
        losses = Losses(prior_s=prior * MEAN_S, shapes=(1.0,))
        before = losses.course(0.0).at(MEAN_S)
        for _ in range(5):
            losses.observe(MEAN_S)
        after = losses.course(0.0).at(MEAN_S)
        assert abs(math.log(after * MEAN_S)) < min(math.log(2.0), abs(math.log(before * MEAN_S)) / 2)
    calm = Losses(prior_s=0.1 * MEAN_S)
    assert calm.course(3 * MEAN_S).at(600.0) < calm.course(1.0).at(600.0) / 5, "that nothing failed is evidence"


def test_regret_asks_for_fewer_saves_than_seconds_do() -> None:
    vague = Losses(prior_s=MEAN_S)
    assert vague.course(600.0).at(600.0) < vague.course(600.0, floor=1.0).at(600.0)


def test_only_the_shape_without_memory_has_a_constant_hazard() -> None:
    course = Losses(prior_s=MEAN_S, shapes=(1.0,)).course(60.0)
    assert course.at(10.0) == pytest.approx(course.at(1e5))
    assert Losses(prior_s=MEAN_S).course(60.0).at(10.0) > 2 * course.at(10.0)


@pytest.mark.parametrize(("field", "value"), [("weight", 0.5), ("spread", 1.0), ("shapes", ()), ("shapes", (0.0, 1.0))])
def test_a_prior_of_no_width_or_shape_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Losses(prior_s=MEAN_S, **{field: value})


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_prior_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="prior_s"):
        Losses(prior_s=wrong)
