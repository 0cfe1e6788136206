"""One schedule: a fleet, its faults, and the oracle that watches it."""

from __future__ import annotations

import math
import traceback
from typing import Any

from outlast.core.protocol import ViewId
from outlast.core.protocol import messages as m
from outlast.prove.adversary._faults import Faults
from outlast.prove.adversary._hosts import CoordinatorProcess, SimulatedAgent
from outlast.prove.adversary._kernel import EventHeap, SimulatedProcess
from outlast.prove.adversary._network import Network
from outlast.prove.adversary._oracle import Oracle, Violation
from outlast.prove.adversary._replica import SimulatedReplica
from outlast.prove.adversary._scenario import Scenario
from outlast.prove.adversary._surroundings import Durable, SimulatedStore, Supervisor
from outlast.prove.adversary._turns import Turns
from outlast.prove.adversary._variants import Variant

__all__ = ["ScheduleOutcome", "World"]

_MAX_EVENTS = 60_000


class ScheduleOutcome:
    """What came of a schedule."""

    def __init__(self, violation: Violation | None, world: World) -> None:
        self.violation = violation
        self.events = world.kernel.events
        self.seconds = world.kernel.now
        self.finish = world.finish
        self.kills = world.oracle.num_killed
        self.views = len(world.oracle.views_formed)


class World:
    """Puts a simulated fleet together, and plays one schedule. `trace`: called with (second, text) for each thing that
    happens."""

    def __init__(self, scenario: Scenario, variant: Variant, trace: Any = None) -> None:
        self.scenario, self.variant, self.trace = scenario, variant, trace
        self.settings = scenario.settings()
        self.kernel = EventHeap(scenario.seed)
        self.network = Network(self.kernel, scenario.mean_delay_s, scenario.tail)
        self.durable = Durable(variant.fenced)
        self.store = SimulatedStore()
        self.oracle: Oracle = Oracle(self)
        self.replicas: dict[str, SimulatedReplica] = {}  # also those that have ended
        self.agents: dict[str, SimulatedAgent] = {}
        self.agents_gone: list[str] = []
        self.coordinators: list[CoordinatorProcess] = []
        self.launcher = SimulatedProcess(self.kernel, "launcher")
        self.finish: m.Finish | None = None
        self.spoilt_states: set[int] = set()
        self._serial = 0
        self.faults = Faults(self, scenario.faults)
        self.point = self.faults.point
        self.turns = Turns(self) if scenario.record_lease_s else None
        if self.turns is not None:
            self.turns.start()
        else:
            self._start_coordinator()
        for index in range(scenario.num_agents):
            self.agents[f"a{index}"] = SimulatedAgent(self, f"a{index}")

    def run(self) -> ScheduleOutcome:
        """Until the run is over, an invariant is broken, or patience ends."""
        bound_s = self.scenario.calm_after_s + self.scenario.patience_s
        try:
            self.kernel.run(bound_s, _MAX_EVENTS)
        except Exception as error:  # noqa: BLE001 - the boundary: a crash of the protocol is a finding like any other
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.oracle.violated("Crash", f"{error!r} in {where.name}, line {where.lineno}")
        if self.oracle.violation is None and self.finish is None:
            why = f"after {self.kernel.now:.1f} s and {self.kernel.events} events the run is not over"
            self.oracle.violated("Liveness", why)
        return ScheduleOutcome(self.oracle.violation, self)

    def serial(self) -> int:
        self._serial += 1
        return self._serial

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace(self.kernel.now, text)

    # --- coordinators --------------------------------------------------------------------------------------------
    def _start_coordinator(self) -> None:
        if any(not c.ended and not c.given_up for c in self.coordinators):
            return
        coordinator = CoordinatorProcess(self, self.serial())
        self.coordinators.append(coordinator)
        self.begun(coordinator)

    def begun(self, coordinator: CoordinatorProcess) -> None:
        """It is told what its launcher knows."""
        self.note(f"{coordinator.name} starts with epoch {coordinator.epoch}")
        for name in self.agents_gone:
            coordinator.handle(m.AgentGone(agent=name, cause="exit"))
        if self.faults.stop_asked and coordinator.keeper is not None:
            coordinator.keeper.stop()

    def listening(self, client: Any) -> CoordinatorProcess | None:
        """Who accepts the next connection: the socket is inherited, so an old coordinator may."""
        if self.turns is not None:
            return self.turns.listening(client)
        alive = [c for c in self.coordinators if not c.ended]
        if len(alive) > 1 and not alive[0].paused and self.kernel.rng.random() < 0.3:
            return alive[0]
        return alive[-1] if alive else None

    def crash_coordinator(self, which: CoordinatorProcess, restart_s: float) -> None:
        which.end()
        self.note(f"{which.name} ends")
        for client in self.clients():
            if client.link is not None and client.link.server is which:
                client.hang_up()
        if self.turns is not None or (all(c.ended or c.given_up for c in self.coordinators) and self.finish is None):
            self._follow(which, restart_s)

    def _follow(self, which: CoordinatorProcess, after_s: float) -> None:
        """Its launcher starts another: one that coordinates, or that waits for its turn."""
        if self.turns is not None:
            self.kernel.after(after_s, self.launcher, self.turns.wait_again, self.turns.seat_of(which))
        else:
            self.kernel.after(after_s, self.launcher, self._start_coordinator)

    def clients(self) -> list[SimulatedReplica | SimulatedAgent]:
        return [*self.replicas.values(), *self.agents.values()]

    def replace_coordinator(self, which: CoordinatorProcess, lasts_s: float) -> None:
        """It is stopped, given up, replaced, and goes on later as if nothing had happened."""
        which.pause()
        which.given_up = True
        self._follow(which, 0.05)
        rng = self.kernel.rng
        for client in self.clients():
            if not client.ended and client.link is not None and client.link.server is which:
                soon = 0.06 + (0.2 if rng.random() < 0.7 else 1.0) * rng.random()
                self.kernel.after(soon, self.launcher, self._lose_patience, client, client.link)
        self.kernel.after(lasts_s, self.launcher, which.resume)
        self.kernel.after(lasts_s + 1.0, self.launcher, self._reap, which)

    def _lose_patience(self, client: Any, link: Any) -> None:
        if client.link is link and not client.ended:
            client.hang_up(late=self.kernel.rng.random() < 0.5)

    def _reap(self, which: CoordinatorProcess) -> None:
        if not which.ended:
            self.crash_coordinator(which, 0.1)

    def ended(self, coordinator: CoordinatorProcess, finish: m.Finish) -> None:
        """A coordinator says that the run is over, or that it is not the coordinator any more."""
        self.note(f"{coordinator.name} finishes: {finish.outcome} {finish.detail}")
        if finish.detail.startswith("superseded"):
            self.crash_coordinator(coordinator, 0.1)
            return
        self.finish = finish
        self.oracle.finished(coordinator, finish)
        self.kernel.stop()

    # --- agents and replicas -------------------------------------------------------------------------------------
    def start_replica(self, name: str, agent: Supervisor) -> None:
        self.note(f"{name} starts")
        self.replicas[name] = SimulatedReplica(self, name, agent)

    def crash_replica(self, name: str) -> None:
        replica = self.replicas.get(name)
        if replica is not None and not replica.ended:
            self.replica_ended(replica)

    def replica_ended(self, replica: SimulatedReplica) -> None:
        """Its connections end, and its agent sees it."""
        name, mesh = replica.name, replica.mesh
        self.note(f"{name} ends at step {replica.member.committed}")
        replica.end()
        if replica.link is not None:
            replica.link.broken = True
        replica.link = None
        if mesh is not None:
            self.mesh_ends(name, mesh.view.id, mesh.peers)
        for feed in replica.donor.feeds.values():
            feed.close()
        if not replica.agent.ended:
            self.kernel.after(self.network.delay(), replica.agent, replica.agent.child_ended, name)

    def mesh_ends(self, name: str, view: ViewId, peers: list[str]) -> None:
        """Peers see the connections of `name` in this view end, after what was sent over them."""
        for peer in peers:
            other = self.replicas.get(peer)
            if other is not None and not other.ended:
                self.network.send((name, peer, view), (name, peer), other, other.peer_lost, view, name)

    def reaches(self, name: str, peer: str) -> bool:
        """Whether two members can talk."""
        replica = self.replicas.get(peer)
        path = frozenset((name, peer)) not in self.network.no_path
        stalled = self.network.stalled(name, peer) or self.network.stalled(peer, name)
        return replica is not None and not replica.ended and not replica.paused and path and not stalled

    def crash_agent(self, agent: SimulatedAgent) -> None:
        """Its replicas die with it; the launcher sees it, and starts another."""
        self.note(f"{agent.name} ends")
        agent.end()
        if agent.link is not None:
            agent.link.broken = True
        for replica in list(self.replicas.values()):
            if replica.agent is agent and not replica.ended:
                self.replica_ended(replica)
        del self.agents[agent.name]
        self.agents_gone.append(agent.name)
        self.kernel.after(0.005, self.launcher, self._agent_gone, agent.name)
        self.kernel.after(0.2, self.launcher, self._new_agent)

    def power_off(self, agent: SimulatedAgent, lasts_s: float) -> None:
        """A host ends whole, nothing is said of it, and no connection ends. It comes back as another."""
        self.note(f"the host of {agent.name} is off")
        for replica in self.replicas.values():
            if replica.agent is agent and not replica.ended:
                self.note(f"{replica.name} ends at step {replica.member.committed}")
                self._vanish(replica)
        self._vanish(agent)
        del self.agents[agent.name]
        self.kernel.after(lasts_s, self.launcher, self._new_agent)

    def _vanish(self, client: SimulatedReplica | SimulatedAgent) -> None:
        """What is said to it goes nowhere."""
        client.end()
        if client.link is not None:
            client.link.broken = True
        client.link = None

    def _agent_gone(self, name: str) -> None:
        for coordinator in self.coordinators:
            if not coordinator.ended:
                self.kernel.after(0.001, coordinator, coordinator.handle, m.AgentGone(agent=name, cause="exit"))

    def _new_agent(self) -> None:
        name = f"b{self.serial()}"
        self.agents[name] = SimulatedAgent(self, name)

    def holders(self) -> list[SimulatedReplica]:
        """Replicas that live and hold the training state as members."""
        return [r for r in self.replicas.values() if not r.ended and r.member.state == "member"]

    @property
    def has_lease(self) -> bool:
        return self.scenario.lease_s < math.inf
