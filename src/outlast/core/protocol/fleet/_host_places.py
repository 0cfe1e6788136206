"""Where replicas are, as far as a robust rule whose rows count by host asks for it (`fault_domain = "host"`).

Such a rule needs its view on so many hosts, however many members there are (protocol, 23). A host that comes back finds
the slots filled elsewhere: the fleet is complete, and would wait for ever. So spares on hosts that the view is not on
come first, and where none is there one process makes room: it leaves, and the next one is started on such a host. Of
runs without such a rule nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outlast.core.protocol.fleet._asked import ask_out
from outlast.core.protocol.fleet._vacancies import decided, too_few
from outlast.core.protocol.fleet.roster import Peer
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import View

__all__ = ["enough_without", "hosts_needed", "make_room", "other_hosts_first", "wait_in_vain"]


def hosts_needed(c: FleetState) -> int:
    """Hosts that a view must be on; 0 where their number does not matter."""
    return int(c.facts.get("fault_domains", "0"))


def enough_without(c: FleetState, agent: str) -> bool:
    """Whether a host may be emptied: else all would wait for it, or for another."""
    needed = hosts_needed(c)
    return not needed or len(c.roster.load({agent})) >= needed


def other_hosts_first(c: FleetState, names: Sequence[str], staying: Sequence[str]) -> list[str]:
    """Spares in the order in which they take places beside `staying`: first one of each host that has none."""
    if not hosts_needed(c):
        return list(names)
    hosts = {c.roster.peers[name].agent for name in staying}
    first: list[str] = []
    for name in names:
        if c.roster.peers[name].agent not in hosts:
            hosts.add(c.roster.peers[name].agent)
            first.append(name)
    return first + [name for name in names if name not in first]


def make_room(c: FleetState, view: View) -> None:
    """The view is formed. Is it on too few hosts, and could be on another, somebody leaves, between two steps: all wait
    as it is."""
    if not (needed := hosts_needed(c)):
        return
    peers = c.roster.peers
    hosts = Counter(peers[name].agent for name in view.members)
    if len(hosts) >= needed or any(peer.leaving and peer.alive for peer in peers.values()):  # whose slot will be free
        return
    elsewhere = [p for p in peers.values() if p.alive and not p.leaving and p.agent not in hosts]
    out = None
    if not elsewhere:
        out = _to_start_anew(c, view, hosts)
    elif len(view.members) >= c.settings.num_replicas and any(peer.status == "ready" for peer in elsewhere):
        out = _doubled(c, view, hosts)
    if out is not None:
        ask_out(c, [out])
        why = f"the run's robust rule needs replicas on {needed} hosts, and has them on {len(hosts)}"
        c.journal("notice", level="info", text=f"{out.name} on {out.agent} makes room for one on another host: {why}")
        c.persist()


def wait_in_vain(c: FleetState, view: View) -> str:
    """Why the view waits for a host though replicas are there; "" if it does not. It is on as many as there are."""
    needed, hosts = hosts_needed(c), {c.roster.peers[name].agent for name in view.members}
    if (
        len(hosts) >= needed
        or len(view.members) < c.settings.num_replicas
        or any(peer.alive and peer.agent not in hosts for peer in c.roster.peers.values())
    ):
        return ""
    return f"replicas on {needed} hosts, and has them on {len(hosts)}"


def _doubled(c: FleetState, view: View, hosts: Counter[str]) -> Peer | None:
    """The last member on the fullest host, which keeps others."""
    agent, number = max(hosts.items(), key=lambda item: item[1])
    if number < 2:
        return None
    return c.roster.peers[[name for name in view.members if c.roster.peers[name].agent == agent][-1]]


def _to_start_anew(c: FleetState, view: View, hosts: Counter[str]) -> Peer | None:
    """Who leaves so that its slot gets a process on a host that has none: a spare rather than a member."""
    spares = [p for p in c.roster.peers.values() if p.alive and p.joined and p.name not in c.current and not p.leaving]
    out = spares[-1] if spares else None
    out = out or _doubled(c, view, hosts)
    if out is None or (out.name in c.current and not _may_lack(c, view, out.name)):
        return None
    load = c.roster.load()
    if out.agent in load:
        load[out.agent] -= 1
    agent = c.roster.roomiest(load, computes=True)
    return out if agent and agent not in hosts else None


def _may_lack(c: FleetState, view: View, name: str) -> bool:
    """Whether the others would wait for the next one, or go on: too few of them might stop the run."""
    rest = [member for member in view.members if member != name]
    return not too_few(c, len(rest)) or decided(c, rest).action != "stop"
