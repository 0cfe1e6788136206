"""Scripts for torchrun that `outlast convert` made outlast's: killed, they end with the bits of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.convert import convert
from outlast.runtime.settings.fault_points import Fault

SCRIPTS = Path(__file__).with_name("ddp_scripts")
EPOCHS = 3


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize(("name", "struck"), [("trainer_class", "r0.1"), ("images", "r1.1"), ("flat", "r0.1")])
def test_a_converted_script_outlasts_a_death(fleet: Callable[..., Any], tmp_path: Path, name: str, struck: str) -> None:
    found = convert((SCRIPTS / f"{name}.py").read_text(), processes=4)
    assert found.complete
    script = tmp_path / "train.py"
    script.write_text(found.after)
    (tmp_path / "alone").mkdir()
    command = [sys.executable, str(script), "--steps", str(EPOCHS), "--out", str(tmp_path / "alone")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    fault = Fault(replica=struck, phase="body", action="SIGKILL", step=3)
    run = fleet(fault, script=(script,), replicas=2, steps=EPOCHS)
    assert run.finish() == 0, run.logs()
    assert run.exited(struck)
    mine, theirs = (torch.load(out / "model.pt") for out in (run.out, tmp_path / "alone"))
    mine, theirs = (flattened(state) for state in (mine, theirs))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], value) for key, value in theirs.items())


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    inner = next((value for value in state.values() if isinstance(value, dict)), state)
    return dict(inner)
