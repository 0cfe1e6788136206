"""The exchange in two levels gives the bits of one host, deaths of whoever carries what included: agents are hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.runtime.settings.fault_points import Fault

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def test_deaths_in_every_phase_of_the_exchange(fleet: Callable[..., Any]) -> None:
    """One after the other, until one of the hosts has died down to one, then is gone, and one replica is left."""
    run = fleet(
        Fault(replica="r1", phase="scatter", step=2, action="SIGKILL", bucket=1),
        Fault(replica="r4", phase="gather", step=3, action="SIGKILL", bucket=0),
        Fault(replica="r3", phase="reduce", step=5, action="SIGKILL", bucket=0),
        Fault(replica="r2", phase="header", step=6, action="SIGSTOP"),
        Fault(replica="r0", phase="gathered", step=8, action="SIGKILL"),
        replicas=6, agents=2, steps=11, max_restarts=0, exchange="hosts",
    )  # fmt: skip
    run.assert_unchanged(survivors={"r5.1"}, recoveries=5)


def test_a_member_hands_over_and_a_joiner_grows_the_view(fleet: Callable[..., Any]) -> None:
    run = fleet(
        Fault(replica="r1.1", phase="verdict", step=5, action="SIGKILL"),
        replicas=4, agents=2, spares=1, steps=164, gates=(1, 4, 60, 110, 160), exchange="hosts",
    )  # fmt: skip
    run.gate(1, "the spare was served", lambda: run.served("r4.1"))
    run.gate(4, "it had caught up", lambda: run.caught_up("r4.1"))
    run.gate(60, "a new process was started", lambda: run.started("r1.2"))
    run.gate(110, "it was served", lambda: run.served("r1.2"))
    run.gate(160, "the view was whole", lambda: len(run.driven.members) == 4)
    run.assert_unchanged(recoveries=1)
