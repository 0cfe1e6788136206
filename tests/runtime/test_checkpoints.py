"""Whole fleets die and go on from their checkpoints, to the bits of the run that nothing happened to."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint import LocalStore, heads, verify
from outlast.core import events as ev

pytestmark = pytest.mark.process


def steps_in(path: Path) -> list[int]:
    return sorted(head.step for head in heads(LocalStore(str(path)))[0])


def kill_all(run: Any) -> None:
    """The launcher first; the others die with it."""
    run.strike(run.driven.process.pid, signal.SIGKILL)
    run.driven.process.wait(10.0)


def test_killed_whole_and_resumed_at_another_replica_count(fleet: Callable[..., Any], tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    first = fleet(replicas=2, steps=12, gates=(7,), checkpoint_dir=str(place), checkpoint_every=2)
    first.until("step 6 was saved", lambda: any(e.step == 6 for e in first.saved()))
    kill_all(first)
    assert steps_in(place) == [2, 4, 6]
    again = fleet(replicas=3, steps=12, checkpoint_dir=str(place), checkpoint_every=4, resume="auto")
    again.assert_unchanged(survivors={"r0.1", "r1.1", "r2.1"}, recoveries=0)
    assert set(again.results()["r0.1"]["losses"]) == {str(step) for step in range(6, 12)}
    loaded = [e for e in again.driven.events if isinstance(e, ev.CheckpointLoaded)]
    assert [(e.step, e.tier) for e in loaded] == [(6, "disk")] * 3
    assert [e.step for e in again.saved()] == [8, 12], "every fourth, and the end"
    assert [e.num_writers for e in again.saved()] == [3, 3]
    assert len({e.state_bytes for e in again.saved()}) == 1
    assert all(verify(LocalStore(str(place)), g).problems == [] for g in LocalStore(str(place)).generations())


def test_the_fleet_dies_under_a_living_launcher(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Both replicas at once: it begins again by itself, from the memory that the agent held, and reads no disk."""
    run = fleet(replicas=2, steps=9, gates=(5,), checkpoint_dir=str(tmp_path / "c"), checkpoint_every=2)
    run.until("step 4 was saved", lambda: any(e.step == 4 for e in run.saved()))
    for name in ("r0.1", "r1.1"):
        run.strike(run.pid(name))
    run.gate(5, "they were gone", lambda: run.exited("r0.1") and run.exited("r1.1"))
    run.assert_unchanged(survivors={"r0.2", "r1.2"}, recoveries=2, may_lose=True)
    assert {r.lost_steps for r in run.driven.recoveries()} <= {0, 1}
    assert [e.step for e in run.driven.events if isinstance(e, ev.FleetLost)] != []
    loaded = [e for e in run.driven.events if isinstance(e, ev.CheckpointLoaded)]
    assert [(e.step, e.tier, e.bytes_read.get("disk", 0)) for e in loaded] == [(4, "memory", 0)] * 2
    assert all(e.bytes_read["memory"] > 2_000_000 for e in loaded)


def test_nothing_was_saved_yet(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """The same bits, only later."""
    run = fleet(replicas=1, steps=6, gates=(2,), checkpoint_dir=str(tmp_path / "c"), checkpoint_every=100)
    run.until("steps were made", lambda: run.driven.step == 1)
    run.strike(run.pid("r0.1"))
    run.gate(2, "it was gone", lambda: run.exited("r0.1"))
    run.assert_unchanged(survivors={"r0.2"}, recoveries=1, may_lose=True)
    assert run.driven.recoveries()[0].lost_steps == 2


def test_the_budget_of_restarts_holds_for_the_whole_fleet(fleet: Callable[..., Any], tmp_path: Path) -> None:
    run = fleet(replicas=2, steps=9, gates=(3,), checkpoint_dir=str(tmp_path / "c"), max_restarts=1)
    run.until("steps were made", lambda: run.driven.step == 2)
    for name in ("r0.1", "r1.1"):
        run.strike(run.pid(name))
    assert run.finish() == 6
