"""outlast as a system under test: its command line, and what its run directory tells afterwards.

The only module of the benchmarks that knows how outlast is started and read; `_outlast_worker.py` is what it runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.config import RunConfig
from outlast.core import events
from outlast.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LEAST_DEADLINE_S", "commands", "coordinator_pid", "newest_served_s"]

LEAST_DEADLINE_S = RunConfig().stall_floor_s
"""A stopped replica's learned deadline is never below this, so a bound less this much is at least as strict."""


def commands(*, replicas: int, worker: Sequence[str], run_dir: Path, options: Sequence[str] = ()) -> list[list[str]]:
    """One command: `outlast run` of the benchmark's worker with `replicas` replicas."""
    script = str(Path(__file__).with_name("_outlast_worker.py"))
    launcher = [sys.executable, "-m", "outlast", "run", "--replicas", str(replicas), "--run-dir", str(run_dir)]
    return [[*launcher, *options, script, *worker]]


def newest_served_s(run_dir: Path) -> float:
    """When a joiner was last ordered to be served, by CLOCK_MONOTONIC; 0 before the first."""
    with Journal.open_reader(run_dir) as journal:
        served = [entry.event.at_s for entry in journal.events(kinds=[events.JoinerServed])]
    return max(served) - time.time() + time.monotonic() if served else 0.0


def coordinator_pid(run_dir: Path) -> int:
    """The process to kill so that the run is without its coordinator, as `outlast status` names it."""
    ask = [sys.executable, "-m", "outlast", "status", str(run_dir), "--json"]
    status = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True, timeout=30).stdout)
    return int(status["coordinator"]["pid"])
