"""Members that compute more slowly than others get less to compute, from a planned view on; and they are named.

A machine that is a third as fast holds up all others for two thirds of each step. Nobody is sent away for it, and no
bit depends on it (protocol, 35). With a robust rule rows stay where they are, and slow members are only named.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from outlast.core.policy import WorkPolicy, WorkState
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import View
from outlast.core.protocol.work_shares import even

__all__ = ["measured", "work_of"]

_SLOW = 1.5
"""Times the median of the others: such a member is named, and again once it is no more."""


def measured(c: FleetState, now_s: float, told: hm.SpeedsMeasured) -> None:
    """So long a microbatch takes each member of the view that computes any."""
    c.leaf_s = {name: seconds for name, seconds in told.leaf_s.items() if c.roster.is_alive(name)}
    if c.view is None:
        return
    known = [name for name in c.view.members if name in c.leaf_s]
    for name in known if len(known) > 1 else ():
        over = c.leaf_s[name] / statistics.median(c.leaf_s[other] for other in known if other != name)
        if over >= _SLOW and name not in c.stragglers:
            c.stragglers[name] = now_s
            c.journal("notice", level="warning", text=_said(c, c.view, name, over))
        elif over < _SLOW and name in c.stragglers:
            since_s = now_s - c.stragglers.pop(name)
            where = c.roster.peers[name].agent
            text = f"{name} on {where} computes as fast as others again, after {since_s:.0f} s"
            c.journal("notice", level="info", text=text)


def _said(c: FleetState, view: View, name: str, over: float) -> str:
    work, at = work_of(c, view.members), view.members.index(name)
    gets, had = ((row or even(len(view.members), c.num_microbatches))[at] for row in (work, view.work))
    done = "its work stays as it is" if gets == had else f"it gets {gets} of {c.num_microbatches} in place of {had}"
    where, seconds = c.roster.peers[name].agent, c.leaf_s[name]
    return (
        f"{name} on {where} is slow to compute: a microbatch takes it {seconds:.3f} s, {over:.1f} x the usual; {done}"
    )


def work_of(c: FleetState, members: Sequence[str]) -> tuple[int, ...]:
    """Microbatches of each of these in the next view; () for as even as they go."""
    rule = c.facts.get("aggregation", "mean") != "mean"
    if not c.leaf_s or not members or rule or c.settings.on_alarm != "act" or not c.settings.by_speed:
        return ()
    now = c.view.work if c.view is not None and c.view.members == tuple(members) else ()
    state = WorkState(even=even(len(members), c.num_microbatches), now=now)
    return WorkPolicy().decide([c.leaf_s.get(name, 0.0) for name in members], state).work
