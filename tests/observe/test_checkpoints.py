"""Saves in the account, the status, the story and its rows."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from tests.observe.conftest import START_S, started, training

from outlast.core import events as ev
from outlast.observe import accounting, render_status, status, timeline, why
from outlast.observe.checkpoint_words import describe, matters


def saved(at_s: float, step: int, **more: Any) -> ev.CheckpointSaved:
    given = {
        "generation": step // 10, "view": [1, 1], "num_writers": 4, "state_bytes": 1 << 30, "written_bytes": 1 << 29,
        "blocked_s": 0.25, "copied_s": 0.5, "durable_s": 2.0, "reason": "every 10 steps", "url": "/c",
    }  # fmt: skip
    return ev.CheckpointSaved(at_s=START_S + at_s, step=step, **{**given, **more})


def failed(at_s: float, cause: Any = "writer_failed", reason: str = "writer 0: No space left on device") -> Any:
    return ev.CheckpointFailed(at_s=START_S + at_s, step=30, cause=cause, reason=reason, url="/c")


def ended(at_s: float) -> ev.ProgressMade:
    return ev.ProgressMade(at_s=START_S + at_s, view=[1, 1], stable=40, losses=[(39, 2.0)], step_s=0.1)


def test_what_saves_held_up_is_their_share_of_the_account() -> None:
    """Members measure it step by step, of saves that come to nothing too; the saves' own word is not counted again."""
    more = msgspec.structs.replace(
        ended(10.0), first=20, committed=40, committed_at_s=START_S + 10.0,
        seconds={"productive": 5.5, "checkpoint": 0.5},
    )  # fmt: skip
    account = accounting([*started(), *training(), saved(5.0, 10), saved(6.0, 20), more])
    assert account.checkpoint_s == 0.5
    assert account.productive_s == pytest.approx(2.0 + 5.5)


def test_the_headline_tells_saves_that_failed() -> None:
    """Who reads one line only must not take a run for saved that is not."""
    end = ev.RunFinished(at_s=START_S + 12.0, outcome="finished", steps=40, detail="", exit_code=0, seconds={})
    calm = [*started(), *training(), ended(9.0), saved(9.1, 40), end]
    assert why(calm).headline == "The run finished; nothing failed."
    some = [*started(), *training(), saved(5.0, 10), failed(6.0), failed(7.0), end]
    assert why(some).headline == (
        "The run finished; 2 saves failed, the newest save is of step 10, and 30 steps are in none."
    )
    none = [*started(), *training(), failed(6.0), end]
    assert why(none).headline == "The run finished; 1 save failed, and there is no checkpoint."


def test_the_status_tells_the_last_save_and_a_later_failure() -> None:
    events: list[ev.AnyEvent] = [*started(), *training(), saved(5.0, 10), ended(9.0)]
    shown = render_status(status(events))
    assert "last save: step 10, generation 1, 4 s before the last event (/c)" in shown
    assert "No space" not in shown
    events += [failed(9.5), failed(9.6, "superseded", "step 40 was published first")]
    assert "the newest try failed: writer 0: No space left on device" in render_status(status(events))
    assert "failed" not in render_status(status([*events, saved(10.0, 40)]))


def test_a_lost_fleet_begins_at_an_earlier_step() -> None:
    lost = ev.FleetGone(at_s=START_S + 5.0, step=20, detail="r0.1: signal")
    back = ev.ProgressMade(at_s=START_S + 9.0, view=[1, 2], stable=12, losses=[(11, 3.0)], step_s=0.1)
    assert status([*started(), *training(), lost, back]).step == 12
    (row,) = [row for row in timeline([*started(), *training(), lost]) if row.kind == "fleet_lost"]
    assert row.level == "error"


def test_a_save_that_failed_has_a_remedy() -> None:
    story = why([*started(), *training(), failed(5.0), failed(6.0), failed(7.0, "view_changed"), ended(9.0)])
    assert [(a.cause, a.count) for a in story.advice] == [("a full disk under the checkpoints", 2)]
    rows = [row.what for row in story.timeline if row.kind == "checkpoint_failed"]
    assert len(rows) == 2
    assert "training goes on, older generations stay" in rows[0]


KINDS = [kind for kind in typing.get_args(ev.AnyEvent) if kind.__name__.startswith("Checkpoint")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_about_checkpoints_has_words(kind: type[Any]) -> None:
    values: dict[Any, Any] = {str: "x", int: 1, float: 1.0, bool: True, list[int]: [1], dict[str, int]: {"disk": 5}}
    values[float | None] = None
    fields = {f.name: values.get(f.type, "writer_failed") for f in msgspec.structs.fields(kind)}
    event = kind(**fields)
    assert ev.decode(ev.encode(event)) == event
    words = describe(event)
    assert words is not None
    assert len(words[0]) > 10
    assert matters(event) in (True, False)
