"""The exchange over torch.distributed gives the bits of the exchange through shared memory, deaths included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.runtime._probe import Fault

pytestmark = pytest.mark.process


@pytest.mark.campaign
def test_deaths_in_and_between_collectives(fleet: Callable[..., Any]) -> None:
    run = fleet(
        Fault(replica="r0", phase="scatter", step=2, action="SIGKILL", bucket=1),
        Fault(replica="r1", phase="reduce", step=4, action="SIGKILL", bucket=0),
        Fault(replica="r2", phase="gathered", step=6, action="SIGKILL"),
        replicas=4, steps=10, max_restarts=0, exchange="c10d",
    )  # fmt: skip
    run.assert_unchanged(survivors={"r3.1"}, recoveries=3)


def test_a_member_that_committed_hands_over_and_a_joiner_grows_the_group(fleet: Callable[..., Any]) -> None:
    run = fleet(
        Fault(replica="r1.1", phase="header", step=3, action="SIGKILL"),
        Fault(replica="r2.1", phase="verdict", step=5, action="SIGKILL"),
        replicas=3, spares=1, steps=60, exchange="c10d",
    )  # fmt: skip
    run.assert_unchanged(recoveries=2)
