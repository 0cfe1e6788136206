"""When the next save is due: what shortens the time to it, what lengthens it, and what it says about that."""

from __future__ import annotations

import math
from collections import deque

import pytest

from outlast.core.policy._saving import Pacer, is_unstable

HOUR = 3600.0


def pacer(*, replicas: int = 2, blocked_s: float = 1.0, durable_s: float = 10.0) -> Pacer:
    made = Pacer(0.0, min_s=10.0, num_replicas=replicas)
    made.saved(blocked_s, durable_s)
    return made


def test_the_first_is_early_and_the_rest_follow_the_costs() -> None:
    fresh = Pacer(0.0, min_s=10.0, num_replicas=2)
    assert fresh.decide(1.0).interval_s == 10.0
    cheap, dear = pacer(blocked_s=0.01), pacer(blocked_s=10.0)
    assert dear.decide(HOUR).interval_s > 20 * cheap.decide(HOUR).interval_s
    assert pacer(blocked_s=1e-9, durable_s=500.0).decide(HOUR).interval_s >= 500.0, "never faster than it is written"


def test_losses_shorten_it_and_time_without_lengthens_it() -> None:
    calm, struck = pacer(), pacer()
    for at_s in (HOUR, 2 * HOUR, 3 * HOUR):
        struck.died(at_s, fleet=True)
        for each in (calm, struck):
            each.running(at_s, 2)
    at_s = 3 * HOUR + 60
    assert struck.decide(at_s).interval_s < calm.decide(at_s).interval_s / 1.9
    assert struck.decide(at_s + 10 * HOUR).interval_s > 1.5 * struck.decide(at_s).interval_s, "failures cluster"
    assert "the last failure was 60 s ago" in struck.decide(at_s).reason


def test_replicas_that_others_outlast_count_little_and_a_lone_one_fully() -> None:
    def after_deaths(replicas: int) -> float:
        made = pacer(replicas=replicas)
        before = made.decide(HOUR).mtbr_s
        for at in range(20):
            made.died(HOUR + at, fleet=False)
        return made.decide(HOUR + 20).mtbr_s / before

    assert after_deaths(1) < after_deaths(4) * 0.7


def test_an_unstable_loss_halves_it() -> None:
    calm, wild = pacer(), pacer()
    for step in range(32):
        for each in (calm, wild):
            each.loss(2.0 + 0.01 * (step % 3))
    wild.loss(9.0)
    assert wild.decide(HOUR).interval_s == pytest.approx(calm.decide(HOUR).interval_s / 2)
    assert "out of its band" in wild.decide(HOUR).reason


@pytest.mark.parametrize(
    ("losses", "unstable"),
    [
        ([], False),
        ([math.nan], True),
        ([1.0, math.inf], True),
        ([3.0, 2.0, 1.0], False),
        ([1.0 + 0.01 * (i % 5) for i in range(20)], False),
        ([1.0 + 0.01 * (i % 5) for i in range(20)] + [1.5], True),
        ([1.0] * 20 + [1.002], False),
    ],
)
def test_what_is_out_of_the_band(losses: list[float], unstable: bool) -> None:
    assert is_unstable(deque(losses)) is unstable


def test_saves_that_fail_are_tried_again_later_and_later() -> None:
    tried = pacer(blocked_s=100.0)
    intervals = []
    for _ in range(4):
        tried.failed()
        intervals.append(tried.decide(HOUR).interval_s)
    assert intervals == [20.0, 40.0, 80.0, 160.0]
    tried.saved(100.0, 10.0)
    assert tried.decide(HOUR).interval_s > 160.0


def test_none_shortly_before_the_end() -> None:
    near = pacer()
    interval = near.decide(HOUR).interval_s
    near.began(HOUR)
    near.saved(1.0, 10.0, ends_s=HOUR + interval)
    assert near.due_s(HOUR) == math.inf
    near.saved(1.0, 10.0, ends_s=HOUR + 3 * interval)
    assert near.due_s(HOUR) == pytest.approx(interval, rel=0.01)
    assert near.due_s(HOUR + 2 * interval) < 0
