"""A device's hazard: the prior before anything is known, the truth after much, and recency where there is any."""

from __future__ import annotations

import math
import random

import pytest

from outlast.core.policy import DeviceHazard, DeviceHistory, learn_ages, learn_recency
from outlast.errors import ConfigError

DAY = 86400.0


def test_the_prior_speaks_first_and_the_record_in_the_end() -> None:
    hazard = DeviceHazard(mean_rate=1e-3, shape=2.0)
    assert hazard.rate([], 0.0, 0.0) == pytest.approx(1e-3)
    assert hazard.rate([], 0.0, 2000.0) == pytest.approx(0.5e-3)
    assert hazard.base(5000, 1e6) == pytest.approx(5e-3, rel=0.01)


def test_a_failure_raises_the_hazard_for_a_while() -> None:
    hazard = DeviceHazard(mean_rate=1e-7, excite=0.3, decay_s=DAY)
    chances = [hazard.chance([0.0], after, 100 * DAY, DAY) for after in (0.0, DAY, 5 * DAY, 50 * DAY)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(1 - math.exp(-0.3 * (1 - math.exp(-1))), abs=0.01)
    assert hazard.chance([10.0], 0.0, 0.0, DAY) == hazard.chance([], 0.0, 0.0, DAY), "what is to come is not known"


def test_chances_are_as_often_true_as_they_say() -> None:
    """Devices drawn from the model itself, judged weekly: calibrated in quarters."""
    draw, made = random.Random(0), DeviceHazard(mean_rate=1 / (60 * DAY), shape=0.5, excite=0.4, decay_s=3 * DAY)
    said: list[tuple[float, bool]] = []
    for _ in range(400):
        own, times, now = draw.gammavariate(0.5, 2.0) / (60 * DAY) * 0.6, [], 0.0
        while now < 300 * DAY:  # thinning
            top = own + 0.4 / (3 * DAY) * sum(math.exp(-(now - t) / (3 * DAY)) for t in times) + 1e-12
            now += draw.expovariate(top)
            real = own + 0.4 / (3 * DAY) * sum(math.exp(-(now - t) / (3 * DAY)) for t in times)
            if draw.random() < real / top and now < 300 * DAY:
                times.append(now)
        for week in range(10, 40):
            at = week * 7 * DAY
            truth = any(at < t <= at + 7 * DAY for t in times)
            said.append((made.chance([t for t in times if t <= at], at, at, 7 * DAY), truth))
    said.sort()
    for quarter in range(4):
        part = said[quarter * len(said) // 4 : (quarter + 1) * len(said) // 4]
        told, seen = (sum(x) / len(part) for x in zip(*part, strict=True))
        assert told == pytest.approx(seen, abs=0.02 + 0.15 * seen)


@pytest.mark.parametrize("wrong", [{"mean_rate": 0.0}, {"shape": -1.0}, {"excite": 1.0}, {"decay_s": float("nan")}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DeviceHazard(**({"mean_rate": 1.0} | wrong))


def _courses(made: DeviceHazard, number: int, until_s: float) -> list[DeviceHistory]:
    """Drawn from the model itself, in steps of a two-hundredth."""
    draw, found = random.Random(1), []
    for _ in range(number):
        own, times, step = draw.gammavariate(made.shape, 1 / made.shape) * made.mean_rate, [], until_s / 200
        for at in range(200):
            now = at * step
            recent = sum(math.exp((t - now) / made.decay_s) for t in times) * made.excite / made.decay_s
            if draw.random() < (own * (1 - made.excite) * made.factor(now) + recent) * step:
                times.append(now)
        found.append(DeviceHistory(observed_s=until_s, failed_s=times))
    return found


def test_an_age_counts_as_much_as_it_is_heavy() -> None:
    bathtub = DeviceHazard(mean_rate=1e-3, shape=1e6, ages=((0.0, 3.0), (100.0, 1.0), (1000.0, 2.0)))
    assert bathtub.exposure(50.0) == 150.0
    assert bathtub.exposure(2000.0) == 300.0 + 900.0 + 2000.0
    assert [bathtub.rate([], age, age) for age in (0.0, 500.0, 5000.0)] == pytest.approx([3e-3, 1e-3, 2e-3], rel=1e-4)
    assert bathtub.chance([], 90.0, 90.0, 20.0) == pytest.approx(-math.expm1(-1e-3 * (30 + 10)), rel=1e-4)


def test_ages_are_learned_where_failures_tell_them_and_left_where_not() -> None:
    year = 365.25 * DAY
    ages = ((0.0, 0.5), (year, 3.0))
    made = DeviceHazard(mean_rate=0.2 / year, shape=50.0, ages=ages)
    prior = DeviceHazard(mean_rate=0.35 / year, shape=50.0)
    courses = _courses(made, 800, 2 * year)
    learned = learn_ages(courses, prior)
    assert learned.factor(1.9 * year) / learned.factor(0.9 * year) == pytest.approx(6.0, rel=0.35)
    assert sum(map(learned.log_likelihood, courses)) > sum(map(prior.log_likelihood, courses)) + 50
    few = learn_ages([DeviceHistory(observed_s=year, failed_s=[10.0])], prior)
    assert all(0.8 < factor < 1.2 for _, factor in few.ages), "one failure of one device says nothing of an age"
    assert learn_ages([DeviceHistory(observed_s=year)], prior) == prior


def test_recency_is_learned_where_failures_return_and_not_where_they_do_not() -> None:
    again = DeviceHazard(mean_rate=1 / (60 * DAY), shape=2.0, excite=0.35, decay_s=3 * DAY)
    calm = DeviceHazard(mean_rate=1 / (60 * DAY), shape=2.0)
    found = learn_recency(_courses(again, 150, 300 * DAY), calm)
    assert found.excite in (0.2, 0.35, 0.5)
    assert found.decay_s in (DAY, 3 * DAY, 10 * DAY)
    assert learn_recency(_courses(calm, 150, 300 * DAY), calm) == calm


def test_the_likelihood_of_a_course_is_that_of_the_hazard_summed_over_it() -> None:
    made = DeviceHazard(mean_rate=1e-3, shape=1.5, excite=0.3, decay_s=50.0, ages=((0.0, 2.0), (300.0, 0.7)))
    failed, until, step = [120.0, 150.0, 610.0], 1000.0, 0.1
    summed = sum(math.log(made.rate([t for t in failed if t < at], at, at)) for at in failed)
    for number in range(int(until / step)):
        at = (number + 0.5) * step
        summed -= made.rate([t for t in failed if t < at], at, at) * step
    told = made.log_likelihood(DeviceHistory(observed_s=until, failed_s=failed))
    assert told == pytest.approx(summed, abs=1e-3)


@pytest.mark.parametrize("ages", [((1.0, 1.0),), ((0.0, 1.0), (0.0, 2.0)), ((0.0, 0.0),), ((0.0, float("nan")),)])
def test_ages_that_cannot_be_are_refused(ages: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError):
        DeviceHazard(mean_rate=1.0, ages=ages)
