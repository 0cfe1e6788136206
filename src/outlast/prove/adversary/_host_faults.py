"""What befalls hosts whole: power, a cable, a path between two of them, a kernel that hangs.

Of what happens to a host nobody is told: no connection ends, and no launcher sees anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Protocol

from outlast.prove.adversary._hosts import SimulatedAgent
from outlast.prove.adversary._kernel import SimulatedProcess
from outlast.prove.adversary._network import COORDINATOR
from outlast.prove.adversary._replica import SimulatedReplica
from outlast.prove.adversary._schedule_faults import ScheduleFault
from outlast.prove.adversary._surroundings import Surroundings

__all__ = ["HostFaults", "HostStage"]


class HostStage(Surroundings, Protocol):
    """The world, as what befalls hosts needs it."""

    launcher: SimulatedProcess
    agents: dict[str, SimulatedAgent]

    @property
    def replicas(self) -> dict[str, SimulatedReplica]: ...
    def power_off(self, agent: SimulatedAgent, lasts_s: float) -> None: ...


class HostFaults:
    """Strikes number `who` (and `who + other`) of the hosts that there are."""

    def __init__(self, world: HostStage) -> None:
        self.world = world

    def strike(self, fault: ScheduleFault) -> bool:
        """Whether this was a fault of a host."""
        hosts = list(self.world.agents.values())
        if not fault.kind.startswith("host"):
            return False
        if hosts:
            one, other = hosts[fault.who % len(hosts)], hosts[(fault.who + fault.other) % len(hosts)]
            getattr(self, "_" + fault.kind.replace(" ", "_"))(fault, one, other)
        return True

    def _on(self, agent: SimulatedAgent) -> list[SimulatedProcess]:
        here = [r for r in self.world.replicas.values() if r.agent is agent and not r.ended]
        return [agent, *here]

    def _host_off(self, fault: ScheduleFault, one: SimulatedAgent, _: SimulatedAgent) -> None:
        self.world.power_off(one, fault.lasts)

    def _host_hang(self, fault: ScheduleFault, one: SimulatedAgent, _: SimulatedAgent) -> None:
        for process in self._on(one):
            process.pause()
            self.world.kernel.after(fault.lasts, self.world.launcher, process.resume)

    def _host_cut(self, fault: ScheduleFault, one: SimulatedAgent, _: SimulatedAgent) -> None:
        """From everybody, the coordinator too."""
        inside = [process.name for process in self._on(one)]
        outside = [name for a in self.world.agents.values() if a is not one for name in self._names(a)]
        self._part(inside, [*outside, COORDINATOR], fault.lasts)

    def _hosts_parted(self, fault: ScheduleFault, one: SimulatedAgent, other: SimulatedAgent) -> None:
        if one is not other:
            self._part(self._names(one), self._names(other), fault.lasts)

    def _names(self, agent: SimulatedAgent) -> list[str]:
        return [process.name for process in self._on(agent)]

    def _part(self, inside: Sequence[str], outside: Sequence[str], lasts_s: float) -> None:
        network = self.world.network
        for one, other in product(inside, outside):
            for path in ((one, other), (other, one)):
                if not network.stalled(*path):
                    network.stall(*path)
                    self.world.kernel.after(lasts_s, self.world.launcher, network.heal, *path)
