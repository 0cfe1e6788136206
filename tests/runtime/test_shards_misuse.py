"""A sharded model on one rank: what is done to its gradients by habit, and what cannot be had with it, is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.campaign]
SCRIPT = Path(__file__).with_name("sharded_misuse.py")


def test_a_sharded_model_is_told_what_a_whole_one_is() -> None:
    """In a process of its own: a process group is a process's, once and for all."""
    done = subprocess.run([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["plain"]["over"]
    for harmless in ("zeroes", "own backward", "looks", "looks after the step"):
        assert found[harmless] == found["plain"], harmless
    for harmless in ("off, zeroes", "off, own backward"):
        assert found[harmless] == found["off"], harmless
    assert found["evaluates"].pop("shards") == [["0.weight", "0.bias", "1.weight", "1.bias"]] * 3
    assert found["evaluates"].items() <= found["plain"].items()
    clips = "clips", "clips after the step", "off, clips", "off, clips after the step"
    for habit, name in {**dict.fromkeys(clips, "clip_grad_norm_"), "steps": "step"}.items():
        assert found[habit]["error"] == "StepMisuse", found[habit]
        assert f"{name} used .grad of a protected parameter" in found[habit]["text"]
    assert found["checks"]["error"] == "ConfigError", found["checks"]
    assert "checks cannot be had with a model that is sharded" in found["checks"]["text"]
    for audited in ("audit", "audit auto", "audit_params"):
        assert found[audited].get("error") is None, found[audited]
