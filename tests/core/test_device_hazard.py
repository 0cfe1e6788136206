"""A device's hazard: the prior before anything is known, the truth after much, and recency where there is any."""

from __future__ import annotations

import math
import random

import pytest

from outlast.core.policy import DeviceHazard
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
