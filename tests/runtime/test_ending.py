"""The run ends while somebody cannot hear of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.process


@pytest.mark.campaign
def test_a_spare_that_was_stopped_does_not_keep_the_run_from_ending(fleet: Callable[..., Any]) -> None:
    """Nobody has noticed yet that it was stopped, and it cannot read that the run is over."""
    run = fleet(replicas=1, spares=1, steps=8, max_restarts=0, gates=(2, 6))
    run.gate(2, "the spare was served", lambda: run.served("r1.1"))
    run.until("it had caught up", lambda: run.caught_up("r1.1"))
    run.strike(run.pid("r1.1"), signal.SIGSTOP)
    run.gate(6, "it was stopped", lambda: run.state("r1.1") == "T")
    run.assert_unchanged(survivors={"r0.1"})
    assert "the run is over" in (run.driven.run_dir / "logs" / "r1.1.log").read_text(), "it was woken, and heard of it"
