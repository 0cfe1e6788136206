"""Saves that overlap each other, view changes, evictions and coordinators: the journal proves that they did."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.generations import assert_generations, began, failed, position, strike

from outlast.core import events as ev
from outlast.core.phases import Phase

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def keep(place: Path, every: int = 1, num_slots: int = 3) -> dict[str, Any]:
    return {"dir": str(place), "every": every, "num_slots": num_slots, "keep_last": 100}


def views(run: Any) -> list[list[int]]:
    return [e.view for e in run.driven.events if isinstance(e, ev.ViewInstalled)]


def test_two_in_flight_and_the_coordinator_restarts(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Its publisher hangs at the second save; a third begins; then it is killed, and the writers repeat themselves."""
    place = tmp_path / "c"
    run = fleet(
        strike("coordinator.1", Phase.PUBLISH_BEGAN, 2, "hang"), replicas=2, steps=30, gates=range(3, 30),
        checkpoint=keep(place),
    )  # fmt: skip
    run.pace("one was published and two more were begun", lambda: len(began(run)) >= 3 and len(run.saved()) == 1)
    run.strike(run.driven.coordinator_pid)
    run.pace("both were published", lambda: len(run.saved()) >= 3)
    run.open_gates()
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=1)
    second, third = began(run)[1:3]
    takeover = position(run, ev.CoordinatorStarted, takeover=True)
    for save in (second, third):
        assert position(run, ev.CheckpointBegan, step=save) < takeover < position(run, ev.CheckpointSaved, step=save)
    assert began(run) == sorted(set(began(run))), "none is told twice"
    assert assert_generations(place) == [e.step for e in run.saved()]
    assert run.saved()[-1].step == 30


def test_a_save_that_loses_its_writer_to_a_view_change(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """r1 dies before any promise; all that is known is that the save had begun. It is asked for again at once."""
    place = tmp_path / "c"
    run = fleet(
        strike("r1", Phase.SAVE_BEGAN), replicas=3, steps=16, max_restarts=0, checkpoint=keep(place, every=6),
        gates=range(7, 16),
    )  # fmt: skip
    run.pace("another was published", lambda: run.saved() != [])
    run.open_gates()
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=1)
    assert [(e.step, e.cause) for e in failed(run)] == [(6, "view_changed")]
    first = position(run, ev.CheckpointBegan, step=6)
    change = position(run, ev.ViewInstalled, members=["r0.1", "r2.1"])
    assert first < change < position(run, ev.CheckpointFailed, step=6)
    again = run.saved()[0]
    assert again.step < 12, "it did not wait for the next one that was due"
    assert again.reason == "the save of step 6 was lost with its view"
    assert assert_generations(place) == [e.step for e in run.saved()]


def test_a_save_by_a_replica_that_is_evicted_meanwhile(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """r1 is stopped with parts written and none promised; it is evicted, and the saves go with it."""
    place = tmp_path / "c"
    hangs = [strike("r1", Phase.SAVE_PART_WRITTEN, nth, "hang") for nth in (1, 2, 3)]  # as many as there are slots
    run = fleet(*hangs, replicas=2, steps=16, gates=(10,), checkpoint=keep(place), max_restarts=0, formation_s=3.0)
    run.until("a save has begun", lambda: began(run))
    run.strike(run.pid("r1.1"), signal.SIGSTOP)
    run.gate(10, "it is stopped", lambda: run.state("r1.1") == "T")
    run.assert_unchanged(survivors={"r0.1"}, recoveries=1)
    (gone,) = [e for e in run.exits() if e.replica == "r1.1"]
    assert gone.cause == "evicted"
    first = began(run)[0]
    lost = {e.step for e in failed(run) if e.cause == "view_changed"}
    assert first in lost
    assert position(run, ev.CheckpointBegan, step=first) < position(run, ev.ReplicaExited, replica="r1.1")
    steps = assert_generations(place)
    assert not lost & set(steps)
    assert steps == [e.step for e in run.saved()]
    assert steps[-1] == 16


def test_a_coordinator_is_replaced_in_the_middle_of_a_save(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Stopped as it publishes; its successor is told again, and the save of the step is the one that had begun."""
    place = tmp_path / "c"
    run = fleet(
        strike("coordinator.1", Phase.PUBLISH_BEGAN, 1, "SIGSTOP"), replicas=2, steps=12, gates=(10,),
        checkpoint=keep(place, every=4), formation_s=3.0,
    )  # fmt: skip
    run.gate(10, "the save of step 4 was published", lambda: any(e.step == 4 for e in run.saved()))
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=1)
    takeover = position(run, ev.CoordinatorStarted, takeover=True)
    assert position(run, ev.CheckpointBegan, step=4) < takeover < position(run, ev.CheckpointSaved, step=4)
    assert assert_generations(place) == [e.step for e in run.saved()]
