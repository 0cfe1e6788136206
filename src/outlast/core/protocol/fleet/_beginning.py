"""How a run begins: with whoever is ready, a little after the first is (protocol, 28); and again from a checkpoint.

Bits do not depend on who is there, so a replica that is late joins like any other. When nobody lives and nobody will
be started any more, the run ends at once, with what the replicas said.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outlast.core.protocol.fleet._vacancies import too_few
from outlast.core.protocol.fleet.roster import slot_of
from outlast.core.protocol.fleet.state import FleetState, Start
from outlast.core.protocol.fleet.views import install
from outlast.core.protocol.types import View

if TYPE_CHECKING:
    from collections.abc import Iterable


__all__ = ["begin_again", "forget_view", "gathered", "overdue", "try_start"]

_MOST = 6  # times `gather_s`


def try_start(c: FleetState, now_s: float) -> None:
    """The first view: of all replicas, or of those that are ready when the patience for the others is over. That is as
    long as the first needed, within bounds: all of them have the same to load."""
    start, roster = c.start, c.roster
    if math.isnan(start.since_s):
        start.since_s = now_s
    if not roster.count("fresh"):
        start.first_s, start.late = math.nan, False
        _end_without_anybody(c)
    elif roster.enough_to_start or (start.late and not too_few(c, roster.count("fresh"))):
        _begin(c, now_s)
    elif math.isnan(start.first_s):
        start.first_s = now_s
        if c.facts.get("aggregation", "mean") != "mean":
            return  # what a robust rule withstands depends on how many there are: wait for all, up to `start_s`
        gather_s = c.settings.gather_s
        c.timer("gather", min(max(gather_s, now_s - start.since_s), _MOST * gather_s))


def gathered(c: FleetState) -> None:
    """The patience for whoever is late is over."""
    c.start.late = c.view is None and not math.isnan(c.start.first_s)


def _begin(c: FleetState, now_s: float) -> None:
    wanted = c.settings.num_replicas
    members = c.roster.by_host(c.roster.having("fresh")[:wanted])
    here = {slot_of(name) for name in members}
    missing = [f"r{index}" for index in range(wanted) if f"r{index}" not in here]
    if missing:
        waited = f"{now_s - c.start.first_s:.1f} s after {members[0]} was"
        who = ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        text = f"the run begins with {len(members)} of {wanted} replicas: {who} not ready {waited}, and will join"
        c.journal("notice", level="warning", text=text)
    c.start = Start()
    install(c, View(id=c.next_id(), members=members, start=True), "start")


def overdue(c: FleetState) -> None:
    """The time is up that the first may take, or all where their number matters."""
    fresh = c.roster.count("fresh")
    if c.view is None and fresh and not too_few(c, fresh):
        c.start.late = True
    elif c.view is None and fresh:
        least = f"min_replicas asks for {c.settings.min_replicas}"
        c.finish("failed", 3, 0, f"{fresh} replicas were ready after {c.settings.start_s:g} s, and {least}")
    elif c.view is None:
        c.finish("failed", 3, 0, f"no replica was ready after {c.settings.start_s:g} s" + c.failures.said())


def _end_without_anybody(c: FleetState) -> None:
    """Restarts are used up, or no slot may be used any more: there is nothing to wait for."""
    roster = c.roster
    if roster.deserted and not c.awaiting and not c.unheard:
        code = c.failures.newest_code or (6 if c.ever_formed else 3)
        told = "no replica is left, and none may be started any more"
        c.finish("failed", code, 0, f"{told} ({roster.restarts} restarts)" + c.failures.said())


def begin_again(c: FleetState, members: Iterable[str], cause: str) -> bool:
    """Whether it does, from the newest checkpoint; `members` held the state, and are gone. Every replica of the next
    first view reads the newest generation before it forms the view; should there be none yet, the run begins at step 0
    once more: the same bits again, only later. So it does without checkpoints where no step was made, if somebody has
    its script loaded."""
    manned = {slot_of(name) for name in c.roster.having("spawning", "fresh", "joining", "ready")}
    slots = [f"r{index}" for index in range(c.settings.num_replicas)]
    missing = sum(slot not in manned and slot not in c.roster.unpaid for slot in slots)
    within = c.roster.restarts + missing <= c.settings.max_restarts
    step = c.known_steps(members)
    anew = not step and bool(c.roster.having("fresh", "joining"))
    if not (within and (c.facts.get("checkpoints") or anew)):
        return False
    c.journal("fleet_lost", step=step, detail=cause)
    c.reports.fleet_lost(step)
    c.roster.forget_steps()
    forget_view(c)
    if c.roster.agents and c.roster.agents == c.roster.drained_agents:
        wait = f"the run waits up to {c.settings.start_s:g} s for another, or for outlast drain --undo"
        c.journal("notice", level="warning", text=f"every host that is left is drained: {wait}")
    c.timer("start", c.settings.start_s)
    return True


def forget_view(c: FleetState) -> None:
    """All of the view are gone, and with them what it held: as if there had been none. Where a least number is asked
    for, others are waited for up to `start_s` once more: the driver's own wait for the first view may be over."""
    c.change = None
    c.outgoing.clear()
    c.start = Start()
    c.set_views(None, None)
    if c.settings.min_replicas > 1:
        c.timer("start", c.settings.start_s)
