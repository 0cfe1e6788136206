"""The exchange over torch.distributed gives the bits of the exchange through shared memory, deaths included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


@pytest.mark.campaign
def test_deaths_in_and_between_collectives(fleet: Callable[..., Any]) -> None:
    run = fleet(
        Fault(replica="r1", phase="scatter", step=2, action="SIGKILL", bucket=1),
        Fault(replica="r0", phase="gather", step=3, action="SIGKILL", bucket=0),
        Fault(replica="r2", phase="reduce", step=5, action="SIGKILL", bucket=0),
        Fault(replica="r3", phase="header", step=6, action="SIGSTOP"),
        Fault(replica="r4", phase="gathered", step=8, action="SIGKILL"),
        replicas=6, steps=11, max_restarts=0, exchange="c10d",
    )  # fmt: skip
    run.assert_unchanged(survivors={"r5.1"}, recoveries=5)


@pytest.mark.campaign
def test_a_member_that_committed_hands_over_and_a_joiner_grows_the_group(fleet: Callable[..., Any]) -> None:
    run = fleet(
        Fault(replica="r1.1", phase="header", step=5, action="SIGKILL"),
        Fault(replica="r2.1", phase="verdict", step=7, action="SIGKILL"),
        replicas=3, spares=1, steps=104, gates=(1, 4, *range(12, 100, 4)), exchange="c10d",
    )  # fmt: skip
    run.gate(1, "the spare was served", lambda: run.served("r3.1"))
    run.gate(4, "it had caught up", lambda: run.caught_up("r3.1"))
    new = ("r1.2", "r2.2")  # the first may be a member before the second is there, which then is the spare
    run.step_on("new processes were started", lambda: all(map(run.started, new)))
    run.step_on("one was served", lambda: any(map(run.served, new)))
    run.step_on("it had caught up", lambda: any(map(run.caught_up, new)))
    run.step_on("the group had grown again", lambda: len(run.driven.members) == 3)
    run.open_gates()
    run.assert_unchanged(recoveries=2)
