"""Killed in the middle of saves: every generation that was published is whole, and bitwise what training was then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.generations import assert_generations, strike

from outlast.core import events as ev
from outlast.core.phases import Phase

pytestmark = pytest.mark.process


@pytest.mark.campaign
def test_writers_die_in_saves(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """One after sealing its memory, one after its data was durable, one with its promise on its lips."""
    run = fleet(
        strike("r1", Phase.SAVE_SEALED, 1),
        strike("r2", Phase.SAVE_DATA_DURABLE, 2),
        strike("r3", Phase.SAVE_PART_DURABLE, 3),
        replicas=4, steps=30, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=2, checkpoint_keep=100,
        max_restarts=0, gates=range(3, 30),
    )  # fmt: skip
    run.pace("each had saved until it died", lambda: all(map(run.exited, ("r1.1", "r2.1", "r3.1"))))
    run.open_gates()
    run.assert_unchanged(survivors={"r0.1"}, recoveries=3)
    steps = assert_generations(tmp_path / "c")
    assert steps == sorted(steps)
    assert steps[-1] == 30
    assert [e.step for e in run.saved()] == steps
    lost = [e for e in run.driven.events if isinstance(e, ev.CheckpointFailed)]
    assert {e.cause for e in lost} <= {"view_changed", "superseded"}, f"{lost}\n{run.logs()}"
    writers = [e.num_writers for e in run.saved()]
    assert writers == sorted(writers, reverse=True)


@pytest.mark.campaign
def test_the_coordinator_dies_as_it_publishes(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Before and after the head is there: writers repeat their promises, and publishing twice is publishing once."""
    run = fleet(
        strike("coordinator.1", Phase.PUBLISH_BEGAN),
        strike("coordinator.2", Phase.PUBLISH_DONE),
        replicas=2, steps=24, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=2, checkpoint_keep=100,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=2)
    steps = assert_generations(tmp_path / "c")
    assert steps[-1] == 24
    assert len(set(steps)) == len(steps)
    assert [e.step for e in run.saved()] == steps, "also what was published and not told"


@pytest.mark.campaign
@pytest.mark.parametrize("phase", [Phase.SAVE_SEALED, Phase.SAVE_PART_DURABLE])
def test_the_only_writer_dies_in_a_save_and_a_spare_takes_its_place(
    fleet: Callable[..., Any], tmp_path: Path, phase: Phase
) -> None:
    """Before anything of the save is on disk, and with all of it there and its promise not given: the next are made."""
    before, after = (4, 8, 12), (20, 24, 28, 32)
    gates = [1, 4, *(step + 1 for step in before), *(step + 4 for step in after)]
    run = fleet(
        strike("r0", phase, 4), replicas=1, spares=1, steps=40, gates=gates, max_restarts=0,
        checkpoint_dir=str(tmp_path / "c"), checkpoint_every=4, checkpoint_keep=100,
    )  # fmt: skip
    run.gate(1, "the spare was served", lambda: run.served("r1.1"))
    run.gate(4, "it had caught up", lambda: run.caught_up("r1.1"))
    saved = lambda first: [e.step for e in run.saved() if e.step > first]  # noqa: E731
    for step in before:
        run.gate(step + 1, f"step {step} was saved", lambda step=step: step in saved(0))
    for number, step in enumerate(after, 1):
        run.gate(step + 4, "it had saved on", lambda number=number: len(saved(16)) >= number)
    run.assert_unchanged(survivors={"r1.1"}, recoveries=1)
    steps = assert_generations(tmp_path / "c")
    assert steps[-1] == 40
    assert len([step for step in steps if step > 16]) >= 4, "and saved on"
