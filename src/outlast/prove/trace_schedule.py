"""A stretch of a failure log as a schedule of strikes: its machines dealt to replicas, its hours compressed to seconds.

What is kept is how failures come: their bursts, their order, who fails again. What is not: repairs, as a replacement
starts at once on the machine that the replay runs on. The stretch is the busiest of the log. Pure.
"""

from __future__ import annotations

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
    """The hours of a log that are replayed. `machines`: how many of the log are dealt to the replicas."""

    start_h: float
    hours: float
    machines: int
    hits: tuple[Hit, ...]

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


def busiest(hits: Sequence[Hit], strikes: int) -> Stretch:
    """The shortest stretch with so many failures. ConfigError if the log has fewer."""
    ordered = sorted(hits)
    if strikes < 1 or len(ordered) < strikes:
        raise ConfigError(
            f"--strikes {strikes}: the log has {len(ordered)} failures", remedy=f"from 1 to {max(1, len(ordered))}"
        )
    starts = range(len(ordered) - strikes + 1)
    first = min(starts, key=lambda at: ordered[at + strikes - 1].at_h - ordered[at].at_h)
    chosen = tuple(ordered[first : first + strikes])
    hours = max(chosen[-1].at_h - chosen[0].at_h, 1e-3)
    return Stretch(start_h=chosen[0].at_h, hours=hours, machines=len({hit.node for hit in chosen}), hits=chosen)
