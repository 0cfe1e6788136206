"""Where the time went: the parts are always the whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core import events as ev
from outlast.observe import Accounting, accounting


def total(account: Accounting) -> float:
    return sum(value for name, value in account.seconds().items() if name != "wall")


def test_a_run_by_hand(story: Any) -> None:
    account = accounting(story.whole)
    assert account.wall_s == pytest.approx(12.0)
    assert account.idle_s == pytest.approx(2.0 + 1.0)  # until the first view formed, and after the last step
    assert account.recovery_s == pytest.approx(0.06)
    assert account.lost_s == pytest.approx(0.1 * 1 / 3)  # 2 orphans over 3 members: one more each, of three each
    assert account.degraded_s == pytest.approx((7.05 - 5.05) / 4)
    assert account.checkpoint_s == 0.0
    assert total(account) == pytest.approx(12.0)
    assert account.ettr == pytest.approx(account.productive_s / 12.0)


def test_lost_steps_cost_their_time(story: Any) -> None:
    recovery = msgspec.structs.replace(story.killed[3], lost_steps=5)
    events = [*story.started, *story.training, *story.killed[:3], recovery, *story.killed[4:], *story.finished]
    assert accounting(events).lost_s == pytest.approx(0.1 * (5 + 1 / 3))


def test_faults_that_one_view_mended_were_redone_once(story: Any) -> None:
    twice = [*story.killed[:4], story.killed[3], *story.killed[4:]]
    events = [*story.started, *story.training, *twice, *story.finished]
    assert accounting(events).lost_s == pytest.approx(0.1 * 1 / 3)


def test_overlapping_recoveries_count_once(story: Any) -> None:
    second = msgspec.structs.replace(story.killed[3], at_s=story.killed[3].at_s + 0.02, replica="r3.0")
    events = [*story.started, *story.training, *story.killed[:4], second, *story.killed[4:], *story.finished]
    assert accounting(events).recovery_s == pytest.approx(0.08)


def test_a_run_that_goes_on_is_counted_up_to_now(story: Any) -> None:
    events = [*story.started, *story.training]
    account = accounting(events, now_s=story.start_s + 10.0)
    assert account.wall_s == pytest.approx(10.0)
    assert account.idle_s == pytest.approx(2.0)
    assert accounting(story.whole, now_s=story.start_s + 1e6) == accounting(story.whole)


def test_a_run_that_never_formed_is_idle(story: Any) -> None:
    account = accounting(story.started, now_s=story.start_s + 5.0)
    assert account.idle_s == account.wall_s == pytest.approx(5.0)
    assert accounting([]).wall_s == 0.0


def _installed(at: float, members: int, planned: bool) -> ev.ViewInstalled:
    names = [f"r{member}.0" for member in range(members)]
    return ev.ViewInstalled(at_s=at, epoch=1, n=1, members=names, cause="", planned=planned, num_microbatches=8)


def _recovery(at: float, detect: float, down: float, orphans: int, lost: int) -> ev.Recovery:
    return ev.Recovery(
        at_s=at, cause="signal", replica="r0.0", noticed_by="a0", detect_s=detect, downtime_s=down,
        microbatches_recomputed=orphans, lost_steps=lost, step=0, view=[1, 1],
    )  # fmt: skip


def _progress(at: float, step: float) -> ev.Progress:
    return ev.Progress(at_s=at, view=[1, 1], stable=1, losses=[], step_s=step)


def _formed(at: float) -> ev.ViewFormed:
    return ev.ViewFormed(at_s=at, epoch=1, n=1, step=0, roll_call_s=0.0)


def _finished(at: float) -> ev.RunFinished:
    return ev.RunFinished(at_s=at, outcome="finished", steps=1, detail="", exit_code=0, seconds={})


times, counts, spans = st.floats(0.0, 100.0), st.integers(0, 20), st.floats(0.0, 50.0)
happenings = st.one_of(
    st.builds(_installed, times, st.integers(1, 6), st.booleans()),
    st.builds(_formed, times),
    st.builds(_progress, times, st.floats(0, 2)),
    st.builds(_recovery, times, spans, spans, counts, counts),
    st.builds(_finished, times),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(happenings, max_size=12), st.none() | st.floats(0.0, 200.0))
def test_the_parts_are_the_whole_whatever_happens_and_however_clocks_jump(
    events: list[ev.AnyEvent], now_s: float | None
) -> None:
    start = ev.RunStarted(at_s=0.0, run_id="x", command=[], num_replicas=4, num_spares=0, signature={}, config={})
    account = accounting([start, *events], now_s=now_s)
    assert total(account) == pytest.approx(account.wall_s, abs=1e-6)
    assert min(msgspec.structs.astuple(account)) >= 0.0
    assert 0.0 <= account.ettr <= 1.0
