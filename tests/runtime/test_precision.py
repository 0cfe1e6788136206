"""Training in fewer bits, killed: it ends with the bits, the gradient scale and the log of the undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.campaign]
SCRIPT = Path(__file__).with_name("precise.py")
STEPS = 22
LONG = pytest.mark.soak, pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("precision", "more", "struck", "replicas"),
    [
        ("fp16", (), "r0.1", 2),
        ("masters", (), "r1.1", 2),
        pytest.param("fp16", (), "r1.1", 3, marks=LONG),
        pytest.param("masters", (), "r1.1", 3, marks=LONG),
        pytest.param("bf16", ("--compiled",), "r0.1", 2, marks=LONG),
    ],
)
def test_fewer_bits_outlast_a_death(
    fleet: Callable[..., Any], tmp_path: Path, precision: str, more: tuple[str, ...], struck: str, replicas: int
) -> None:
    script = (str(SCRIPT), "--precision", precision, *more)
    (tmp_path / "alone").mkdir()
    command = [sys.executable, *script, "--steps", str(STEPS), "--out", str(tmp_path / "alone")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "alone").glob("*.json")
    want = json.loads(path.read_text())
    run = fleet(script=script, replicas=replicas, steps=STEPS, gates=(4, 9, 12), max_restarts=1)
    successor = run.replace(struck, 9, 12, replicas=replicas)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {*(f"r{slot}.1" for slot in range(replicas)), successor} - {struck}, run.logs()
    for name, found in results.items():
        assert found == {key: want[key] for key in found}, f"{name}\n{run.logs()}"
    assert (run.out / "curve.jsonl").read_text() == (tmp_path / "alone" / "curve.jsonl").read_text()
    if precision == "fp16":
        assert want["overflows"] >= 3, want
