"""What a coordinator takes over from those before it, beside the durable record: from the run's journal.

Decides nothing: it reads, and the pure machine makes of it what follows.
"""

from __future__ import annotations

from dataclasses import replace

from outlast.core import events
from outlast.core.protocol import Coordinator
from outlast.core.protocol.fleet.recalled_alarms import ALARM_EVENTS
from outlast.core.protocol.fleet.reports import Loss, ReportedFault
from outlast.journal import Journal

__all__ = ["take_over", "unreported"]

_KINDS = (
    events.ReplicaExited, events.Recovery, events.FleetGone, events.ViewFormed, events.ViewInstalled, events.Suspected,
    events.AgentLost,
)  # fmt: skip


def take_over(coordinator: Coordinator, journal: Journal, apart_s: float) -> None:
    """Faults that nobody has reported as recovered from, ends that nobody has told, and alarms. `apart_s`: Unix time
    less monotonic time."""
    coordinator.reports.recall(*unreported(journal, apart_s))
    coordinator.recall((entry.event for entry in journal.events(kinds=ALARM_EVENTS)), apart_s)


def unreported(journal: Journal, apart_s: float) -> tuple[list[ReportedFault], Loss | None, set[str]]:
    """Return the deaths that nobody reported as recovered from, the loss of the fleet, and who was put out without
    being said to have ended. `apart_s`: Unix time less monotonic time."""
    story = [entry.event for entry in journal.events(kinds=_KINDS)]
    out = {e.replica for e in story if isinstance(e, events.Suspected) and e.decision == "evict"}
    out -= {e.replica for e in story if isinstance(e, events.ReplicaExited)}
    out -= {replica for e in story if isinstance(e, events.AgentLost) for replica in e.replicas}
    told = {e.replica for e in story if isinstance(e, events.Recovery)}
    faults, view = list[ReportedFault](), list[str]()
    for e in story:
        if isinstance(e, events.ViewInstalled):
            view = e.members
        elif isinstance(e, events.ReplicaExited) and e.replica not in told and e.cause not in ("left", "finished"):
            known = ReportedFault(e.cause, e.replica, e.noticed_by, e.at_s - apart_s, 0.0, e.detail, step=e.step)
            faults.append(replace(known, of_view=e.replica in view))
    # What is told of lost steps is of all that had gone wrong until its view; one of an earlier view may be told later.
    told_of = max((e.view for e in story if isinstance(e, events.Recovery) and e.cause != "coordinator"), default=[])
    loss: Loss | None = None
    for index, e in enumerate(story):
        if isinstance(e, events.FleetGone):
            back = next(([v.epoch, v.n] for v in story[index:] if isinstance(v, events.ViewFormed)), None)
            if back is None or back > told_of:
                loss = loss or Loss(e.at_s - apart_s, e.step)
                loss.again(e.step)
        elif isinstance(e, events.ViewFormed) and loss is not None:
            loss.formed(e.step)
    return faults, loss, out
