"""Whether the processes that outlive a run's faults hold more and more: descriptors and memory, as the kernel counts.

Only the launcher, the coordinator and agents are looked at: replicas hold what the script makes them hold. What is told
is growth that no sample contradicts: the least of the last third of a process's life against the most of the first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from outlast.prove._process_tree import processes
from outlast.prove.strike_findings import StrikeFinding

__all__ = ["LeakWatch", "Sample", "leaks"]

_EVERY_S = 1.0
_LEAST = 12  # samples of a process that lived long enough to say anything
_MORE_DESCRIPTORS, _MORE_BYTES = 32, 128 << 20  # a few replaced replicas and views are no leak


class Sample(NamedTuple):
    """What a process held at one moment."""

    descriptors: int
    bytes: int


class LeakWatch:
    """`look` as often as you like: it samples once a second."""

    def __init__(self) -> None:
        self.launcher = 0
        self.samples: dict[tuple[str, int], list[Sample]] = {}
        self._last_s = 0.0

    def look(self) -> None:
        """Sample everybody who is there."""
        now = time.monotonic()
        if not self.launcher or now - self._last_s < _EVERY_S:
            return
        self._last_s = now
        rows = [("launcher", self.launcher), *((seen.name, seen.pid) for seen in processes(self.launcher))]
        for name, pid in rows:
            if name in ("launcher", "coordinator") or name.startswith("a"):
                sample = _sample(pid)
                if sample is not None:
                    self.samples.setdefault((name, pid), []).append(sample)

    def findings(self) -> list[StrikeFinding]:
        """What grew, of all processes that were watched."""
        return [finding for (name, _), samples in self.samples.items() for finding in leaks(name, samples)]


def _sample(pid: int) -> Sample | None:
    """None: it is gone, or belongs to somebody else."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Sample(len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, IndexError):
        return None


def leaks(name: str, samples: list[Sample]) -> Iterator[StrikeFinding]:
    """Growth of one process."""
    if len(samples) < _LEAST:
        return
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]
    before, after = max(each.descriptors for each in first), min(each.descriptors for each in last)
    if after > before + _MORE_DESCRIPTORS:
        yield _grown(name, f"{before} descriptors", str(after))
    had, has = max(each.bytes for each in first), min(each.bytes for each in last)
    if has > had + _MORE_BYTES and has > 1.5 * had:
        yield _grown(name, f"{had >> 20} MiB", f"{has >> 20} MiB")


def _grown(name: str, before: str, after: str) -> StrikeFinding:
    text = f"the {name} held {before} at most at first, and {after} at least in the last third of its life"
    return StrikeFinding(check="leak", detail=text)
