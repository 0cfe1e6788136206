"""A spare that was behind takes over from all replicas: what is newest goes on, its own state or a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev

pytestmark = pytest.mark.process

_LAST = 50  # the step before which all replicas die


def test_a_spare_that_is_further_behind_than_a_checkpoint_goes_on_from_that(
    fleet: Callable[..., Any], tmp_path: Path
) -> None:
    """It is stopped, with the agent that would continue it, for more steps than what waits for it can hold."""
    keep: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 24, "host_silence_s": 120.0}
    run = fleet(
        replicas=2, spares=1, steps=54, microbatches=2, gates=(2, 4, 5, _LAST), max_restarts=0, ack_s=60.0, **keep
    )
    run.gate(2, "the spare was served", lambda: run.served("r2.1"))
    run.gate(4, "it had caught up", lambda: run.caught_up("r2.1"))
    replicas, behind = {run.pid("r0.1"), run.pid("r1.1")}, (run.pid("a0"), run.pid("r2.1"))
    run.until("both wait before step 5", lambda: run.at_gates(replicas))
    for pid in behind:
        run.strike(pid, signal.SIGSTOP)
    run.gate(5, "the spare is stopped", lambda: run.state("r2.1") == "T")
    run.until("step 48 was saved", lambda: any(e.step == 48 for e in run.saved()))
    run.until("both wait before the last gate", lambda: run.at_gates(replicas))
    for pid in replicas:
        run.strike(pid)
    for pid in reversed(behind):
        run.strike(pid, signal.SIGCONT)
    run.gate(_LAST, "they were gone", lambda: run.exited("r0.1") and run.exited("r1.1"))
    run.assert_unchanged(survivors={"r2.1"}, may_lose=True)
    loaded = [(e.replica, e.step) for e in run.driven.events if isinstance(e, ev.CheckpointLoaded)]
    assert loaded == [("r2.1", 48)], run.logs()
    assert {e.replica: e.lost_steps for e in run.driven.recoveries()} == {"r0.1": _LAST - 48, "r1.1": _LAST - 48}
    assert min(int(step) for step in run.results()["r2.1"]["losses"]) == 48
