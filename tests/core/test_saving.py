"""When the next save is due: what shortens the time to it, what lengthens it, and what it says about that."""

from __future__ import annotations

import math

import pytest

from outlast.core.policy import RunRecord

HOUR = 3600.0


def pacer(*, replicas: int = 2, blocked_s: float = 1.0, durable_s: float = 10.0, at_s: float = HOUR) -> RunRecord:
    made = RunRecord(min_s=10.0, num_replicas=replicas)
    made.begin(0.0)
    made.began(at_s)
    made.saved(blocked_s, durable_s)
    return made


def test_the_first_is_early_and_the_rest_follow_the_costs() -> None:
    fresh = RunRecord(min_s=10.0, num_replicas=2)
    fresh.begin(0.0)
    assert fresh.saving(1.0).interval_s == 10.0
    assert "the first save measures" in fresh.saving(1.0).reason
    cheap, dear = pacer(blocked_s=0.01), pacer(blocked_s=10.0)
    assert dear.saving(HOUR).interval_s > 15 * cheap.saving(HOUR).interval_s
    assert pacer(blocked_s=1e-9, durable_s=50_000.0).saving(HOUR).interval_s == 50_000.0, "never faster than written"


def test_losses_shorten_it_and_time_without_lengthens_it() -> None:
    calm, struck = pacer(), pacer()
    for at_s in (HOUR, 2 * HOUR, 3 * HOUR):
        struck.died(at_s, fleet=True)
    for each in (calm, struck):
        each.began(3 * HOUR + 60)
    at_s = 3 * HOUR + 61
    soon = struck.saving(at_s)
    assert soon.interval_s < calm.saving(at_s).interval_s / 3
    assert "the last failure was 61 s ago" in soon.reason
    struck.began(20 * HOUR)
    assert struck.saving(20 * HOUR).interval_s > 1.5 * soon.interval_s, "failures cluster"


def test_replicas_that_others_outlast_count_little() -> None:
    struck, lone = pacer(replicas=4), pacer(replicas=1)
    before = struck.saving(HOUR).mtbr_s
    for at in range(20):
        struck.died(HOUR + at, fleet=False)
        lone.died(HOUR + at + 1, fleet=True)
    after = struck.saving(HOUR + 20).mtbr_s
    assert lone.saving(HOUR + 20).mtbr_s < after < before


def test_an_unstable_loss_shortens_it_until_it_is_calm() -> None:
    calm, wild = pacer(blocked_s=30.0), pacer(blocked_s=30.0)
    for step in range(40):
        for each in (calm, wild):
            each.loss(2.0 + 0.01 * (step % 3))
    wild.loss(9.0)
    assert wild.saving(HOUR).interval_s < calm.saving(HOUR).interval_s / 2
    assert "out of its band" in wild.saving(HOUR).reason
    for step in range(16):
        wild.loss(2.0 + 0.01 * (step % 3))
    assert wild.saving(HOUR).interval_s == calm.saving(HOUR).interval_s
    wild.loss(math.nan)
    assert "out of its band" in wild.saving(HOUR).reason


def test_saves_that_fail_are_tried_again_later_and_later() -> None:
    tried = pacer(blocked_s=100.0)
    intervals = []
    for _ in range(4):
        tried.failed()
        intervals.append(tried.saving(HOUR).interval_s)
    assert intervals == [20.0, 40.0, 80.0, 160.0]
    tried.saved(100.0, 10.0)
    assert tried.saving(HOUR).interval_s > 160.0


def test_none_shortly_before_the_end() -> None:
    near = pacer()
    interval = near.saving(HOUR).interval_s
    near.ends(HOUR + interval / 2)
    assert near.due_s(HOUR) == math.inf
    assert "the loop ends in" in near.saving(HOUR).reason
    near.ends(HOUR + 50 * interval)
    assert near.due_s(HOUR) == pytest.approx(interval, rel=0.1)
    assert near.due_s(HOUR + 2 * interval) < 0


def test_after_a_loss_the_next_save_counts_from_there() -> None:
    """What was trained since the last save is gone with it: saving at once would keep nothing."""
    struck = pacer()
    struck.died(30 * HOUR, fleet=True)
    assert struck.due_s(30 * HOUR) == pytest.approx(struck.saving(30 * HOUR).interval_s)
    assert struck.due_s(30 * HOUR) > 10.0
