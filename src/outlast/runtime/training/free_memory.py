"""How much memory is free: of the host, as far as this process may take it, and of a device."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["free_bytes", "memory_left"]

_NO_LIMIT = 1 << 60


def free_bytes(device: torch.device) -> int:
    """Bytes that a device has free; the host, by `memory_left`."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory_left()


def memory_left(groups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes until the kernel has to end a process: of the machine, or of a control group around this one if that is
    less. `groups`, `mine`: where these are."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    left = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    with suppress(OSError):
        for line in mine.read_text().splitlines():
            _, kinds, place = line.split(":", 2)
            if kinds in ("", "memory"):
                at = groups / kinds / place.lstrip("/")
                around = [at, *(parent for parent in at.parents if groups in (parent, *parent.parents))]
                left = min(left, *(_left_in(group) for group in around))
    return left


def _left_in(group: Path) -> int:
    """Bytes that one control group, of either version, may still take; more than any machine has if it has no limit."""
    found = _NO_LIMIT
    kinds = (
        ("memory.max", "memory.current", "inactive_file "),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    )
    for limit, used, files in kinds:
        with suppress(OSError, ValueError, StopIteration):
            stat = (group / "memory.stat").read_text().splitlines()
            cache = next(int(line.split()[1]) for line in stat if line.startswith(files))
            most = int((group / limit).read_text())
            found = min(found, max(0, most - int((group / used).read_text()) + cache))
    return found
