"""Eight replicas die one by one, each in another phase, until one is left: the bits are those of a fleet of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.core.phases import Phase
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


def kill(replica: str, phase: Phase, step: int, **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase.name.lower(), step=step, action="SIGKILL", **where)


def test_a_death_in_every_part_of_the_step(fleet: Callable[..., Any]) -> None:
    run = fleet(
        kill("r1", Phase.LOAD, 2),
        kill("r2", Phase.BACKWARD, 3),
        kill("r3", Phase.SCATTER, 4, bucket=0),
        kill("r4", Phase.REDUCE, 5, bucket=1),
        kill("r5", Phase.GATHER, 6, bucket=2),
        kill("r6", Phase.HEADER, 7),
        kill("r7", Phase.OPTIMIZER, 8),
        replicas=8, steps=12, max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1"}, recoveries=7)


@pytest.mark.campaign
def test_a_death_between_the_parts_of_the_step(fleet: Callable[..., Any]) -> None:
    run = fleet(
        kill("r1", Phase.BODY, 1),
        kill("r2", Phase.MERGE, 2),
        kill("r3", Phase.GATHERED, 3, bucket=0),
        kill("r4", Phase.VERDICT, 4),
        kill("r0", Phase.COMMIT, 6),
        replicas=6, microbatches=11, steps=9, dtype="bfloat16", max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r5.1"}, recoveries=5)


@pytest.mark.campaign
def test_several_at_once(fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one die in the same step, two of them in the same place; without a lease, which is a person's choice."""
    monkeypatch.setenv("OUTLAST_LEASE_S", "inf")
    run = fleet(
        kill("r0", Phase.REDUCE, 3, bucket=0),
        kill("r1", Phase.REDUCE, 3, bucket=0),
        kill("r3", Phase.LEAVE, 3),
        replicas=4, steps=7, max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r2.1"}, recoveries=3)
