"""The processes beside the replicas die or are stopped; the user stops the run; user code raises."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


def state(pid: int) -> str:
    """The kernel's letter for a process; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def fault(replica: str, phase: str, action: Any = "SIGKILL", **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase, action=action, **where)


@pytest.mark.campaign
def test_the_coordinator_dies_in_view_changes(fleet: Callable[..., Any]) -> None:
    """Killed before the successor view is durable, after it is durable but not told, and half-way through a notice."""
    run = fleet(
        fault("r1", "reduce", step=2),
        fault("coordinator.1", "persist", step=2),
        fault("r2", "body", step=4),
        fault("coordinator.2", "tell", count=2),
        fault("r3", "optimizer", step=6),
        fault("coordinator.3", "tell", count=1),
        replicas=5, steps=10, max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r4.1"}, recoveries=6)
    assert sorted(r.cause for r in run.driven.recoveries()) == ["coordinator"] * 3 + ["signal"] * 3


@pytest.mark.campaign
def test_the_coordinator_is_stopped_and_goes_on(fleet: Callable[..., Any]) -> None:
    """It sleeps through a death, and through the notice of it, and wakes before it is replaced."""
    run = fleet(
        fault("coordinator", "tell", "SIGSTOP", step=1, count=2),
        fault("r1", "gathered", step=3),
        replicas=3, steps=8, max_restarts=0, stall_floor_s=60.0,
    )  # fmt: skip
    run.until("the coordinator was stopped", lambda: run.coordinator_state() == "T")
    run.strike(run.driven.coordinator_pid, signal.SIGCONT)
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=1)


def test_an_agent_takes_its_replicas_with_it(fleet: Callable[..., Any]) -> None:
    """Two agents on this machine; the second dies, and its replicas come back under its successor."""
    run = fleet(replicas=4, agents=2, steps=64, gates=(3, 6, 9, 60))  # to become members takes steps
    run.until("steps were made", lambda: run.driven.step == 2)
    under = {e.agent for e in run.driven.events if isinstance(e, ev.ReplicaStarted)}
    assert len(under) == 2
    agent = run.parent(run.pid("r1.1"))
    run.strike(agent)
    back = ("r1.2", "r3.2")
    run.gate(3, "they were gone", lambda: run.exited("r1.1") and run.exited("r3.1"))
    run.gate(6, "they were back", lambda: all(map(run.served, back)))
    run.gate(9, "they had caught up", lambda: all(map(run.caught_up, back)))
    run.gate(60, "they were members", lambda: {*back} <= set(run.driven.members))
    run.assert_unchanged(survivors={"r0.1", "r2.1", *back}, recoveries=2)
    assert {r.cause for r in run.driven.recoveries()} == {"agent_lost"}


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_interrupted(fleet: Callable[..., Any], times: int) -> None:
    """Ctrl-C ends the run in order, twice at once; nothing is left even if replicas are stopped."""
    run = fleet(fault("r1", "body", "SIGSTOP", step=2), replicas=2, steps=100_000, stall_floor_s=60.0)
    run.until("steps were made", lambda: run.driven.step >= 0 and run.state("r1.1") == "T")
    pids = [e.pid for e in run.driven.events if isinstance(e, ev.ReplicaStarted | ev.CoordinatorStarted)]
    for _ in range(times):
        run.strike(run.driven.process.pid, signal.SIGINT)
    assert run.finish() == 130
    assert {state(pid) for pid in pids} <= {"X", "Z"}


@pytest.mark.campaign
def test_one_replica_raises_and_another_takes_its_microbatch(fleet: Callable[..., Any]) -> None:
    run = fleet(fault("r1", "body", "raise", step=3), replicas=2, steps=8, max_restarts=0)
    run.assert_unchanged(survivors={"r0.1"}, recoveries=1)
    assert "InjectedFault" in run.driven.recoveries()[0].detail


@pytest.mark.campaign
def test_a_replica_that_raised_may_take_long_to_end(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Its process ends at last when the others are four steps further: nobody waited, it is blamed for nothing else,
    and only then its slot is free."""
    with (tmp_path / "lingers").open("w") as lingers:
        fcntl.flock(lingers, fcntl.LOCK_EX)
        script = (Path(__file__).with_name("lingering.py"), lingers.name, "--microbatches", "8", "--dtype", "float32")
        run = fleet(fault("r1", "body", "raise", step=3), replicas=3, steps=30, gates=(7, 10), script=script)
        run.until("the others were further", lambda: run.driven.step == 6)
        assert state(run.pid("r1.1")) not in "XZ"
        assert not run.started("r1.2")
        lingers.close()
        run.gate(7, "another was served in its place", lambda: run.served("r1.2"))
        run.gate(10, "it had caught up, and members are told", lambda: run.placed("r1.2"))
        run.assert_unchanged(survivors={"r0.1", "r1.2", "r2.1"}, recoveries=1)
    (recovery,) = run.driven.recoveries()
    assert (recovery.cause, recovery.noticed_by) in {("exception", name) for name in ("r0.1", "r1.1", "r2.1")}
    assert "InjectedFault" in recovery.detail
    assert not [e for e in run.driven.events if isinstance(e, ev.Suspected)]


@pytest.mark.campaign
def test_the_same_microbatch_on_two_replicas_ends_the_run(fleet: Callable[..., Any]) -> None:
    faults = [fault(f"r{i}", "backward", "raise", step=3, microbatch=2) for i in range(3)]
    run = fleet(*faults, replicas=3, steps=8)
    assert run.finish() == 5
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert "step 3, microbatch 2" in ended.detail
    out, err = run.driven.process.communicate()
    assert (out + err).count("InjectedFault: ") == 1


@pytest.mark.campaign
def test_interrupted_while_the_coordinator_is_stopped(fleet: Callable[..., Any]) -> None:
    """It cannot end the run in order, and cannot hold it up either."""
    run = fleet(replicas=1, steps=8, gates=(2,))
    run.until("steps were made", lambda: run.driven.step == 1)
    pids = [e.pid for e in run.driven.events if isinstance(e, ev.ReplicaStarted | ev.CoordinatorStarted)]
    run.strike(run.driven.coordinator_pid, signal.SIGSTOP)
    run.strike(run.driven.process.pid, signal.SIGINT)
    assert run.finish() == 130
    assert {state(pid) for pid in pids} <= {"X", "Z"}
