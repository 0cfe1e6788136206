"""What a run says in its first steps of a variable that steers it from step to step: alone, off, in a fleet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).with_name("carrying.py")
STEPS = 2  # what is said of two steps is said before the second
_LINES = SCRIPT.read_text().splitlines()
_USED = {what: 1 + next(at for at, line in enumerate(_LINES) if what in line) for what in ("0.1 * n", "generator=rng")}
SAID = {
    "logs": "",
    "steers": f"outlast: carrying.py:{_USED['0.1 * n']}: `n` is carried from step to step and steers the loss; a "
    "replica that joins begins with the `n` it had before the loop: compute it from step.number, or register an object "
    "that holds it with protect(state={...})\n",
    "draws": f"outlast: carrying.py:{_USED['generator=rng']}: `rng` is a generator that nobody registered, and what it "
    "draws steers the loss; a replica that joins begins with its first numbers: register it with "
    "protect(state={...})\n",
}


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("kind", SAID)
def test_who_is_alone_is_told_once(kind: str, mode: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), kind, "--steps", str(STEPS), "--out", str(tmp_path)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=100, env=os.environ | {"OUTLAST": mode}
    )
    assert done.stderr == SAID[kind]


@pytest.mark.parametrize("kind", SAID)
def test_of_a_fleet_its_first_member_tells_it(kind: str, fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=2, steps=STEPS, script=(SCRIPT, kind))
    assert run.finish() == 0, run.logs()
    logs = {path.name: path.read_text() for path in (run.driven.run_dir / "logs").glob("r*.log")}
    assert sorted(logs) == ["r0.1.log", "r1.1.log"]
    first, other = sorted(logs.values(), key=lambda log: "carrying.py" not in log)
    assert first.count("carrying.py:") == bool(SAID[kind])
    assert SAID[kind] in first
    assert "carrying.py:" not in other
