"""How many replicas are kept caught up beside the run, where that is left to outlast (`spares = "auto"`).

The number is the policy's (`core.policy.SparesPolicy`, by the run's record); here it is held to what there is room for
and carried out: more are started, fewer leave between two steps. It is part of the durable record before anybody hears
of it, so a coordinator that takes over keeps to it.
"""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet._asked import Refusal, ask_out, check_state_stays, slots_of_all, too_many
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["worth"]


def worth(c: FleetState, now_s: float, said: m.SparesWorth) -> None:
    """The policy has spoken. Of no effect where there is no room, and put off while a view is being made: the driver
    says it again as long as it differs."""
    before, number = c.settings.num_spares, _within(c, said.number)
    idle = c.view is not None and c.change is None and c.planned is None and not c.leaving
    if not c.settings.auto_spares or number == before or c.over or c.ending is not None or not idle:
        return
    c.hold(number)
    out = too_many(c, c.settings.num_replicas) if number < before else []
    try:
        check_state_stays(c, out, "")
    except Refusal:
        c.hold(before)
        return
    first = c.settings.num_replicas
    c.roster.unpaid.update(f"r{index}" for index in range(first + before, first + number))
    ask_out(c, out)
    names = [peer.name for peer in out]
    c.journal("spares_held", number=number, worth=said.number, reason=said.reason, replicas=names)
    c.persist()


def _within(c: FleetState, number: int) -> int:
    """As many as the hosts have slots for, and this machine memory; one a replica where nobody has said."""
    slots, replicas = slots_of_all(c) or c.settings.num_slots, c.settings.num_replicas
    room = slots - replicas if slots else replicas
    return max(0, min(number, room, c.settings.most_processes - replicas))
