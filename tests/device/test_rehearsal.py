"""The script for whoever has a GPU proves on processors what it says it proves, and tells what it has not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.timeout(280)]
CASES = Path(__file__).with_name("cases.py")


def rehearsed(*words: str, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, CASES, "--device", "cpu", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_cases_are_proved_without_a_device() -> None:
    """Two of them here: each is some fleets."""
    found = rehearsed("--only", "deaths,audits,nccl")
    assert [(row["case"], row["result"]) for row in found["cases"]] == [
        ("deaths", "proved"), ("audits", "proved"), ("nccl", "not tried"),
    ], found  # fmt: skip
    assert found["on"]["device"] == "cpu"


def test_what_people_train_with_is_proved_without_a_device_and_what_needs_one_is_not_tried() -> None:
    found = rehearsed("--only", "products,speed,capturable,readings,shards")
    assert [(row["case"], row["result"]) for row in found["cases"]] == [
        ("products", "proved"), ("speed", "measured"), ("capturable", "not tried"),
        ("readings", "not tried"), ("shards", "not tried"),
    ], found  # fmt: skip
    assert "ratio" in found["cases"][1]["what"]
