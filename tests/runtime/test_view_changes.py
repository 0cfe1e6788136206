"""Faults inside what repairs faults: leaving, connecting, roll call, hand-over, orphans, the closing barrier."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PATIENCE_S

from outlast.core.phases import Phase
from outlast.prove import Driven
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


def kill(replica: str, phase: Phase, step: int, **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase.name.lower(), step=step, action="SIGKILL", **where)


def silence(replica: str, peers: list[str], step: int) -> list[Fault]:
    """From the header of this step on, `replica` says nothing more to `peers`."""
    return [
        Fault(replica=replica, phase="header", step=step, action="mute", peer=f"{peer}.1") for peer in peers
    ]  # fmt: skip


@pytest.mark.campaign
def test_a_second_death_in_the_repair_of_the_first(fleet: Callable[..., Any]) -> None:
    """Each step loses two: the second while the first is being dealt with."""
    run = fleet(
        kill("r1", Phase.GATHERED, 2, bucket=1),
        kill("r2", Phase.ROLL_CALL, 2),
        kill("r3", Phase.BODY, 4),
        kill("r4", Phase.RECOMPUTE, 4),
        kill("r5", Phase.FINAL, 7),
        replicas=6, microbatches=12, steps=7, max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1"}, recoveries=5)


@pytest.mark.campaign
def test_one_member_alone_has_committed_and_hands_over(fleet: Callable[..., Any]) -> None:
    """r0 alone hears r3's header of step 2, commits and computes step 3; then r3 dies. r0 hands the outcome to the
    others; in step 4 the same again, and r0 dies while it hands over, so its commit is forgotten and made again."""
    run = fleet(
        *silence("r3", ["r1", "r2", "r4"], 2),
        Fault(replica="r3", phase="verdict", step=2, action="hang"),
        *silence("r4", ["r1", "r2"], 4),
        Fault(replica="r4", phase="verdict", step=4, action="hang"),
        kill("r0", Phase.HAND_OVER_SEND, 5),
        replicas=5, steps=8, dtype="bfloat16", max_restarts=0, stall_floor_s=60.0,
    )  # fmt: skip
    for name, step in (("r3.1", 2), ("r4.1", 4)):
        run.until(f"r0 was ahead in step {step}", lambda step=step: run.driven.step == step)
        run.strike(run.pid(name))
    run.assert_unchanged(survivors={"r1.1", "r2.1"}, recoveries=3)


@pytest.mark.campaign
def test_told_the_next_view_inside_the_last_backward(tmp_path: Path) -> None:
    """The buckets that become ready then belong to a view that is over; nothing is raised in the user's backward."""
    script = str(Path(__file__).with_name("long_backward.py"))
    config = tmp_path / "run.toml"
    config.write_text("[run]\nmax_restarts = 0\n")
    with Driven(tmp_path / "run", ["--replicas", "2", "--config", str(config)], [script, "wait"]) as driven:
        assert driven.finish(PATIENCE_S, lambda: None) == 0, driven.process.communicate()
    log = (tmp_path / "run" / "logs" / "r0.1.log").read_text()
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=100).stdout
    assert "waited 1 times" in log
    assert re.findall("fingerprint (.*)", log) == re.findall("fingerprint (.*)", alone) != []
