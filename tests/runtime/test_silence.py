"""Nobody dies, yet somebody does not answer: stopped, hung, cut off from a peer. And who only pauses is left alone."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


def fault(replica: str, phase: str, action: Any, step: int, **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase, action=action, step=step, **where)


@pytest.mark.campaign
def test_stopped_hung_and_cut_off(fleet: Callable[..., Any]) -> None:
    run = fleet(
        fault("r1", "gathered", "SIGSTOP", 5, bucket=0),
        fault("r2", "merge", "hang", 7),
        fault("r3", "body", "hang", 9),
        fault("r4", "header", "mute", 11, peer="r0.1"),
        fault("r5", "roll_call", "hang", 12),
        replicas=6, steps=14, max_restarts=0, outside_s=8.0, formation_s=2.0,
    )  # fmt: skip
    run.assert_unchanged(recoveries=5)
    assert {e.cause for e in run.exits() if e.cause != "finished"} == {"evicted"}


@pytest.mark.campaign
def test_a_short_stop_is_no_death(fleet: Callable[..., Any]) -> None:
    """Stopped and continued within the deadline: nobody is evicted."""
    run = fleet(fault("r1", "backward", "SIGSTOP", 1), replicas=2, steps=6, max_restarts=0, stall_floor_s=30.0)
    run.until("r1 was stopped", lambda: run.started("r1.1") and run.state("r1.1") == "T")
    run.strike(run.pid("r1.1"), signal.SIGCONT)
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=0)
    assert not [e for e in run.driven.events if isinstance(e, ev.Suspected)]
