"""Nobody is evicted for being slow: an over-subscribed machine, evaluations, garbage collection, a stalled data loader,
a slow first step, a debugger that holds a process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.conftest import PATIENCE_S

from outlast.core import events as ev
from outlast.prove import Driven

SCRIPT = Path(__file__).with_name("patient.py")
_libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_DETACH = 16, 17


def patient_run(base: Path, replicas: int, steps: int, visit: Callable[[Driven], None]) -> Driven:
    options = ["--replicas", str(replicas)]
    with Driven(base / "run", options, [str(SCRIPT), str(steps), str(base / "out")]) as driven:
        visit(driven)
        assert driven.finish(900.0, lambda: None) == 0, driven.process.communicate()[1]
    return driven


def held_by_a_debugger(driven: Driven) -> None:
    """Attach to one member in the middle of the run, hold it until its peers have complained, let it go."""
    driven.until("it trains", lambda: driven.step >= 20, PATIENCE_S, lambda: None)
    pid = next(e.pid for e in driven.events if isinstance(e, ev.ReplicaStarted) and e.replica == "r2.1")
    if _libc.ptrace(PTRACE_ATTACH, pid, 0, 0) != 0:
        pytest.skip("this machine allows no debugger")
    os.waitpid(pid, 0x40000000)  # __WALL
    held_at = driven.step
    for turn in range(40):  # two seconds of the run's own following: far beyond its learned deadline
        driven.poll()
        driven.wait(0.05)
        if turn < 20:  # what was done before it was held is told a heartbeat later
            held_at = driven.step
    assert driven.step <= held_at + 64
    _libc.ptrace(PTRACE_DETACH, pid, 0, 0)


def no_one_was_evicted(driven: Driven) -> None:
    suspected = [e for e in driven.events if isinstance(e, ev.Suspected) and e.decision == "evict"]
    assert suspected == []
    assert driven.recoveries() == []
    assert (driven.run_dir.parent / "out").exists()


@pytest.mark.campaign
@pytest.mark.process
def test_a_slow_loop_and_a_debugger_evict_nobody(tmp_path: Path) -> None:
    no_one_was_evicted(patient_run(tmp_path, 4, 200, held_by_a_debugger))


@pytest.mark.soak
@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_ten_thousand_steps_over_subscribed_evict_nobody(tmp_path: Path) -> None:
    no_one_was_evicted(patient_run(tmp_path, 2 * (os.cpu_count() or 2), 10_000, lambda driven: None))


@pytest.mark.campaign
@pytest.mark.process
def test_a_healthy_step_sends_the_coordinator_nothing_but_heartbeats(tmp_path: Path) -> None:
    driven = patient_run(tmp_path, 2, 160, lambda driven: None)
    told = [e for e in driven.events if isinstance(e, ev.ProgressMade)]
    counts = [e.messages for e in told if e.stable <= 120]  # at 120 all wait, far from what they say when they are done
    assert len(counts) >= 3
    assert max(counts) == counts[-1] == 2, "each member says once that its view has formed"
