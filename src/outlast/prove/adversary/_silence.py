"""Who is heard of, as the coordinator's driver keeps it in a run over several hosts: an agent, or one of its members.

A coordinator that takes over waits for the hosts that its record names. Its own absence counts for nobody's silence.
It says of whom nothing is heard and hangs up; what follows is decided by `core/protocol` (rule 30).
"""

from __future__ import annotations

from typing import Protocol

from outlast.core.protocol import Coordinator
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.prove.adversary._network import Dialled
from outlast.prove.adversary._surroundings import Surroundings

__all__ = ["BEAT_S", "SilenceWatch"]

BEAT_S = 0.1
"""How often an agent says that it is there, and how often the driver looks."""


class _Driver(Protocol):
    """A coordinator's process."""

    machine: Coordinator
    links: dict[str, Dialled]

    def handle(self, event: m.Event) -> None: ...


class SilenceWatch:
    """Looks in virtual time whether hosts have fallen silent. `owner`: whose deliveries the looks are; `record`: what
    it took over."""

    def __init__(self, world: Surroundings, owner: _Driver, record: m.FleetRecord | None) -> None:
        self.world, self.owner = world, owner
        now = world.kernel.now
        known = record.placement.values() if record is not None and world.variant.recalls_hosts else ()
        self.heard_s: dict[str, float] = dict.fromkeys(known, now)
        self._looked_s = now

    def heard(self, name: str) -> None:
        """Something came from an agent or a member."""
        peer = self.owner.machine.roster.peers.get(name)
        agent = peer.agent if peer is not None else name
        lives = peer is not None and peer.status != "gone"  # it may go on without its agent
        if lives or agent in self.heard_s or agent in self.owner.machine.roster.agents:
            self.heard_s[agent] = self.world.kernel.now

    def look(self) -> None:
        """Report whoever is silent for too long, once for each time that something had been heard."""
        now, roster = self.world.kernel.now, self.owner.machine.roster
        if now - self._looked_s > 3 * BEAT_S:
            self.heard_s = dict.fromkeys(self.heard_s, now)
        self._looked_s = now
        for agent in roster.agents:
            self.heard_s.setdefault(agent, now)
        allowed_s = self.world.scenario.allowed_s(host=True)
        for agent, heard_s in sorted(self.heard_s.items()):
            if now - heard_s > allowed_s:
                del self.heard_s[agent]
                self._give_up(agent, now - heard_s)

    def _give_up(self, agent: str, for_s: float) -> None:
        gone = [agent, *(peer.name for peer in self.owner.machine.roster.peers.values() if peer.agent == agent)]
        self.owner.handle(hm.HostSilent(agent=agent, for_s=for_s, why=f"silent for {for_s:.1f} s"))
        for name in gone:
            link = self.owner.links.pop(name, None)
            if link is not None and not link.broken:
                self.world.network.down(link, link.client.hung_up)  # type: ignore[attr-defined]
                link.broken = True
