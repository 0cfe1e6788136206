"""A run's journal as a failure trace: which replica's host failed, when, and when its slot was filled again.

Reads through `outlast.journal` only. Invariant: a replica that left or finished is no failure.
"""

from __future__ import annotations

from pathlib import Path

from outlast.core import events as ev
from outlast.errors import ConfigError

__all__ = ["RunJournal", "open_journal"]

_PLANNED = {"left", "finished"}


class RunJournal:
    """Failures of one run, as `JournalReader` wants them."""

    def __init__(self, entries: list[ev.AnyEvent]) -> None:
        if not entries:
            raise ConfigError("the run's journal holds no event yet", remedy="let the run start, or name another")
        self.events = entries
        self._start = entries[0].at_s
        self._end = max(event.at_s for event in entries)
        self._agents: dict[str, str] = {}
        self._failures: list[tuple[float, str, str, float | None]] = []
        self.down_s: list[float] = []
        self.detect_s: list[float] = []
        self.step_s: list[float] = []
        self.num_replicas = 0
        self.seconds: dict[str, float] = {}
        waiting: dict[str, tuple[float, str, str]] = {}
        for event in entries:
            self._take(event, waiting)
        self._failures += [(at, host, kind, None) for at, host, kind in waiting.values()]

    def _take(self, event: ev.AnyEvent, waiting: dict[str, tuple[float, str, str]]) -> None:
        at = event.at_s - self._start
        if isinstance(event, ev.RunStarted):
            self.num_replicas = event.num_replicas
        elif isinstance(event, ev.ReplicaStarted):
            self._agents[event.replica] = event.agent
            slot = event.replica.split(".")[0]
            if slot in waiting:
                since, host, kind = waiting.pop(slot)
                self._failures.append((since, host, kind, at - since))
        elif isinstance(event, ev.ReplicaExited) and event.cause not in _PLANNED:
            slot = event.replica.split(".")[0]
            host = self._agents.get(event.replica, "unknown host")
            if slot in waiting:  # failed again before it was seen to start
                since, old_host, kind = waiting.pop(slot)
                self._failures.append((since, old_host, kind, at - since))
            waiting[slot] = (at, f"{host}/{slot}", event.cause)
        elif isinstance(event, ev.Recovery):
            self.down_s.append(max(0.0, event.downtime_s - event.detect_s))  # from the first notice
            self.detect_s.append(event.detect_s)
        elif isinstance(event, ev.ProgressMade):
            self.step_s.append(event.step_s)
        elif isinstance(event, ev.RunFinished):
            self.seconds = dict(event.seconds)

    def failures(self) -> list[tuple[float, str, str, float | None]]:
        """(seconds since the start, host/slot, cause, seconds until the slot was filled or None)."""
        return sorted(self._failures, key=lambda item: item[0])

    def span_s(self) -> float:
        """From the first event to the last."""
        return self._end - self._start

    def num_hosts(self) -> int:
        """Replica slots: each is one machine's worth here."""
        return max(self.num_replicas, len({replica.split(".")[0] for replica in self._agents}), 1)


def open_journal(path: str) -> RunJournal:
    """The journal of a run directory (or of a file in it). ConfigError if there is no run."""
    from outlast.journal import Journal

    where = Path(path)
    with Journal.open_reader(where.parent if where.is_file() else where) as journal:
        return RunJournal([entry.event for entry in journal.events()])
