"""A stretch of a failure log as a schedule of strikes: machines dealt to replicas, or to hosts, hours made to seconds.

What is kept is how failures come: their bursts, their order, who fails again; of hosts also how long they stay away.
Repairs of replicas are not kept, as a replacement starts at once on the machine that the replay runs on. The stretch is
the busiest of the log. Pure.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outlast.errors import ConfigError

__all__ = ["Hit", "Stretch", "busiest", "replayed_s"]

_SILENT = ("hang", "nccl", "timeout", "watchdog", "stall", "network", "link", "switch", "cable", "nic")


_SHORTEST_S = 0.2  # that a host is away: a machine that is back within a minute of the log has failed all the same


class Hit(NamedTuple):
    """A failure of the log: hours since its start, the machine, what the log says of it, and when the machine was back;
    None: not in the log."""

    at_h: float
    node: str
    kind: str
    up_h: float | None = None


class Stretch(NamedTuple):
    """The hours of a log that are replayed. `failures`: how many there were; `hits`: those that are replayed;
    `machines`: how many of the log had them, and are dealt to the replicas."""

    start_h: float
    hours: float
    machines: int
    hits: tuple[Hit, ...]
    failures: int

    def schedule(self, replicas: int, trains_s: float) -> str:
        """For `outlast prove run --schedule`, over nine tenths of so many seconds of training."""
        rows, last_s = [], 0.0
        for hit, at_s, place in self._dealt(replicas, trains_s):
            kind = "stop" if _is_silent(hit) else "kill"
            rows.append(_item(at_s - last_s, kind, "replica", place, replicas))
            last_s = max(last_s, at_s)
        return ",".join(rows)

    def schedule_of_hosts(self, hosts: int, trains_s: float) -> str:
        """As `schedule`, of whole hosts: all but the first of `hosts`, each away for as long as its machine was, to the
        end where the log does not say when it was back. What fails on a host that is away is left out."""
        away_until: dict[int, float] = {}
        rows, last_s = [], 0.0
        for hit, at_s, place in self._dealt(hosts - 1, trains_s):
            if at_s < away_until.get(place, 0.0):
                continue
            hours = hit.up_h - hit.at_h if hit.up_h is not None else self.hours
            for_s = max(_SHORTEST_S, hours / self.scale(trains_s))
            kind = f"{'hang' if _is_silent(hit) else 'power'}~{round(for_s, 3):g}"
            rows.append(_item(at_s - last_s, kind, "host", place, hosts - 1))
            away_until[place], last_s = at_s + for_s, max(last_s, at_s)
        return ",".join(rows)

    def _dealt(self, among: int, trains_s: float) -> Iterator[tuple[Hit, float, int]]:
        """Each failure, when in the replay, and to which of so many it falls: always the same one for a machine."""
        nodes = sorted({hit.node for hit in self.hits})
        for hit in self.hits:
            yield hit, (hit.at_h - self.start_h) / self.scale(trains_s), nodes.index(hit.node) % among

    def scale(self, trains_s: float) -> float:
        """Hours of the log that a second of the replay stands for."""
        return self.hours / replayed_s(trains_s)


def replayed_s(trains_s: float) -> float:
    """How much of so many seconds of training a log's stretch takes: the last failure comes before the end."""
    return max(0.1, 0.9 * trains_s)


def _is_silent(hit: Hit) -> bool:
    return any(word in hit.kind.lower() for word in _SILENT)


def _item(wait_s: float, kind: str, role: str, place: int, among: int) -> str:
    """As `read_schedule` has it."""
    return f"{round(max(0.0, wait_s), 3):g}:{kind}:{role}:{round((place + 0.5) / among, 3):g}"


def busiest(hits: Sequence[Hit], hours: float, most: int, machines: int = 0) -> Stretch:
    """The stretch of so many hours that begins with a failure and has the most of them; the first `most` of these.
    `machines`: only those of so many machines, every so-manieth by name; 0: of all.

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
    nodes = sorted({hit.node for hit in chosen})
    few = {nodes[index * len(nodes) // machines] for index in range(machines)} if 0 < machines < len(nodes) else nodes
    kept = tuple(hit for hit in chosen if hit.node in few)[:most]
    return Stretch(
        start_h=times[first], hours=hours, machines=len({hit.node for hit in kept}), hits=kept, failures=len(chosen)
    )
