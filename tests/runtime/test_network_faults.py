"""The same over torch.distributed: a collective that lost a member is abandoned, the step is finished by the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.runtime._probe import Fault

pytestmark = pytest.mark.process


@pytest.mark.campaign
def test_deaths_in_collectives(fleet: Callable[..., Any]) -> None:
    run = fleet(
        Fault(replica="r1", phase="scatter", step=2, bucket=1, action="SIGKILL"),
        Fault(replica="r0", phase="gather", step=4, bucket=0, action="SIGKILL"),
        Fault(replica="r3", phase="header", step=6, action="SIGSTOP"),
        replicas=4, steps=9, max_restarts=0, exchange="c10d",
    )  # fmt: skip
    run.assert_unchanged(survivors={"r2.1"}, recoveries=3)
