"""The rows that a reader sees."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.core import events as ev
from outlast.observe import format_s, render_timeline, timeline


def test_each_recovery_is_one_row_with_its_figures(story: Any) -> None:
    rows = [row for row in timeline(story.whole) if row.kind == "recovery"]
    first = rows[0]
    assert first.noticed_by == "agent a0"
    assert (first.detect_s, first.downtime_s, first.microbatches_recomputed) == (0.01, 0.05, 2)
    assert first.since_s == pytest.approx(5.05)
    assert "r2.0" in first.what
    assert "SIGKILL" in first.what
    assert len(rows) == 2


def test_an_exit_that_led_to_a_recovery_is_told_once(story: Any) -> None:
    assert not [row for row in timeline(story.whole) if row.kind == "replica_exited"]
    unmended = [event for event in story.whole if not isinstance(event, ev.Recovery)]
    assert [row.what for row in timeline(unmended) if row.kind == "replica_exited"] == [
        "r2.0 ended in step 30 (signal: SIGKILL)"
    ]


def test_what_was_written_down_late_stands_where_it_happened(story: Any) -> None:
    """As on the page, which sorts by time."""
    stall = ev.Stall(at_s=story.start_s + 2.8, step=4, seconds=1.1, usual_s=0.1, replica="r1.0", phase="body")
    rows = timeline([*story.whole, stall])
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    assert [row.kind for row in rows].index("stall") < [row.kind for row in rows].index("joiner_caught_up")
    assert timeline([*story.whole, stall], everything=True)[-1].kind == "stall"


def test_everything_but_progress_can_be_asked_for(story: Any) -> None:
    rows = timeline(story.whole, everything=True)
    assert [row.kind for row in rows] == [
        str(event.__struct_config__.tag)
        for event in story.whole
        if not isinstance(event, ev.ProgressMade | ev.StepAnatomy)
    ]
    assert all(row.what and row.what != row.kind for row in rows)
    assert len(timeline(story.whole)) < len(rows)


def test_a_later_part_counts_from_the_run_s_start(story: Any) -> None:
    whole = timeline(story.whole)
    assert timeline(story.finished, start_s=story.start_s) == whole[-1:]


def test_every_kind_of_event_has_words() -> None:
    events: list[ev.AnyEvent] = [
        ev.Refused(at_s=1.0, reason="a replay", peer="127.0.0.1", count=1),
        ev.Refused(at_s=1.0, reason="no role", peer="a0", count=2, place="", stranger=False),
        ev.Notice(at_s=1.0, level="error", text="something"),
        ev.Suspected(at_s=1.0, replica="r1.0", evidence="state T", decision="evict"),
        ev.AgentLost(at_s=1.0, agent="a1", cause="exit 1", replicas=[]),
        ev.RunFinished(at_s=1.0, outcome="failed", steps=1, detail="poison", exit_code=5, seconds={}),
    ]
    rows = timeline(events)
    assert [row.what for row in rows] == [
        "a stranger without the run's secret spoke to the coordinator's port (127.0.0.1: a replay): ignored",
        "refused: no role, from a0 (2 times so far)",
        "something",
        "r1.0 suspected: state T; evicted",
        "agent a1 lost: exit 1; with it nobody",
        "run failed after 1 step: poison",
    ]
    assert [row.level for row in rows] == ["warning", "warning", "error", "warning", "warning", "error"]


def test_a_view_that_nobody_may_lie_in_is_told_whether_lowered_or_never_better() -> None:
    def said(action: Any, tolerated: int, most: int, lowered: bool) -> list[tuple[str, str]]:
        event = ev.RowsAdmitted(
            at_s=1.0, view=[1, 2], step=3, action=action, tolerated=tolerated, most_rows=most, trim_count=1,
            lowered=lowered, reason="so",
        )  # fmt: skip
        return [(row.level, row.what) for row in timeline([event])]

    assert said("go", 1, 1, False) == said("go", 0, 1, False) == []
    assert said("go", 0, 2, True) == [("error", "view 1.2 goes on and tolerates no liar: so")]
    assert said("go", 0, 2, False) == [("warning", "view 1.2 goes on and tolerates no liar: so")]
    assert said("go", 1, 1, True) == [("warning", "view 1.2 goes on, tolerating 1 liar: so")]
    assert said("wait", 0, 2, False) == [("warning", "view 1.2 waits for more replicas, it would tolerate 0 liars: so")]


def test_the_table_has_a_line_a_row(story: Any) -> None:
    lines = render_timeline(timeline(story.whole)).splitlines()
    assert lines[0].split() == ["WHEN", "NOTICED", "BY", "AFTER", "RECOMPUTED", "DOWNTIME", "WHAT"]
    assert len(lines) == 1 + len(timeline(story.whole))
    assert any("10 ms" in line and "50 ms" in line for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.053, "53 ms"), (0.9996, "1 s"), (1.25, "1.25 s"), (59.96, "1 min 00 s"), (123.4, "2 min 03 s"),
     (3900.0, "1 h 05 min")],
)  # fmt: skip
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_s(seconds) == text


def test_strangers_are_told_of_once_with_all_their_counts() -> None:
    def refused(at_s: float, place: str, reason: str, count: int) -> ev.Refused:
        return ev.Refused(at_s=at_s, place=place, reason=reason, peer="uid 7, pid 8", count=count)

    events = [
        refused(1.0, "r0.1's socket", "a replay", 1), refused(2.0, "r1.1's socket", "a replay", 1),
        refused(3.0, "r0.1's socket", "a replay", 3000), refused(4.0, "r0.1's socket", "too late", 1),
    ]  # fmt: skip
    words = "a stranger without the run's secret spoke to r0.1's socket and 1 other socket (uid 7, pid 8: a replay)"
    assert [row.what for row in timeline(events)] == [f"{words}: ignored; 3,001 more since"]
    assert len(timeline(events, everything=True)) == 4
    mute = "a connection that proved nothing in time"
    (row,) = timeline([refused(1.0, "r0.1's socket", mute, 1)])
    assert row.what == (
        f"a stranger, or a process of the run that was struck as it connected, spoke to r0.1's socket "
        f"(uid 7, pid 8: {mute}): ignored"
    )
    (row,) = timeline([refused(1.0, "r0.1's socket", mute, 2), refused(2.0, "r0.1's socket", "a replay", 1)])
    assert row.what.startswith("a stranger without the run's secret")
