"""What a replayed trace came to: the useful time of the struck run beside what a plan makes of the same outages."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.core import events as ev
from outlast.plan.replay_comparison import HostOutage, ReplayComparison, compared
from outlast.prove.script_plan import ScriptFleet, Shape
from outlast.prove.striker import StrikeRecord

__all__ = ["outages_of", "outcome_of"]


def outages_of(record: StrikeRecord) -> list[HostOutage]:
    """What was struck, when, and when it was there again. A process that is struck on a host that stands is replaced
    there at once."""
    found = []
    for done in record.done:
        at_s = record.unix_s + done.at_s
        if done.role == "host":
            until_s = None if done.continued_s is None else record.unix_s + done.continued_s
            found.append(HostOutage(host=done.name, at_s=at_s, until_s=until_s))
        elif done.role in ("replica", "spare"):
            found.append(HostOutage(host=done.name.partition(".")[0], at_s=at_s, until_s=at_s))
    return found


def outcome_of(
    fleet: ScriptFleet, shape: Shape, record: StrikeRecord, events: Sequence[ev.AnyEvent]
) -> ReplayComparison | None:
    """None of a run that no trace struck, or that was never whole; and where hosts have room for other hosts' replicas,
    which a plan's machines have not."""
    machines, rest = divmod(fleet.replicas + fleet.spares, shape.slots) if shape.hosts and shape.slots else (0, 0)
    if not fleet.from_training or (shape.hosts and (rest or machines != shape.hosts)):
        return None
    if fleet.spares and shape.slots > 1:
        return None
    places = machines - fleet.spares if shape.hosts else fleet.replicas
    outages = outages_of(record)
    return compared(events, outages, replicas=fleet.replicas, places=places, spares=fleet.spares) if outages else None
