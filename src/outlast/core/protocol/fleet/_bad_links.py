"""Links between hosts that a run's own exchanges have found bad: what their hosts are spared (decision 0164).

A member behind a bad link reduces no slice, so that only its own sums and the gradient cross the link; nothing else
changes, and no bit does, as it never matters who reduces. A place that falls vacant goes to a spare behind a good link
first, and a replacement is started elsewhere where there is room. Nobody is sent away for a link.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.core.protocol import host_messages as hm
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["judged", "relieved", "well_linked_first"]

_MOST = 0.25  # of the members: what these do not reduce the others do, over links of their own


def judged(c: FleetState, now_s: float, found: hm.LinksJudged) -> None:
    """The links of these hosts are bad, and no others."""
    bad = found.agents.keys() & c.roster.agents
    new, better = sorted(bad - c.bad_links), sorted((c.bad_links - bad) & c.roster.agents)
    act = c.settings.on_alarm == "act"
    c.bad_links = set(bad)
    c.roster.badly_linked = set(bad) if act else set()
    c.roster.look()
    spared = relieved(c, c.view.members) if c.view is not None else ()
    for agent in new:
        idle = any(c.roster.peers[name].agent == agent for name in spared)
        done = f"{'its replicas reduce nothing, and ' if idle else ''}work goes elsewhere first"
        done = done if act else "nothing is done (on_alarm)"
        c.journal("notice", level="warning", text=f"the link of {agent} is bad: {found.agents[agent]}; {done}")
    for agent in better:
        c.journal("notice", level="info", text=f"the link of {agent} is used again as others are")


def relieved(c: FleetState, members: Sequence[str]) -> tuple[str, ...]:
    """Those of a view that reduce nothing. Where more than a quarter would, nobody: the others' links would carry far
    more than these save, and what many hosts suffer from is no host's link."""
    if not c.roster.badly_linked:
        return ()
    found = tuple(name for name in members if c.roster.peers[name].agent in c.roster.badly_linked)
    return found if len(found) <= _MOST * len(members) else ()


def well_linked_first(c: FleetState, names: Sequence[str]) -> list[str]:
    """Spares in the order in which they take places."""
    return sorted(names, key=lambda name: c.roster.peers[name].agent in c.roster.badly_linked)
