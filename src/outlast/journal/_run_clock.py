"""What a run's clock says now, to whoever looks at it: events are counted from one reading of the wall clock, and so is
how old they are, or a clock that was set would make a run look stalled that is not.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["keep_clock", "run_now_s"]

_NAME = "clock"
_BOOT, _TIMES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")


def keep_clock(run_dir: Path, apart_s: float) -> None:
    """Written when the run begins. `apart_s`: Unix time less monotonic time, as the run has it."""
    (run_dir / _NAME).write_text(f"{apart_s!r} {_here()}\n", encoding="utf-8")


def run_now_s(run_dir: Path) -> float:
    """Unix seconds, as the run's events would have them; on another machine, or after a restart of this one, as the
    wall clock has them."""
    with contextlib.suppress(OSError, ValueError):
        apart, here = (run_dir / _NAME).read_text(encoding="utf-8").split()
        if here == _here():
            return float(apart) + time.monotonic()
    return time.time()


def _here() -> str:
    """What decides about monotonic time: the boot of a kernel, and the namespace that may shift it."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else "unknown"
    return f"{boot}/{os.stat(_TIMES).st_ino if _TIMES.exists() else 0}"
