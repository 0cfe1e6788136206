"""From what a person types to the run they mean.

Role: `RUN` is a run directory, or a directory that holds runs: then the one started last. Reads names and times only.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from outlast.errors import ConfigError
from outlast.journal import holds_run, started_at_s

__all__ = ["Found", "find_run"]


class Found(NamedTuple):
    """A run directory, and of how many beside it it was chosen; 0 when it was named itself."""

    run_dir: Path
    num_runs: int

    @property
    def note(self) -> str:
        """What to tell a person who named the directory above; empty for one who named the run."""
        return "" if self.num_runs == 0 else f"{self.run_dir}: the newest of {self.num_runs} in {self.run_dir.parent}"


def find_run(path: Path) -> Found:
    """The run at `path`, or the newest one directly inside it. Raises ConfigError if there is none."""
    try:
        if holds_run(path):
            return Found(path, 0)
        runs = [entry for entry in path.iterdir() if holds_run(entry)] if path.is_dir() else []
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="give a directory you may read") from error
    if not runs:
        what = (
            "does not exist" if not path.exists() else "holds no run" if path.is_dir() else "is no directory of a run"
        )
        raise ConfigError(
            f"{path} {what}",
            remedy="call it in the folder in which the run was started, or give that folder's outlast-runs/NAME, or "
            "what `outlast run --run-dir` was given",
        )
    return Found(max(runs, key=started_at_s), len(runs))
