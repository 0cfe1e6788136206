"""A replica that computes more slowly is named and gets less to compute; the bits are those of any other shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.runtime.settings.fault_points import Fault

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def notices(run: Any) -> list[str]:
    return [e.text for e in run.driven.events if isinstance(e, ev.Notice) and "slow to compute" in e.text]


def test_work_follows_speed_through_a_death_and_no_bit_does(fleet: Callable[..., Any]) -> None:
    """r1 computes ten products more for each of its microbatches; r2 dies in a step of uneven shares."""
    run = fleet(
        Fault(replica="r2", phase="backward", step=100, action="SIGKILL"),
        replicas=3, steps=120, gates=(90,), max_restarts=0, speed_window_s=0.1, environ={"SLOW_REPLICA": "r1"},
    )  # fmt: skip
    run.gate(90, "the slow one had less to do", lambda: any(text.startswith("r1.1") for text in notices(run)))
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=1)
    assert any("it gets 1 of 8 in place of" in text for text in notices(run))
    planned = [e for e in run.driven.events if isinstance(e, ev.ViewInstalled) and e.planned]
    assert planned
