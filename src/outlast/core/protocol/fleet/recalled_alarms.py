"""What a restarted coordinator takes over of its predecessors' alarms: the run's own record says all of it.

Invariant: after `recall` the beliefs, the open alarms, and who is doubted or barred are those that the last coordinator
had as it wrote its last event. What it had begun to do is weighed anew, once everybody has been heard of.
"""

from __future__ import annotations

from collections.abc import Iterable

from outlast.core import events as ev
from outlast.core.policy import alarm_name
from outlast.core.protocol.fleet import _alarms
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["ALARM_EVENTS", "recall"]

ALARM_EVENTS: tuple[type[ev.AnyEvent], ...] = (
    ev.AlarmWeighed, ev.DeviceFinding, ev.Recovery, ev.ReplicaExited, ev.ReplicaStarted, ev.RunStarted,
    ev.VerdictReached,
)  # fmt: skip
"""What `recall` reads of a record."""


def recall(c: FleetState, story: Iterable[ev.AnyEvent], apart_s: float) -> None:
    """Go through a run's record. `apart_s`: Unix time less this coordinator's monotonic clock."""
    agents: dict[str, str] = {}
    for event in story:
        at_s = event.at_s - apart_s
        match event:
            case ev.ReplicaStarted():
                agents[event.replica] = event.agent
            case ev.ReplicaExited():
                _alarms.failed(c, at_s, agents.get(event.replica, ""), event.cause)
            case ev.Recovery():
                c.outages.append(event.downtime_s)
            case ev.VerdictReached(action="evict_host"):
                c.roster.barred.add(event.host)
            case ev.DeviceFinding(replica=""):
                _found(c, at_s, event)
            case ev.AlarmWeighed(told_only=False):
                _decided(c, at_s, event)
    for agent in c.prognosis.open:
        c.timer(f"outlook:{agent}", c.settings.ack_s)


def _found(c: FleetState, at_s: float, event: ev.DeviceFinding) -> None:
    if event.source == "test":
        _alarms.tested(c, at_s, event.host, event.action)
    elif event.action in _alarms.SEVERITIES:
        _alarms.opened(c, at_s, event.host, alarm_name(event.action, event.evidence), event.evidence)


def _decided(c: FleetState, at_s: float, event: ev.AlarmWeighed) -> None:
    if event.action == "save":
        c.saved_s = at_s
    elif event.action == "move":
        _alarms.emptied(c, event.host)
