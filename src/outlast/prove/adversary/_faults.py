"""Carries out a schedule's faults: at their second, or when the process at hand passes their point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from outlast.core.protocol import messages as m
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._host_faults import HostFaults, HostStage
from outlast.prove.adversary._hosts import CoordinatorProcess, SimulatedAgent
from outlast.prove.adversary._kernel import ProcessEnded, SimulatedProcess
from outlast.prove.adversary._network import COORDINATOR
from outlast.prove.adversary._record_faults import RecordFaults, RecordStage
from outlast.prove.adversary._replica import SimulatedReplica
from outlast.prove.adversary._schedule_faults import ScheduleFault

__all__ = ["Faults"]


class Stage(HostStage, RecordStage, Protocol):
    """The world, as who strikes needs it: every process by its kind."""

    def holders(self) -> list[SimulatedReplica]: ...
    def crash_agent(self, agent: SimulatedAgent) -> None: ...
    def crash_coordinator(self, which: CoordinatorProcess, restart_s: float) -> None: ...
    def replace_coordinator(self, which: CoordinatorProcess, lasts_s: float) -> None: ...


class Faults:
    """`touched`: who was stopped, cut off or slowed down, so that evicting it is not the eviction of an innocent;
    `alarmed`: agents whose hosts something was found out about, so that their replicas may have to leave."""

    def __init__(self, world: Stage, faults: Sequence[ScheduleFault]) -> None:
        self.world, self._hosts, self._record = world, HostFaults(world), RecordFaults(world)
        self.touched: set[str] = set()
        self.alarmed: set[str] = set()
        self.everybody_touched = False
        self.stop_asked = False  # of the run
        self.spoilt = 0  # replicas that computed something wrong
        self._points: dict[tuple[str, int], list[ScheduleFault]] = {}
        self._passed: dict[str, int] = {}
        for fault in faults:
            if fault.point:
                self._points.setdefault((fault.point, fault.nth), []).append(fault)
            else:
                world.kernel.at(fault.at, world.launcher, self._strike, fault, None)
        world.kernel.at(world.scenario.calm_after_s, world.launcher, self._calm)

    def point(self, name: str, process: SimulatedProcess) -> None:
        """`process` passes a point. Raises Ended if that was its end."""
        if not self._points:
            return
        count = self._passed[name] = self._passed.get(name, 0) + 1
        for fault in self._points.pop((name, count), ()):
            self._strike(fault, process if fault.who < 0 else None)
        if process.ended:
            raise ProcessEnded

    def _calm(self) -> None:
        self._points.clear()
        self.world.network.heal_all()
        for process in [*self.world.replicas.values(), *self.world.agents.values(), *self.world.coordinators]:
            process.resume()
        for replica in self.world.replicas.values():
            replica.slowness = 1.0

    # --- one fault -----------------------------------------------------------------------------------------------
    def _strike(self, fault: ScheduleFault, process: SimulatedProcess | None) -> None:
        self.world.note(f"fault: {fault.kind} {process.name if process else ''} {fault}")
        if process is not None:
            self._on_process(fault, process)
        elif self._hosts.strike(fault) or self._record.strike(fault):
            self.everybody_touched = True
        else:
            getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)

    def _on_process(self, fault: ScheduleFault, process: SimulatedProcess) -> None:
        if isinstance(process, CoordinatorProcess):
            if fault.kind == "pause":
                self._stop_coordinator(process, fault)
            else:
                self.world.crash_coordinator(process, fault.lasts)
        elif isinstance(process, SimulatedReplica):
            if fault.kind == "pause":
                self._stop(process, fault.lasts)
            else:
                self.world.replica_ended(process)

    def _replica(self, index: int) -> SimulatedReplica | None:
        alive = [r for r in self.world.replicas.values() if not r.ended]
        return alive[index % len(alive)] if alive else None

    def _agent(self, index: int) -> SimulatedAgent | None:
        agents = list(self.world.agents.values())
        return agents[index % len(agents)] if agents else None

    def _coordinator(self) -> CoordinatorProcess | None:
        alive = [c for c in self.world.coordinators if not c.ended]
        return alive[-1] if alive else None

    def _pair(self, fault: ScheduleFault) -> tuple[SimulatedReplica, SimulatedReplica] | None:
        one, other = self._replica(fault.who), self._replica(fault.who + fault.other)
        return (one, other) if one is not None and other is not None and one is not other else None

    def _touch(self, *processes: SimulatedProcess) -> None:
        self.touched.update(process.name for process in processes)

    def _stop(self, process: SimulatedProcess, lasts_s: float) -> None:
        process.pause()
        self._touch(process)
        self.world.kernel.after(lasts_s, self.world.launcher, process.resume)

    def _crash(self, fault: ScheduleFault) -> None:
        if (replica := self._replica(fault.who)) is not None:
            self.world.replica_ended(replica)

    def _flip(self, fault: ScheduleFault) -> None:
        """The next microbatch that it computes is wrong, and nothing says so."""
        self._spoil(fault, 1.0)

    def _broken(self, fault: ScheduleFault) -> None:
        """From here on it computes every microbatch wrongly."""
        self._spoil(fault, math.inf)

    def _sum_flip(self, fault: ScheduleFault) -> None:
        """One of its sums changes after it was made."""
        if (replica := self._replica(fault.who)) is not None:
            replica.audit.wrong_sums += 1
            self._spoilt(replica)

    def _slice_flip(self, fault: ScheduleFault) -> None:
        """The next slice that it reduces, for itself or to look at another's, is wrong."""
        if (replica := self._replica(fault.who)) is not None:
            replica.audit.wrong_slices = max(replica.audit.wrong_slices, 1.0)
            self._spoilt(replica)

    def _slice_broken(self, fault: ScheduleFault) -> None:
        """From here on it reduces every slice wrongly."""
        if (replica := self._replica(fault.who)) is not None:
            replica.audit.wrong_slices = math.inf
            self._spoilt(replica)

    def _state_flip(self, fault: ScheduleFault) -> None:
        """A bit of its state flips in memory."""
        if (replica := self._replica(fault.who)) is not None and replica.member.state == "member":
            replica.state = algebra.garbage(replica.name, replica.state)
            self.world.spoilt_states.add(replica.state)
            self._spoilt(replica)

    def _spoilt(self, replica: SimulatedReplica) -> None:
        self.spoilt += 1
        self._touch(replica)

    def _spoil(self, fault: ScheduleFault, times: float) -> None:
        if (replica := self._replica(fault.who)) is not None:
            replica.audit.wrong = max(replica.audit.wrong, times)
            self._spoilt(replica)

    def _pause(self, fault: ScheduleFault) -> None:
        if (replica := self._replica(fault.who)) is not None:
            self._stop(replica, fault.lasts)

    def _hang(self, fault: ScheduleFault) -> None:
        if (replica := self._replica(fault.who)) is not None and replica.busy:
            replica.hung = True
            self._touch(replica)

    def _slow(self, fault: ScheduleFault) -> None:
        if (replica := self._replica(fault.who)) is not None:
            replica.slowness = 8.0
            self._touch(replica)

    def _leave(self, fault: ScheduleFault) -> None:
        if (replica := self._replica(fault.who)) is not None:
            replica.say(*replica.member.leave())

    def _alarm(self, fault: ScheduleFault) -> None:
        self._note(fault, "readings", "fatal")

    def _tested_well(self, fault: ScheduleFault) -> None:
        self._note(fault, "test", "passed")

    def _tested_badly(self, fault: ScheduleFault) -> None:
        self._note(fault, "test", "failed")

    def _note(self, fault: ScheduleFault, source: Literal["readings", "test"], action: str) -> None:
        """An agent says what was found out about its host."""
        agent = self._agent(fault.who)
        if agent is not None:
            note = m.DeviceNoted(
                member=agent.name, device="d", source=source, evidence="xid.fatal: 79", action=action, remedy=""
            )
            self.alarmed.add(agent.name)
            agent.say(note)

    def _spares(self, fault: ScheduleFault) -> None:
        """The policy finds so many worth holding; if another coordinator takes over, its own driver says so."""
        if (coordinator := self._coordinator()) is not None and not coordinator.paused:
            coordinator.handle(m.SparesWorth(number=fault.who))

    def _save_awaited(self, fault: ScheduleFault) -> None:
        """A stop waits for its save, or does no more; if another coordinator takes over, its own driver says so."""
        if (coordinator := self._coordinator()) is not None and not coordinator.paused:
            coordinator.handle(m.SaveAwaited(waits=bool(fault.who)))

    def _stop_run(self, fault: ScheduleFault) -> None:
        """Whoever asks for the run to stop asks each coordinator."""
        self.stop_asked = True
        for coordinator in self.world.coordinators:
            if not coordinator.ended and coordinator.keeper is not None:
                self.world.kernel.after(self.world.network.delay(), coordinator, coordinator.keeper.stop)

    def _agent_crash(self, fault: ScheduleFault) -> None:
        if (agent := self._agent(fault.who)) is not None:
            self.world.crash_agent(agent)

    def _agent_pause(self, fault: ScheduleFault) -> None:
        if (agent := self._agent(fault.who)) is not None:
            self._stop(agent, fault.lasts)
            self.everybody_touched = True

    def _coordinator_crash(self, fault: ScheduleFault) -> None:
        if (coordinator := self._coordinator()) is not None:
            self.world.crash_coordinator(coordinator, fault.lasts)

    def _coordinator_pause(self, fault: ScheduleFault) -> None:
        if (coordinator := self._coordinator()) is not None:
            self._stop_coordinator(coordinator, fault)

    def _stop_coordinator(self, coordinator: CoordinatorProcess, fault: ScheduleFault) -> None:
        self.everybody_touched = True
        if fault.other % 2:
            self.world.replace_coordinator(coordinator, fault.lasts)
        elif not coordinator.asleep:  # what is continued on a machine that stands still does not go on
            self._stop(coordinator, fault.lasts)

    def _coordinator_replaced(self, fault: ScheduleFault) -> None:
        if (coordinator := self._coordinator()) is not None:
            self.everybody_touched = True
            self.world.replace_coordinator(coordinator, fault.lasts)

    def _hang_up(self, fault: ScheduleFault) -> None:
        if (replica := self._replica(fault.who)) is not None:
            replica.hang_up(late=fault.other % 2 == 0)

    def _hang_up_agent(self, fault: ScheduleFault) -> None:
        if (agent := self._agent(fault.who)) is not None:
            agent.hang_up(late=fault.other % 2 == 0)

    def _mesh_break(self, fault: ScheduleFault) -> None:
        pair = self._pair(fault)
        if pair is None or pair[0].mesh is None or pair[1].mesh is None:
            return
        one, other = pair
        view = pair[0].mesh.view
        if pair[1].mesh.view.id == view.id:
            self.world.network.cut_meshes.add((view.id, frozenset((one.name, other.name))))
            self._touch(one, other)
            for a, b in ((one, other), (other, one)):
                self.world.kernel.after(self.world.network.delay(), a, a.peer_lost, view.id, b.name)

    def _no_path(self, fault: ScheduleFault) -> None:
        if (pair := self._pair(fault)) is not None:
            ends = frozenset((pair[0].name, pair[1].name))
            self.world.network.no_path.add(ends)
            self._touch(*pair)
            self._mesh_break(fault)
            self.world.kernel.after(fault.lasts, self.world.launcher, self.world.network.no_path.discard, ends)

    def _stall(self, source: str, target: str, lasts_s: float) -> None:
        network = self.world.network
        network.stall(source, target)
        self.world.kernel.after(lasts_s, self.world.launcher, network.heal, source, target)

    def _mesh_stall(self, fault: ScheduleFault) -> None:
        if (pair := self._pair(fault)) is not None:
            self._touch(*pair)
            self._stall(pair[0].name, pair[1].name, fault.lasts)

    def _cut(self, fault: ScheduleFault, up: bool, down: bool) -> None:
        """A replica, or all members of the view, are cut off from the coordinator."""
        coordinator = self._coordinator()
        first = self._replica(fault.who)
        if coordinator is None or first is None:
            return
        group = [first] if fault.other % 3 else self.world.holders()
        for replica in group:
            self._touch(replica)
            if up:
                self._stall(replica.name, COORDINATOR, fault.lasts)
            if down:
                self._stall(COORDINATOR, replica.name, fault.lasts)

    def _cut_off(self, fault: ScheduleFault) -> None:
        self._cut(fault, True, True)

    def _cut_up(self, fault: ScheduleFault) -> None:
        self._cut(fault, True, False)

    def _cut_down(self, fault: ScheduleFault) -> None:
        self._cut(fault, False, True)

    def _feed_break(self, fault: ScheduleFault) -> None:
        if (replica := self._replica(fault.who)) is not None:
            for feed in replica.donor.feeds.values():
                feed.close()
