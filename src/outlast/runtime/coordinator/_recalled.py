"""What a coordinator takes over from those before it, beside the durable record: from the run's journal.

Decides nothing: it reads, and the pure machine makes of it what follows.
"""

from __future__ import annotations

from outlast.core import events
from outlast.core.protocol import Coordinator
from outlast.core.protocol.fleet.recalled_alarms import ALARM_EVENTS
from outlast.core.protocol.fleet.reports import ReportedFault
from outlast.journal import Journal

__all__ = ["take_over", "unreported"]


def take_over(coordinator: Coordinator, journal: Journal, apart_s: float) -> None:
    """Faults that nobody has reported as recovered from, and alarms. `apart_s`: Unix time less monotonic time."""
    coordinator.reports.recall(*unreported(journal, apart_s))
    coordinator.recall((entry.event for entry in journal.events(kinds=ALARM_EVENTS)), apart_s)


def unreported(journal: Journal, apart_s: float) -> tuple[list[ReportedFault], tuple[int, float] | None]:
    """What an earlier coordinator wrote down and did not live to report as recovered from: deaths, and the loss of the
    fleet (its step, and when). `apart_s`: Unix time less monotonic time."""
    kinds = (events.ReplicaExited, events.Recovery, events.FleetLost, events.ViewFormed)
    story = [entry.event for entry in journal.events(kinds=kinds)]
    told = {e.replica for e in story if isinstance(e, events.Recovery)}
    faults = [
        ReportedFault(e.cause, e.replica, e.noticed_by, 0.0, 0.0, e.detail)
        for e in story
        if isinstance(e, events.ReplicaExited) and e.replica not in told and e.cause not in ("left", "finished")
    ]
    newest = next((e for e in reversed(story) if isinstance(e, events.FleetLost | events.ViewFormed)), None)
    gone = (newest.step, newest.at_s - apart_s) if isinstance(newest, events.FleetLost) else None
    return faults, gone
