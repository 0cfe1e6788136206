"""A rule that cannot be kept is refused before any process is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--aggregation", "trimmed_mean", "--f", "2"], "set f <= 1"),
        (["--aggregation", "krum", "--f", "1"], "tolerates at most f = 0"),
        (["--aggregation", "trimed_mean", "--f", "1"], "did you mean 'trimmed_mean'"),
        (["--aggregation", "median"], "f = 1 to 1 with 4 rows"),
        (["--aggregation", "median", "--f", "1", "--on-shortfall", "hope"], "on_shortfall"),
    ],
)
def test_run_refuses_what_no_rule_can_keep(tmp_path: Path, options: list[str], says: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('never started')\n")
    command = [sys.executable, "-m", "outlast", "run", "--replicas", "4", *options, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "run").exists()
