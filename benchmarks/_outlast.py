"""outlast as a system under test: its command line, and what its run directory tells afterwards.

The only module of the benchmarks that knows how outlast is started and read; `_outlast_worker.py` is what it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["commands"]


def commands(*, replicas: int, worker: Sequence[str], run_dir: Path, options: Sequence[str] = ()) -> list[list[str]]:
    """One command: `outlast run` of the benchmark's worker with `replicas` replicas."""
    script = str(Path(__file__).with_name("_outlast_worker.py"))
    launcher = [sys.executable, "-m", "outlast", "run", "--replicas", str(replicas), "--run-dir", str(run_dir)]
    return [[*launcher, *options, script, *worker]]
