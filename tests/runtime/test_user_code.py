"""Faults in what the user brings: loader processes, Python that never returns, a replica that is woken too late."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


@pytest.mark.campaign
def test_loader_processes_die_with_their_replica_and_change_no_bit(fleet: Callable[..., Any]) -> None:
    """r1 dies while its workers have batches ready, r2 as it waits for one; orphans are fetched out of turn."""
    run = fleet(
        Fault(replica="r1", phase="merge", step=3, action="SIGKILL"),
        Fault(replica="r2", phase="load", step=5, action="SIGKILL"),
        replicas=3, steps=8, workers=2, max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1"}, recoveries=2)


@pytest.mark.campaign
def test_python_that_never_returns(fleet: Callable[..., Any]) -> None:
    """It uses its processor, so it counts as slow until `outside_s`: in the loop's body, and inside a backward."""
    run = fleet(
        Fault(replica="r1", phase="body", step=4, action="spin"),
        Fault(replica="r2", phase="backward", step=6, action="spin"),
        replicas=3, steps=8, max_restarts=0, outside_s=8.0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1"}, recoveries=2)
    reasons = [e.evidence for e in run.driven.events if isinstance(e, ev.Suspected) and e.decision == "evict"]
    assert len(reasons) == 2
    assert all("(outside_s)" in reason for reason in reasons)


@pytest.mark.campaign
def test_one_that_is_woken_after_its_eviction_disturbs_nobody(fleet: Callable[..., Any]) -> None:
    """Stopped for long, evicted, replaced by a joiner; then somebody continues it."""
    run = fleet(replicas=3, steps=164, gates=(3, 60, 110, 160))  # to become members takes steps
    run.until("steps were made", lambda: run.driven.step == 2)
    late = run.pid("r1.1")
    run.strike(late, signal.SIGSTOP)
    run.gate(3, "it was stopped", lambda: run.state("r1.1") == "T")
    run.gate(60, "its successor was served", lambda: run.exited("r1.1") and run.served("r1.2"))
    run.gate(110, "it had caught up", lambda: run.caught_up("r1.2"))
    with contextlib.suppress(ProcessLookupError):
        run.strike(late, signal.SIGCONT)
    run.gate(160, "the successor was a member", lambda: "r1.2" in run.driven.members)
    run.assert_unchanged(survivors={"r0.1", "r1.2", "r2.1"}, recoveries=1)
    assert [(e.replica, e.cause) for e in run.exits() if e.cause != "finished"] == [("r1.1", "evicted")]
