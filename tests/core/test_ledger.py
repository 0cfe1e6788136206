"""Where the time of steps went: each second once, whoever measured it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.protocol import Ledger, StepTime


def steps(first: int, count: int, start_s: float, took_s: float = 0.1) -> list[StepTime]:
    return [
        StepTime(step=first + n, end_s=start_s + (n + 1) * took_s, took_s=took_s, first=not n) for n in range(count)
    ]


def take(ledger: Ledger, time: StepTime, now_s: float = 1e9) -> list[tuple[float, float]]:
    """Told at a moment by which nobody is waited for any more."""
    return ledger.take(time, now_s)


def test_what_two_members_tell_is_counted_once() -> None:
    ledger = Ledger()
    mine, theirs = steps(0, 10, 5.0), steps(0, 12, 5.003)
    for time in [*mine[:5], *theirs[:7], *mine[5:], *theirs[7:]]:
        take(ledger, time)
    (span,) = ledger.drain()
    assert (span.first, span.committed) == (0, 12)
    assert span.until_s == pytest.approx(5.003 + 1.2)
    assert span.seconds == {"productive": pytest.approx(1.203)}
    assert ledger.drain() == []


def test_all_that_are_stopped_between_their_commits_of_one_step_are_held_up_and_make_nothing() -> None:
    """One has committed step 4, the other has yet to; and the one that says first how long step 5 took is the other."""
    ledger = Ledger()
    mine, theirs = steps(0, 5, 5.0), steps(0, 4, 5.0)
    late = StepTime(step=4, end_s=7.6, took_s=2.2, stalled_s=2.1)
    for time in [*theirs, *mine, late, StepTime(step=5, end_s=7.7, took_s=0.1)]:
        take(ledger, time)
    (span,) = ledger.drain()
    assert span.seconds == {"productive": pytest.approx(0.7), "stalled": pytest.approx(2.0)}
    assert not ledger.explains(mine[3])
    assert ledger.explains(late)
    assert not ledger.explains(StepTime(step=5, end_s=7.71, took_s=2.2, stalled_s=2.1))  # it is told once


def test_the_commits_around_each_step_are_told() -> None:
    ledger = Ledger()
    first, second = steps(0, 2, 5.0)
    assert take(ledger, first) == [(pytest.approx(5.0), pytest.approx(5.1))]
    assert take(ledger, second) == [(pytest.approx(5.1), pytest.approx(5.2))]
    assert take(ledger, second) == []


def test_a_step_is_there_when_the_first_has_made_it_whoever_tells_it_first() -> None:
    """On a busy machine members commit a step many milliseconds apart: nothing was committed between who made it first
    and who makes the next one first."""
    ledger = Ledger()
    for time in steps(0, 3, 5.0):
        take(ledger, time)
    anew = StepTime(step=2, end_s=4.0, took_s=0.1)  # told late, by somebody who had made it before it was lost
    third = [StepTime(step=3, end_s=end_s, took_s=end_s - 5.3) for end_s in (5.46, 5.40, 5.43)]
    assert take(ledger, third[0]) == [(pytest.approx(5.3), 5.46)]
    assert [take(ledger, time) for time in (anew, *third[1:])] == [[], [], []]
    assert take(ledger, StepTime(step=4, end_s=6.7, took_s=1.27, outage_s=1.1, first=True)) == [(5.40, 6.7)]
    behind = StepTime(step=5, end_s=6.9, took_s=0.25)  # its own step 4 came before the one that was told
    assert take(ledger, behind) == [(pytest.approx(6.65), 6.9)]
    (span,) = ledger.drain()
    assert math.fsum(span.seconds.values()) == pytest.approx(1.9)


def test_steps_that_nobody_told_are_unexplained() -> None:
    ledger = Ledger()
    for time in [*steps(0, 3, 5.0), *steps(3, 5, 5.3)[2:]]:
        take(ledger, time)
    (span,) = ledger.drain()
    assert span.seconds == {"productive": pytest.approx(0.6), "unexplained": pytest.approx(0.2)}


def test_a_joiner_that_tells_its_first_step_first_waits_for_who_knows_the_ones_before() -> None:
    """Members tell their steps with heartbeats; who has just joined tells its first one at once."""
    ledger = Ledger(patience_s=3.0)
    whole = steps(0, 10, 5.0)
    joined = StepTime(step=8, end_s=5.901, took_s=0.05, first=True)
    assert [len(ledger.take(time, 5.3)) for time in whole[:3]] == [1, 1, 1]
    assert ledger.take(joined, 5.91) == []
    assert [len(ledger.take(time, 5.92)) for time in whole[3:8]] == [1, 1, 1, 1, 2]
    assert [len(ledger.take(time, 6.0)) for time in whole[8:]] == [0, 1]
    (span,) = ledger.drain()
    assert math.fsum(span.seconds.values()) == pytest.approx(1.0)
    assert span.seconds.get("recovery", 0.0) == pytest.approx(0.051)  # before it had formed its view
    assert "unexplained" not in span.seconds


def test_a_joiner_s_first_step_is_told_by_others_or_after_a_while_by_itself() -> None:
    """It does not know what that step took. Of those who do some may be dead, and then what lies before is recovery."""
    for others in (True, False):
        ledger = Ledger(patience_s=3.0)
        whole = steps(0, 10, 5.0)
        for time in whole[:5]:
            ledger.take(time, 5.55)
        assert ledger.take(StepTime(step=5, end_s=5.602, took_s=0.0, first=True), 5.61) == []
        if others:
            assert ledger.take(whole[5], 5.62) == [(pytest.approx(5.5), pytest.approx(5.6))]
        mine = StepTime(step=6, end_s=5.702, took_s=0.1)
        assert len(ledger.take(mine, 5.71)) == others
        assert [pair[1] for pair in ledger.settle(8.71)] == ([] if others else [pytest.approx(5.602), mine.end_s])
        (span,) = ledger.drain()
        assert span.committed == 7
        assert math.fsum(span.seconds.values()) == pytest.approx(0.702)
        assert span.seconds.get("recovery", 0.0) == pytest.approx(0.0 if others else 0.102)
        assert span.seconds.get("unexplained", 0.0) == 0.0


def test_nobody_is_waited_for_for_ever() -> None:
    ledger = Ledger(patience_s=3.0)
    for time in steps(0, 3, 5.0):
        ledger.take(time, 5.3)
    late = StepTime(step=8, end_s=5.9, took_s=0.1)
    assert ledger.take(late, 6.0) == ledger.settle(8.8) == []
    assert len(ledger.settle(8.95)) == 1
    assert ledger.drain()[0].seconds["unexplained"] == pytest.approx(0.5)


def test_steps_done_anew_are_counted_anew_and_the_time_between_is_recovery() -> None:
    ledger = Ledger()
    for time in [*steps(0, 10, 5.0), *steps(4, 3, 9.0)]:
        take(ledger, time)
    before, after = ledger.drain()
    assert (before.first, before.committed, after.first, after.committed) == (0, 10, 4, 7)
    assert after.seconds == {"recovery": pytest.approx(3.0), "productive": pytest.approx(0.3)}


def test_a_member_that_was_handed_the_step_that_others_committed_tells_no_second_twice() -> None:
    """It counts the outage into the step before; who was ahead counts it into the next one."""
    ledger = Ledger()
    for time in steps(0, 3, 5.0):
        take(ledger, time)
    behind = StepTime(step=2, end_s=6.0, took_s=0.8, outage_s=0.7)
    ahead = StepTime(step=3, end_s=6.1, took_s=0.8, outage_s=0.7, first=True)
    next_ = StepTime(step=3, end_s=6.101, took_s=0.101, first=True)
    taken = [time for time in (behind, ahead, next_) if take(ledger, time)]
    assert taken[0] is ahead
    (span,) = ledger.drain()
    assert math.fsum(span.seconds.values()) == pytest.approx(1.1, abs=0.01)
    assert span.seconds["recovery"] == pytest.approx(0.7)


def test_a_later_coordinator_goes_on_where_the_journal_ends() -> None:
    ledger = Ledger(5, 5.5)
    for time in steps(0, 10, 5.0):
        take(ledger, time)
    (span,) = ledger.drain()
    assert (span.first, span.committed) == (5, 10)
    assert span.seconds == {"productive": pytest.approx(0.5)}


seconds = st.floats(0.001, 5.0)
told = st.builds(
    lambda step, end, took, parts, first: StepTime(
        step, end, took, *[took * part / 8 for part in parts], first=first
    ),
    st.integers(0, 30), st.floats(1.0, 100.0), seconds, st.lists(st.floats(0, 1), min_size=5, max_size=5),
    st.booleans(),
)  # fmt: skip


@given(st.lists(told, max_size=30))
def test_whatever_is_told_no_moment_is_counted_twice(times: list[StepTime]) -> None:
    ledger = Ledger()
    begun = [time.end_s - time.took_s for time in times if take(ledger, time)]
    total = math.fsum(value for span in ledger.drain() for value in span.seconds.values())
    assert total == pytest.approx(ledger.until_s - begun[0] if begun else 0.0, abs=1e-6)
