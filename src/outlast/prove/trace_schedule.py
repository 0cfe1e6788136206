"""A stretch of a failure log as a schedule of strikes: its machines dealt to replicas, its hours compressed to seconds.

What is kept is how failures come: their bursts, their order, who fails again. What is not: repairs, as a replacement
starts at once on the machine that the replay runs on. The stretch is the busiest of the log. Pure.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from outlast.errors import ConfigError

__all__ = ["Hit", "Stretch", "busiest"]

_SILENT = ("hang", "nccl", "timeout", "watchdog", "stall", "network", "link", "switch", "cable", "nic")


class Hit(NamedTuple):
    """A failure of the log: hours since its start, the machine, and what the log says of it."""

    at_h: float
    node: str
    kind: str


class Stretch(NamedTuple):
    """The hours of a log that are replayed. `failures`: how many there were; `hits`: those that are replayed;
    `machines`: how many of the log had them, and are dealt to the replicas."""

    start_h: float
    hours: float
    machines: int
    hits: tuple[Hit, ...]
    failures: int

    def schedule(self, replicas: int, begin_s: float, length_s: float) -> str:
        """For `outlast prove run --schedule`: the first failure soon after training begins, the last before it ends."""
        room_s = max(0.1, 0.9 * (length_s - begin_s))
        nodes = sorted({hit.node for hit in self.hits})
        rows, last_s = [], 0.0
        for hit in self.hits:
            at_s = begin_s + (hit.at_h - self.start_h) / self.hours * room_s
            kind = "stop" if any(word in hit.kind.lower() for word in _SILENT) else "kill"
            pick = (nodes.index(hit.node) % replicas + 0.5) / replicas
            rows.append(f"{round(max(0.0, at_s - last_s), 3):g}:{kind}:replica:{round(pick, 3):g}")
            last_s = max(last_s, at_s)
        return ",".join(rows)

    def scale(self, begin_s: float, length_s: float) -> float:
        """Hours of the log that a second of the replay stands for."""
        return self.hours / max(0.1, 0.9 * (length_s - begin_s))


def busiest(hits: Sequence[Hit], hours: float, most: int) -> Stretch:
    """The stretch of so many hours that begins with a failure and has the most of them; the first `most` of these.

    ConfigError for a log without failures, or a stretch that is none.
    """
    if not hits or not hours > 0 or most < 1:
        raise ConfigError(
            f"--hours {hours:g} --strikes {most} of a log with {len(hits)} failures",
            remedy="a log with failures, --hours above 0 and --strikes 1 or more",
        )
    ordered = sorted(hits)
    times = [hit.at_h for hit in ordered]
    ends = [bisect.bisect_left(times, at_h + hours) for at_h in times]
    first = max(range(len(ordered)), key=lambda at: ends[at] - at)
    chosen = tuple(ordered[first : ends[first]])
    kept = chosen[:most]
    return Stretch(
        start_h=times[first], hours=hours, machines=len({hit.node for hit in kept}), hits=kept, failures=len(chosen)
    )
