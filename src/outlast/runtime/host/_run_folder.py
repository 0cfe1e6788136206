"""The folder of a run that begins: its lock, the first words of its journal, its clock and its configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from outlast.config import Resolved
from outlast.core import events
from outlast.errors import EnvironmentFault
from outlast.journal import Journal, RunLock, keep_clock

__all__ = ["begin_folder"]


def begin_folder(
    run_dir: Path, resolved: Resolved, run_id: str, command: list[str], began_s: float, apart_s: float
) -> RunLock:
    """Make it, and take its lock. `began_s`: Unix time; `apart_s`: Unix time less monotonic time. EnvironmentFault."""
    config = resolved.config
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot make the run directory {run_dir}: {error.strerror}"
        raise EnvironmentFault(reason, remedy="give --run-dir a directory that can be written") from error
    lock = RunLock.take(run_dir)
    journal = Journal.create(run_dir, lock_fd=os.dup(lock.fileno()))
    shown = msgspec.structs.asdict(config)
    journal.append(
        events.RunStarted(
            at_s=began_s,
            run_id=run_id,
            command=command,
            num_replicas=config.replicas,
            num_spares=config.num_spares,
            signature={},
            config=shown,
        )
    )
    journal.close()
    written = {key: {"value": value, "origin": resolved.origins[key]} for key, value in shown.items()}
    text = json.dumps(written, indent=1, default=str) + "\n"
    try:
        (run_dir / "logs").mkdir(exist_ok=True)
        keep_clock(run_dir, apart_s)
        (run_dir / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write into the run directory {run_dir}: {error.strerror}",
            did="nothing was started",
            remedy="free some space on its disk, or give --run-dir another one",
        ) from error
    return lock
