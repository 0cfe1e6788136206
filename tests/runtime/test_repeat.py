"""A microbatch is computed more than once before the first step; what is not reproducible is named."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("wavering.py")


def train(base: Path, replicas: int, kind: str, ranks: int = 0) -> tuple[int, str]:
    """`ranks`: the model is sharded over so many."""
    where = base / f"{kind}{replicas}x{ranks}"
    options = ["--replicas", str(replicas), "--run-dir", str(where), *(["--ranks", str(ranks)] if ranks else [])]
    command = [sys.executable, "-m", "outlast", "run", *options, str(SCRIPT), kind, *["sharded"] * bool(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    logs = "".join(path.read_text() for path in sorted((where / "logs").glob("r*.log")))
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
@pytest.mark.campaign
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_ranks_of_a_replica_are_asked_together(tmp_path: Path, replicas: int) -> None:
    """Alone as in a fleet: each computes its microbatch again, and all go through the sharded model at once."""
    code, text = train(tmp_path, replicas, "counting", ranks=2)
    assert code == 5
    assert "the gradient of wavering.weight differs between computations of one microbatch (r0.1, time 1;" in text
    assert "steady" not in text.split("[DIVERGED]")[1].split("remedy")[0]


@functools.cache
def one_process() -> str:
    """What the sharded model ends with in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "steady", "sharded"], capture_output=True, text=True, check=True
    )
    return done.stdout.rpartition("fingerprint ")[2].strip()


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize(("replicas", "seen"), [(1, {"r0.1 saw 8"}), (2, {"r0.1 saw 5", "r1.1 saw 4"})])
def test_asking_the_ranks_leaves_no_trace(tmp_path: Path, replicas: int, seen: set[str]) -> None:
    """Each rank sees its own three or six, and one or two for the check."""
    code, text = train(tmp_path, replicas, "steady", ranks=2)
    assert code == 0, text
    ends = [line.partition(" batches, fingerprint ") for line in text.splitlines() if "fingerprint" in line]
    assert {found for found, _, _ in ends} == seen, text
    assert {digest for _, _, digest in ends} == {one_process()}, text


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
