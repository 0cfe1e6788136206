"""A microbatch is computed more than once before the first step; what is not reproducible is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("wavering.py")


def train(base: Path, replicas: int, kind: str) -> tuple[int, str]:
    options = ["--replicas", str(replicas), "--run-dir", str(base / f"{kind}{replicas}")]
    command = [sys.executable, "-m", "outlast", "run", *options, str(SCRIPT), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    logs = "".join(path.read_text() for path in sorted((base / f"{kind}{replicas}" / "logs").glob("r*.log")))
    return done.returncode, done.stdout + done.stderr + logs


@pytest.mark.process
@pytest.mark.parametrize(("replicas", "kind"), [(1, "counting"), (2, "wavering")])
def test_a_gradient_that_wavers_is_named_before_the_first_step(tmp_path: Path, replicas: int, kind: str) -> None:
    """Also alone: going on from a checkpoint would give other bits, and the run ended with 0."""
    code, text = train(tmp_path, replicas, kind)
    assert code == 5
    assert "the gradient of wavering.weight differs between computations of one microbatch" in text
    assert "steady" not in text.split("[DIVERGED]")[1].split("remedy")[0]


@pytest.mark.process
def test_what_only_one_replica_notices_ends_the_run(tmp_path: Path) -> None:
    """The second computes the microbatch once, and finds what the first found at first."""
    code, text = train(tmp_path, 3, "counting")
    assert code == 5
    assert "differs between computations of one microbatch (r0.1, time 1; r0.1, time 2)" in text
    assert "fingerprint" not in text.replace("fingerprinted", "")


@pytest.mark.process
def test_the_check_leaves_no_trace(tmp_path: Path) -> None:
    code, text = train(tmp_path, 2, "steady")
    alone, other = train(tmp_path, 1, "steady")
    assert (code, alone) == (0, 0), text + other
    prints = {line.rpartition(" ")[2] for line in (text + other).splitlines() if "fingerprint" in line}
    assert len(prints) == 1
    assert "r0.1 saw 8 batches" in text  # six of its own, two for the check
    assert "r0.1 saw 14 batches" in other  # twelve, and two for the check
