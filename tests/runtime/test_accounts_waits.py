"""A fleet whose members wait for lost replicas, beside the stopwatch of `test_accounts.py`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime.test_accounts import check, near, watch

__all__ = ["watch"]

# A stopwatch beside them is only as good as the machine is quiet: not among what CI runs.
pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("replicas", "settings", "victims"),
    [
        (2, "min_replicas = 2\n", ("r1.1",)),
        (3, "min_replicas = 3\n", ("r1.1", "r2.1")),
        (3, 'on_vacancy = "wait"\n', ("r0.1",)),
    ],
)
def test_those_that_are_left_wait_for_the_lost(
    watch: Any, replicas: int, settings: str, victims: tuple[str, ...]
) -> None:
    """Nothing is made until a replacement is there, which takes as long as a process takes to start."""
    run = watch(160, "--replicas", str(replicas), settings=settings, script=("--later-start-s", "3.0"))
    run.until_step(40)
    run.strike(*victims)
    run.until("it is told", lambda: "wait for others" in (run.said("status")["detail"] or ""))
    run.until("it is over", lambda: not run.said("status")["detail"])
    assert run.driven.step < 150
    assert run.finish() == 0
    why, truth = check(run, replicas)
    told = [e for e in run.driven.recoveries() if e.replica in victims]
    assert len(told) == len(victims)
    assert all(near(e.downtime_s, max(truth.gaps_s)) for e in told), (told, truth)
    assert near(why["downtime_s"], max(truth.gaps_s))
    assert why["cost"]["degraded_s"] < 0.05
