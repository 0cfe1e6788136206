"""What a member says that the time of a step was used for, on a clock that is set by hand."""

from __future__ import annotations

import os

import pytest

from outlast.core.phases import Phase
from outlast.core.protocol import Ledger, StepTime
from outlast.runtime.member._heartbeat import Pace
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    """Of a member of three that has made five steps of 0.1 s."""
    made = Pace(Progress(Region(Progress.SIZE)), clock)
    made.formed(0.0, 0.0)
    for step in range(5):
        clock.now_s += 0.1
        made.committed(step, 3)
    assert [time.step for time in made.steps()] == list(range(5))
    return made


def next_step(pace: Pace, clock: Clock, took_s: float, members: int = 3, held_s: float = 0.0) -> StepTime:
    clock.now_s += took_s
    pace.committed(5, members, held_s)
    (told,) = pace.steps()
    assert told.took_s == pytest.approx(took_s)
    assert sum(told.seconds().values()) == pytest.approx(took_s)
    return told


def change_view(pace: Pace, clock: Clock, after_s: float, without_s: float) -> None:
    """The view is left, and the next one has formed after a time without one."""
    clock.now_s += after_s
    left_at_s = clock.now_s
    clock.now_s += without_s
    pace.formed(left_at_s, 0.0)


def test_a_usual_step_is_work(pace: Pace, clock: Clock) -> None:
    assert next_step(pace, clock, 0.15).seconds()["productive"] == pytest.approx(0.15)
    assert not pace.resumed


@pytest.mark.parametrize(("wanted", "missing_s"), [(3, 0.05), (2, 0.0), (1, 0.0), (4, 0.075), (0, 0.0)])
def test_the_share_of_who_is_missing_of_those_that_are_wanted(
    wanted: int, missing_s: float, pace: Pace, clock: Clock
) -> None:
    told = next_step(pace, clock, 0.15, members=2).seconds(wanted)
    assert (told["degraded"], told["productive"]) == (pytest.approx(missing_s), pytest.approx(0.15 - missing_s))


def test_what_a_save_held_up_is_no_work_and_no_stall(pace: Pace, clock: Clock) -> None:
    told = next_step(pace, clock, 1.1, held_s=1.0)
    assert (told.held_s, told.stalled_s) == (pytest.approx(1.0), 0.0)
    assert told.seconds()["productive"] == pytest.approx(0.1)


def test_a_step_far_beyond_the_usual_stood_still_where_it_was_longest(pace: Pace, clock: Clock) -> None:
    pace.passed(Phase.BACKWARD, 0.05)
    pace.passed(Phase.BODY, 9.0)
    pace.passed(Phase.HEADER, 0.05)
    told = next_step(pace, clock, 9.1)
    assert told.stalled_s == pytest.approx(9.0)
    assert told.phase == Phase.BODY
    clock.now_s += 0.1
    pace.committed(6, 3)
    assert pace.steps()[0].stalled_s == 0.0
    assert pace.step_s < 0.3  # it teaches little


def test_steps_that_stay_slow_become_the_usual(pace: Pace, clock: Clock) -> None:
    told = [next_step_of(pace, clock, step, 2.0) for step in range(5, 25)]
    assert told[0].stalled_s > 1.5
    assert told[-1].stalled_s == 0.0


def next_step_of(pace: Pace, clock: Clock, step: int, took_s: float, members: int = 3) -> StepTime:
    clock.now_s += took_s
    pace.committed(step, members)
    return pace.steps()[0]


@pytest.mark.parametrize(("left", "again", "again_s"), [(2, 1 / 3, 0.05), (1, 2 / 3, 0.2)])
def test_a_change_of_the_view_is_an_outage_and_the_step_s_own_time_is_not(
    pace: Pace, clock: Clock, left: int, again: float, again_s: float
) -> None:
    """What is computed again takes those who are left longer than it took all: beside a stopwatch, 65 ms told as 26."""
    clock.now_s += 0.6
    pace.formed(clock.now_s - 0.2, again)
    clock.now_s += 0.15
    pace.committed(5, left)
    (told,) = pace.steps()
    assert pace.resumed
    assert told.first
    assert told.took_s == pytest.approx(0.75)
    assert told.seconds(wanted=3) == {
        "productive": pytest.approx(0.1 * left / 3), "degraded": pytest.approx(0.1 * (3 - left) / 3),
        "checkpoint": 0.0, "stalled": pytest.approx(0.0), "recovery": pytest.approx(0.75 - 0.1 - again_s),
        "lost": pytest.approx(again_s),
    }  # fmt: skip


@pytest.mark.parametrize("made", [1, 5])
def test_a_wait_for_others_is_no_work_however_few_steps_were_made(made: int, clock: Clock) -> None:
    """Two of three wait in a view of their own for 5 s, and the next one has formed 0.1 s later."""
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.formed(0.0, 0.0)
    for step in range(made):
        clock.now_s += 0.1
        pace.committed(step, 3)
    pace.steps()
    change_view(pace, clock, 0.05, 0.2)
    pace.waits()
    change_view(pace, clock, 5.0, 0.1)
    clock.now_s += 0.05
    pace.committed(made, 3)
    (told,) = pace.steps()
    assert told.outage_s == pytest.approx(5.3)
    assert told.seconds()["productive"] == pytest.approx(0.1)
    assert told.stalled_s == pytest.approx(0.0)


def test_a_wait_before_a_view_is_left_is_no_work_of_the_third_step_either(clock: Clock) -> None:
    """A member was stopped there: 0.55 s without a commit were told as a downtime, and counted as work."""
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.formed(0.0, 0.0)
    for step, took_s in enumerate((0.09, 0.05)):
        clock.now_s += took_s
        pace.committed(step, 3)
    pace.steps()
    change_view(pace, clock, 0.52, 0.03)
    clock.now_s += 0.05
    pace.committed(2, 3)
    (told,) = pace.steps()
    assert told.seconds()["productive"] == pytest.approx(0.05)
    assert told.outage_s == pytest.approx(0.55)


def test_who_is_stopped_in_its_second_step_did_not_work_all_the_while(clock: Clock) -> None:
    """It had come by joining, was the only one that was left, and was stopped for 2 s. The next steps are as before;
    where all are slow from then on that is what is usual."""
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.formed(0.0, 0.0)
    pace.replayed()
    clock.now_s += 0.05
    pace.committed(313, 1)
    for step, took_s in enumerate((0.013, 2.06, 0.016, 0.3)):
        clock.now_s += took_s
        pace.committed(314 + step, 1)
    _, first, held, after, slow = pace.steps()
    assert (first.stalled_s, after.stalled_s) == (0.0, 0.0)
    assert held.seconds()["productive"] == pytest.approx(0.013)
    assert held.stalled_s == pytest.approx(2.047)
    assert slow.stalled_s == pytest.approx(0.3 - 0.03, abs=0.02)
    for step in range(40):
        clock.now_s += 0.3
        pace.committed(400 + step, 1)
    assert pace.steps()[-1].stalled_s == 0.0


def test_views_that_come_and_go_in_one_step_are_all_outages(clock: Clock) -> None:
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.formed(0.0, 0.0)
    clock.now_s += 0.1
    pace.committed(0, 3)
    pace.steps()
    for _ in range(2):
        left_at_s = clock.now_s
        clock.now_s += 2.0
        pace.formed(left_at_s, 0.0)
        clock.now_s += 0.05
    pace.committed(1, 3)
    (told,) = pace.steps()
    assert told.outage_s == pytest.approx(4.0)
    assert told.seconds()["productive"] == pytest.approx(0.1)


def test_a_view_that_was_left_before_a_step_is_no_outage_of_the_next(clock: Clock) -> None:
    """The step was handed over to this one as the view formed."""
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.formed(0.0, 0.0)
    clock.now_s += 0.1
    pace.committed(0, 3)
    left_at_s = clock.now_s
    clock.now_s += 2.0
    pace.formed(left_at_s, 0.0)
    pace.committed(1, 3)
    pace.steps()
    pace.formed(left_at_s, 0.0)
    clock.now_s += 0.1
    pace.committed(2, 3)
    assert pace.steps()[0].seconds()["productive"] == pytest.approx(0.1)


def test_a_run_whose_first_view_waits_has_yet_to_begin(clock: Clock) -> None:
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.formed(0.0, 0.0)
    pace.waits()
    clock.now_s += 5.0
    pace.formed(clock.now_s - 0.1, 0.0)
    clock.now_s += 0.1
    pace.committed(0, 3)
    (told,) = pace.steps()
    assert told.took_s == told.seconds()["productive"] == pytest.approx(0.1)


@pytest.mark.parametrize("first_to_tell", ["joiner", "other"])
def test_what_holds_all_up_soon_after_a_join_is_no_work_whoever_tells_first(
    first_to_tell: str, pace: Pace, clock: Clock
) -> None:
    """A joiner does not know yet how long steps take."""
    joiner = Pace(Progress(Region(Progress.SIZE)), clock)
    both, ledger = {"joiner": joiner, "other": pace}, Ledger(5, clock.now_s, patience_s=3.0)
    joiner.replayed()
    joiner.formed(clock.now_s - 0.1, 0.0)
    for step, took_s in ((5, 0.1), (6, 0.1), (7, 5.1), (8, 0.1)):
        clock.now_s += took_s
        for each in both.values():
            each.committed(step, 4)
        for name in sorted(both, key=lambda name: name != first_to_tell):
            for time in both[name].steps():
                ledger.take(time, clock.now_s)
    (span,) = ledger.drain()
    assert (span.first, span.committed) == (5, 9)
    assert span.seconds.get("stalled", 0.0) == pytest.approx(5.0)
    assert span.seconds["productive"] == pytest.approx(0.4)


def test_a_joiner_leaves_its_first_step_to_those_who_made_the_one_before(clock: Clock) -> None:
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.replayed()
    clock.now_s += 0.3
    pace.formed(clock.now_s - 0.1, 0.0)
    for step in (40, 41):
        clock.now_s += 0.1
        pace.committed(step, 2)
    first, told = pace.steps()
    assert (first.step, first.took_s, first.end_s) == (40, 0.0, pytest.approx(told.end_s - 0.1))
    assert (told.step, told.first) == (41, True)  # if nobody else is left, what lies before it is the change
    assert told.seconds()["productive"] == pytest.approx(0.1)


def test_a_joiner_that_is_alone_at_once_tells_its_first_step_itself(clock: Clock) -> None:
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.replayed()
    clock.now_s += 0.3
    pace.formed(0.0, 0.0)
    clock.now_s += 0.1
    pace.committed(40, 1)
    (told,) = pace.steps()
    assert (told.step, told.first, told.took_s) == (40, True, pytest.approx(0.1))  # what lies before it is the change
    assert told.seconds(wanted=2) == {
        "productive": pytest.approx(0.05), "degraded": pytest.approx(0.05), "checkpoint": 0.0, "stalled": 0.0,
        "recovery": 0.0, "lost": 0.0,
    }  # fmt: skip


def test_who_is_left_does_the_work_of_who_has_gone_as_planned(pace: Pace, clock: Clock) -> None:
    clock.now_s += 0.1
    pace.formed(clock.now_s - 0.02, 0.0)
    clock.now_s += 0.1
    pace.committed(5, 2)
    (told,) = pace.steps()
    assert told.outage_s == pytest.approx(0.05)
    assert told.took_s - told.outage_s == pytest.approx(0.15)


def test_another_process_reads_the_newest_steps_of_one_that_is_dead(clock: Clock) -> None:
    region = Region(Progress.SIZE)
    pace = Pace(Progress(region), clock)
    pace.formed(0.0, 0.0)
    for step in range(3000):
        clock.now_s += 0.01
        pace.committed(step, 1)
    seen = Progress(Region(Progress.SIZE, fd=os.dup(region.fd)))
    assert seen.num_commits == 3000
    assert [time.step for time in seen.commits()] == list(range(3000 - 1024, 3000))
    assert seen.commits()[-1].end_s == pytest.approx(clock.now_s)
    assert pace.steps(again=True) == seen.commits()
    assert pace.steps() == ()


def changed(pace: Pace, clock: Clock, step: int, took_s: float, members: int, again: float = 0.0) -> StepTime:
    """The view changes in it, for 5 ms."""
    clock.now_s += took_s / 2
    pace.formed(clock.now_s - 0.005, again)
    clock.now_s += took_s / 2
    pace.committed(step, members)
    return pace.steps()[-1]


def test_what_a_step_takes_is_known_for_each_number_of_members(pace: Pace, clock: Clock) -> None:
    """A joiner holds nobody up for longer than the change takes, though steps had just become three times as long."""
    changed(pace, clock, 5, 0.305, 1, 2 / 3)
    alone = [next_step_of(pace, clock, step, 0.3, 1) for step in (6, 7)]
    assert [time.outage_s + time.stalled_s for time in alone] == [0.0, 0.0]
    joined = changed(pace, clock, 8, 0.31, 2)
    assert joined.outage_s == pytest.approx(0.01)
    joined = changed(pace, clock, 9, 0.16, 3)
    assert joined.outage_s == pytest.approx(0.0, abs=0.02)
    assert pace.step_s == pytest.approx(0.1)  # as it was when there were three
    gone = changed(pace, clock, 10, 0.405, 1, 2 / 3)
    assert (gone.redone_s, gone.outage_s) == (pytest.approx(0.2), pytest.approx(0.105))


def test_one_that_is_left_of_eight_is_not_held_up_by_its_work(clock: Clock) -> None:
    pace = Pace(Progress(Region(Progress.SIZE)), clock)
    pace.formed(0.0, 0.0)
    for step in range(5):
        clock.now_s += 10.0
        pace.committed(step, 8)
    changed(pace, clock, 5, 85.0, 1, 7 / 8)
    assert [next_step_of(pace, clock, step, 80.0, 1).stalled_s for step in range(6, 10)] == [0.0] * 4
