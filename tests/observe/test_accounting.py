"""Where the time went: the parts are always the whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core import events as ev
from outlast.observe import Accounting, accounting
from outlast.observe._accounting import AccountingFold


def total(account: Accounting) -> float:
    return sum(value for name, value in account.seconds().items() if name != "wall")


def counted(at: float, first: int, committed: int, **seconds: float) -> ev.ProgressMade:
    return ev.ProgressMade(
        at_s=at, view=[1, 1], stable=committed, losses=[], step_s=0.1, first=first, committed=committed,
        committed_at_s=at, seconds=seconds,
    )  # fmt: skip


def started(at: float = 0.0) -> ev.RunStarted:
    return ev.RunStarted(at_s=at, run_id="x", command=[], num_replicas=4, num_spares=0, signature={}, config={})


def finished(at: float, outcome: Any = "finished", steps: int = 1) -> ev.RunFinished:
    return ev.RunFinished(at_s=at, outcome=outcome, steps=steps, detail="", exit_code=0, seconds={})


def test_a_run_by_hand(story: Any) -> None:
    account = accounting(story.whole)
    assert account.wall_s == pytest.approx(12.0)
    assert account.idle_s == pytest.approx(2.0 + 1.0)  # until the first view formed, and after the last step
    assert account.productive_s == pytest.approx(2.0 + 1.0 + 2.4 + 3.0)
    assert account.recovery_s == pytest.approx(0.06)
    assert account.lost_s == pytest.approx(0.04)
    assert account.degraded_s == pytest.approx(0.5)
    assert account.checkpoint_s == account.stalled_s == 0.0
    assert account.unexplained_s == pytest.approx(0.0, abs=1e-9)
    assert account.ettr == pytest.approx(account.productive_s / 12.0)


def test_a_second_that_nobody_tells_of_is_unexplained() -> None:
    account = accounting([started(), counted(3.0, 0, 10, productive=2.0), counted(6.0, 10, 20, productive=1.5)])
    assert account.idle_s == pytest.approx(1.0)
    assert account.unexplained_s == pytest.approx(1.5)


def test_steps_that_were_done_twice_are_lost_once() -> None:
    """From the progress of the first time, in part where the checkpoint lies between two words of it."""
    events = [
        started(), counted(2.0, 0, 10, productive=1.0, degraded=1.0), counted(3.0, 10, 20, productive=1.0),
        ev.FleetGone(at_s=3.5, step=20, detail=""),
        counted(7.0, 5, 10, productive=1.0, recovery=3.0), counted(9.0, 10, 20, productive=2.0), finished(9.0),
    ]  # fmt: skip
    account = accounting(events)
    assert account.lost_s == pytest.approx(0.5 + 0.5 + 1.0)
    assert account.productive_s == pytest.approx(0.5 + 1.0 + 2.0)
    assert account.degraded_s == pytest.approx(0.5)
    assert account.recovery_s == pytest.approx(3.0)
    assert account.unexplained_s == pytest.approx(0.0, abs=1e-9)


def test_what_a_rewind_takes_back_is_lost() -> None:
    verdict = ev.VerdictReached(
        at_s=3.0, step=20, action="rewind", evidence="", confidence="certain", remedy="", to_step=15
    )
    events = [started(), counted(3.0, 0, 20, productive=2.0), verdict, counted(4.0, 20, 30, productive=1.0)]
    account = accounting([*events, finished(4.0)])
    assert account.lost_s == pytest.approx(0.5)
    assert account.productive_s == pytest.approx(2.5)


@pytest.mark.parametrize("outcome", ["failed", "stopped"])
def test_of_a_run_that_did_not_finish_what_no_checkpoint_holds_is_lost(outcome: str) -> None:
    events = [started(), counted(3.0, 0, 30, productive=3.0), finished(3.0, outcome)]
    assert accounting(events).lost_s == pytest.approx(3.0)
    saved = ev.CheckpointSaved(
        at_s=2.0, step=20, generation=1, view=[1, 1], num_writers=1, state_bytes=1, written_bytes=1, blocked_s=0.0,
        copied_s=0.0, durable_s=0.0, reason="", url="",
    )  # fmt: skip
    assert accounting([*events[:1], saved, *events[1:]]).lost_s == pytest.approx(1.0)
    assert accounting([*events[:2], finished(3.0)]).lost_s == 0.0


def test_a_fleet_that_never_came_back_was_recovering_to_the_end() -> None:
    lost = ev.FleetGone(at_s=3.1, step=30, detail="")
    account = accounting([started(), counted(3.0, 0, 30, productive=3.0), lost, finished(8.0, "failed")])
    assert account.recovery_s == pytest.approx(5.0)
    assert account.idle_s == 0.0


def test_the_wall_goes_on_until_the_last_process_has_ended() -> None:
    events = [started(), counted(3.0, 0, 30, productive=3.0), finished(3.5), ev.RunEnded(at_s=5.0, exit_code=0)]
    account = accounting(events)
    assert account.wall_s == 5.0
    assert account.idle_s == pytest.approx(2.0)


def test_a_running_run_that_is_silent_is_stalled() -> None:
    events = [started(), counted(3.0, 0, 30, productive=3.0)]
    assert accounting(events, now_s=4.0).productive_s == pytest.approx(4.0)
    assert accounting(events, now_s=9.0).stalled_s == pytest.approx(6.0)


def test_a_running_run_that_waits_for_replicas_recovers() -> None:
    """From its last step on; told of a step that was made later, it waits no more."""
    wait = ev.VacancyDecided(at_s=3.5, action="wait", running=1, wanted=2, least=2, wait_s=None, reason="1 is left")
    events = [started(), counted(3.0, 0, 30, productive=3.0), wait]
    for now_s in (4.0, 9.0):
        account = accounting(events, now_s=now_s)
        assert account.recovery_s == pytest.approx(now_s - 3.0)
        assert (account.productive_s, account.stalled_s) == (pytest.approx(3.0), 0.0)
    went_on = msgspec.structs.replace(wait, at_s=3.6, action="shrink")
    assert accounting([*events, went_on], now_s=4.0).productive_s == pytest.approx(4.0)
    assert accounting([*events, counted(8.0, 30, 31, recovery=4.9, productive=0.1)], now_s=8.5).recovery_s < 5.0


def test_an_older_journal_is_read_with_what_it_says() -> None:
    """It has the number of steps and their mean time."""
    old = [
        ev.ProgressMade(at_s=at, view=[1, 1], stable=stable, losses=[], step_s=0.1) for at, stable in ((2, 10), (4, 25))
    ]
    account = accounting([started(), *old, finished(5.0)])
    assert account.productive_s == pytest.approx(2.5)
    assert account.idle_s == pytest.approx(2.0)
    assert account.unexplained_s == pytest.approx(0.5)


def test_a_run_that_goes_on_is_counted_up_to_now(story: Any) -> None:
    events = [*story.started, *story.training]
    account = accounting(events, now_s=story.start_s + 10.0)
    assert account.wall_s == pytest.approx(10.0)
    assert account.idle_s == pytest.approx(2.0)
    assert account.stalled_s == pytest.approx(6.0)  # since the newest commit that is known
    assert accounting(story.whole, now_s=story.start_s + 1e6) == accounting(story.whole)


def test_a_run_that_never_formed_is_idle(story: Any) -> None:
    account = accounting(story.started, now_s=story.start_s + 5.0)
    assert account.idle_s == account.wall_s == pytest.approx(5.0)
    assert accounting([]).wall_s == 0.0


names = st.sampled_from(
    ["productive", "degraded", "checkpoint", "stalled", "recovery", "lost", "unexplained", "another"]
)
times, counts, spans = st.floats(0.0, 100.0), st.integers(0, 20), st.floats(0.0, 50.0)
happenings = st.one_of(
    st.builds(lambda at, first, end, seconds: counted(at, first, end, **seconds), times, counts, counts,
              st.dictionaries(names, spans, max_size=4)),
    st.builds(lambda at: ev.FleetGone(at_s=at, step=0, detail=""), times),
    st.builds(finished, times, st.sampled_from(["finished", "failed", "stopped"])),
    st.builds(lambda at, to: ev.VerdictReached(at_s=at, step=20, action="rewind", evidence="", confidence="certain",
                                        remedy="", to_step=to), times, counts),
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(happenings, max_size=12), st.none() | st.floats(0.0, 200.0))
def test_the_parts_are_the_whole_whatever_happens_and_however_clocks_jump(
    events: list[ev.AnyEvent], now_s: float | None
) -> None:
    account = accounting([started(), *events], now_s=now_s)
    assert total(account) == pytest.approx(account.wall_s, abs=1e-6)
    assert min(msgspec.structs.astuple(account)) >= 0.0
    assert 0.0 <= account.ettr <= 1.0


@pytest.mark.parametrize(("to", "after"), [(15, []), (0, []), (15, [counted(4.0, 20, 30, productive=1.0)])])
def test_what_no_checkpoint_holds_is_counted_with_what_a_rewind_took_back(to: int, after: list[ev.AnyEvent]) -> None:
    verdict = ev.VerdictReached(
        at_s=3.0, step=20, action="rewind", evidence="", confidence="certain", remedy="", to_step=to
    )
    fold = AccountingFold()
    story = [counted(2.0, 0, 10, productive=1.0), counted(3.0, 10, 20, productive=1.0), verdict, *after]
    for event in [started(), *story, finished(4.0, "failed")]:
        fold.take(event)
    assert fold.gone == (30 if after else 20)


@pytest.mark.parametrize(("steps", "gone"), [(10, 10), (13, 13), (0, 10)])
def test_steps_whose_times_nobody_could_tell_any_more_are_in_vain_as_well(steps: int, gone: int) -> None:
    """The last member was woken as the run ended: its coordinator knew how far it was, and had no word of the steps."""
    fold = AccountingFold()
    for event in [started(), counted(2.0, 0, 10, productive=1.0), finished(4.0, "stopped", steps)]:
        fold.take(event)
    assert fold.gone == gone
