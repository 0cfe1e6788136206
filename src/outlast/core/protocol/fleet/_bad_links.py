"""Links between hosts that a run's own exchanges have found bad: what their hosts are spared (decision 0164).

A member behind a bad link reduces no slice, so that only its own sums and the gradient cross the link, half of what
others send; nothing else changes, and no bit does, as it never matters who reduces. Where a ready spare stands behind a
good link, it takes the member's place in a planned view. A replacement is started elsewhere where there is room.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.core.protocol import host_messages as hm
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["judged", "relieved"]

_LEAST = 3  # members: of two each has to send and take everything anyway


def judged(c: FleetState, now_s: float, found: hm.LinksJudged) -> None:
    """The links of these hosts are bad, and no others."""
    bad = found.agents.keys() & c.roster.agents
    new = sorted(bad - c.roster.badly_linked)
    better = sorted((c.roster.badly_linked - bad) & c.roster.agents)
    act = c.settings.on_alarm == "act"
    for agent in new:
        done = "its replicas reduce nothing, and work goes elsewhere first" if act else "nothing is done (on_alarm)"
        c.journal("notice", level="warning", text=f"the link of {agent} is bad: {found.agents[agent]}; {done}")
    for agent in better:
        c.journal("notice", level="info", text=f"the link of {agent} is used again as others are")
    c.roster.badly_linked = set(bad) if act else set()
    c.roster.look()
    if act and c.view is not None and c.change is None and c.ending is None:
        for agent in new:
            _replace(c, agent)


def _replace(c: FleetState, agent: str) -> None:
    """Ready spares behind good links take the places of the members there: once in a run, as every replacement that is
    started afterwards counts against the run's restarts."""
    if agent in c.moved_for_link:
        return
    spares = [n for n in c.roster.having("ready") if c.roster.peers[n].agent not in c.roster.badly_linked]
    here = [n for n in c.roster.having("member") if c.roster.peers[n].agent == agent and not c.roster.peers[n].leaving]
    leaving = sum(peer.leaving for peer in (c.roster.peers[name] for name in c.current))
    for name in here[: max(0, len(spares) - leaving)]:
        c.roster.peers[name].leaving = c.leaving = True
        c.moved_for_link.add(agent)


def relieved(c: FleetState, members: Sequence[str]) -> tuple[str, ...]:
    """Those of a view that reduce nothing: none where fewer than two would be left to."""
    if not c.roster.badly_linked or len(members) < _LEAST:
        return ()
    found = tuple(name for name in members if c.roster.peers[name].agent in c.roster.badly_linked)
    return found if len(members) - len(found) >= 2 else ()
