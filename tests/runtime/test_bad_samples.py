"""Samples that cannot be read, in a fleet that is struck: the same are skipped, and the bits stay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.observe.timeline_rows import timeline

SCRIPT = Path(__file__).with_name("unreadable.py")
BAD = (3, 26, 41, 77)  # as the script says
STEPS = 24  # two epochs: all bad samples are known after the first


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("struck", ["r0.1", "r1.1"])
def test_the_same_are_skipped_whoever_dies(fleet: Callable[..., Any], tmp_path: Path, struck: str) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--out", str(alone)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    run = fleet(script=(SCRIPT,), replicas=2, steps=STEPS, gates=(4, 9, 14), max_restarts=1)
    successor = run.replace(struck, 9, 14)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {"r0.1", "r1.1", successor} - {struck}, run.logs()
    want = json.loads((alone / "r0.1.json").read_text())
    assert all(found == want for found in results.values()), run.logs()
    skipped = [e for e in run.driven.events if isinstance(e, ev.DataTrouble)]
    assert sorted(sample for e in skipped for sample in e.samples) == sorted(BAD), "each once"
    assert {e.what for e in skipped} == {"skipped"}
    assert max(e.total for e in skipped) == len(BAD)
    told = [row.what for row in timeline(run.driven.events) if row.kind == "data_trouble"]
    assert any("sample 26 cannot be read (ValueError: sample 26 is cut short)" in text for text in told)
