"""Hosts that join, and hosts of which nothing is heard: removed whole, in one view (protocol, 30).

A host that is only cut off may live, and its replicas with it. What it can do is bounded by rule 2: its view is dead
once a living member has left it, and without such a member the coordinator waits until the lease is surely over. So
silence never proves a death here; it says for whom nobody waits.
"""

from __future__ import annotations

from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet import _agents
from outlast.core.protocol.fleet import change as _change
from outlast.core.protocol.fleet.roster import host_named_in
from outlast.core.protocol.fleet.state import FleetState, HostSilence

__all__ = ["host_here", "host_silent", "overdue", "patience", "settle"]


def host_here(c: FleetState, now_s: float, said: hm.HostHere) -> None:
    """A host offers its slots; its agent's greeting follows."""
    c.roster.slots[said.agent] = said.slots
    c.roster.notes[said.agent] = said.noted
    c.roster.host_names[host_named_in(said.agent)] = said.host


def host_silent(c: FleetState, now_s: float, silent: hm.HostSilent) -> None:
    """Nobody waits for this host any more, and it gets no replica until it is back. A member there may have been heard
    of since, and have gone on without its agent: of that one nobody else would ever say that it is gone."""
    agent = silent.agent
    mine = [peer.name for peer in c.roster.peers.values() if peer.agent == agent and peer.status != "gone"]
    if agent not in c.roster.agents and not mine:
        return
    again = agent in c.silent
    c.silent[agent] = HostSilence(f"its host is not heard of: {silent.why}", now_s - silent.for_s, now_s)
    if not again:
        c.roster.agent_lost(agent)
        c.journal("agent_lost", agent=agent, cause=silent.why, replicas=mine)
    inside = [name for name in mine if name in c.current]
    for name in mine:
        if name not in inside:
            _gone(c, now_s, name, agent, False)
    c.awaiting.difference_update(inside)
    if inside:  # noted only, where others have yet to report after a restart
        _change.begin(c, f"host of {', '.join(inside)}: {silent.why}")


def settle(c: FleetState, now_s: float) -> None:
    """Members of silent hosts that no view has any more: their slots are free. What is left of them is killed when
    their agent is back."""
    for peer in [p for p in c.roster.peers.values() if p.status == "condemned" and p.agent in c.silent]:
        _gone(c, now_s, peer.name, peer.agent, True)


def patience(c: FleetState) -> None:
    """After the last step nobody leaves the view: its members on a silent host may live, and write, until their lease
    is surely over."""
    for agent, silence in c.silent.items():
        if not silence.timed:
            silence.timed = True
            c.timer(f"host:{agent}", c.settings.lease_s * (1.0 + c.settings.clock_margin))


def overdue(c: FleetState, now_s: float, agent: str) -> None:
    """A silent host's lease is over: what it had has ended, or writes no more."""
    if c.ending is None or agent not in c.silent:
        return
    for name in [n for n in c.current if n in c.roster.peers and c.roster.peers[n].agent == agent]:
        if c.roster.peers[name].status != "gone":
            _gone(c, now_s, name, agent, True)


def _gone(c: FleetState, now_s: float, name: str, agent: str, of_view: bool) -> None:
    silence = c.silent[agent]
    c.reports.noticed(name, "coordinator", silence.noticed_s)
    gone = m.Exited(
        member=name,
        cause="agent_lost",
        detail=silence.why,
        last_alive_s=silence.since_s,
        noticed_at_s=silence.noticed_s,
    )
    _agents.dropped(c, now_s, gone, of_view)
