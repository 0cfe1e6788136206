"""Killed in the middle of saves: every generation that was published is whole, and bitwise what training was then."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.conftest import undisturbed

from outlast.checkpoint import Engine, LocalStore, verify
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.runtime._probe import Fault

pytestmark = pytest.mark.process


def strike(replica: str, phase: Phase, count: int = 1, action: Any = "SIGKILL") -> Fault:
    return Fault(replica=replica, phase=phase.name, count=count, action=action)


def assert_generations(place: Path) -> list[int]:
    """Each is whole and has the weights of the undisturbed run at its step; returns the steps."""
    engine, steps = Engine(str(place)), []
    for generation in engine.store.generations():
        assert verify(LocalStore(str(place)), generation).problems == []
        loaded = engine.load(generation=generation)
        assert loaded is not None
        sha = hashlib.sha256()
        for name, tensor in sorted(loaded.tree["model"].items()):
            sha.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        assert sha.hexdigest() == undisturbed(loaded.step, 8, "float32")["model"], f"generation {generation}"
        steps.append(loaded.step)
    engine.close()
    return steps


@pytest.mark.campaign
def test_writers_die_in_saves(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """One after sealing its memory, one after its data was durable, one with its promise on its lips."""
    run = fleet(
        strike("r1", Phase.SAVE_SEALED, 1),
        strike("r2", Phase.SAVE_DATA_DURABLE, 2),
        strike("r3", Phase.SAVE_PART_DURABLE, 3),
        replicas=4, steps=24, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=2, checkpoint_keep=100,
        max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1"}, recoveries=3)
    steps = assert_generations(tmp_path / "c")
    assert steps == sorted(steps)
    assert steps[-1] == 24
    assert [e.step for e in run.saved()] == steps
    lost = [e for e in run.driven.events if isinstance(e, ev.CheckpointFailed)]
    assert {e.cause for e in lost} <= {"view_changed", "superseded"}
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
def test_a_writer_that_is_stopped_and_evicted(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Two saves may be in flight here; the one that it holds up is lost with its view, none is torn."""
    keep = {"dir": str(tmp_path / "c"), "every": 1, "num_slots": 3, "keep_last": 100}
    run = fleet(
        strike("r1", Phase.SAVE_PART_WRITTEN, 2, "SIGSTOP"), replicas=2, steps=16, checkpoint=keep, max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1"}, recoveries=1)
    steps = assert_generations(tmp_path / "c")
    assert steps[-1] == 16
    assert [e.step for e in run.saved()] == steps
