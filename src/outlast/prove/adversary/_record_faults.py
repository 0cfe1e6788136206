"""What befalls the coordinator's hold on a record that several hosts share: its host, its clock, the store, the paths.

In each the coordinator lives on while another may take its place; nobody is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from outlast.prove.adversary._hosts import CoordinatorProcess
from outlast.prove.adversary._kernel import SimulatedProcess
from outlast.prove.adversary._record_store import STORE, HostClock
from outlast.prove.adversary._schedule_faults import ScheduleFault
from outlast.prove.adversary._surroundings import Surroundings
from outlast.prove.adversary._turns import Turns

__all__ = ["RecordFaults", "RecordStage"]

_LAG_S = 0.8


class RecordStage(Surroundings, Protocol):
    """The world, as what befalls the record needs it."""

    launcher: SimulatedProcess
    turns: Turns | None
    coordinators: list[CoordinatorProcess]


class RecordFaults:
    """Strikes the holder of the turn, or (`other` odd) host number `who` of those that may coordinate."""

    def __init__(self, world: RecordStage) -> None:
        self.world = world

    def strike(self, fault: ScheduleFault) -> bool:
        """Whether this was a fault of the record."""
        if not fault.kind.startswith("record"):
            return False
        if self.world.turns is not None:
            getattr(self, "_" + fault.kind.replace(" ", "_"))(fault, self.world.turns)
        return True

    def _holder(self) -> CoordinatorProcess | None:
        alive = [c for c in self.world.coordinators if not c.ended]
        return alive[-1] if alive else None

    def _seat(self, fault: ScheduleFault, turns: Turns) -> int:
        holder = self._holder()
        if holder is None or fault.other % 2:
            return fault.who % turns.num_seats
        return turns.seat_of(holder)

    def _record_asleep(self, fault: ScheduleFault, turns: Turns) -> None:
        """The holder's host stands still, and its clock with it: a machine that is suspended and goes on."""
        holder = self._holder()
        if holder is not None and not holder.paused:
            clock = turns.clock_of(holder)
            holder.pause()
            holder.asleep = True
            clock.sleep()
            self._later(fault, self._wake, holder, clock)

    def _wake(self, holder: CoordinatorProcess, clock: HostClock) -> None:
        clock.wake()
        holder.asleep = False
        holder.resume()

    def _record_clock(self, fault: ScheduleFault, turns: Turns) -> None:
        """A host's clock runs: so much passes at once."""
        for clock in turns.clocks_on(self._seat(fault, turns)):
            clock.ahead_s += fault.lasts

    def _record_stopped(self, fault: ScheduleFault, turns: Turns) -> None:
        """The store has no majority for a while."""
        turns.store.pause()
        self._later(fault, turns.store.resume)

    def _record_slow(self, fault: ScheduleFault, turns: Turns) -> None:
        """Some of what is asked takes far longer than anybody waits, and is done all the same."""
        turns.store.lag_s = _LAG_S
        self._later(fault, self._quick, turns)

    def _quick(self, turns: Turns) -> None:
        turns.store.lag_s = 0.0

    def _record_cut(self, fault: ScheduleFault, turns: Turns) -> None:
        self._cut(fault, turns, True, True)

    def _record_cut_up(self, fault: ScheduleFault, turns: Turns) -> None:
        """What the host asks is held up, and done when the path is back."""
        self._cut(fault, turns, True, False)

    def _record_cut_down(self, fault: ScheduleFault, turns: Turns) -> None:
        """What the host asks is done, and it does not hear of it."""
        self._cut(fault, turns, False, True)

    def _cut(self, fault: ScheduleFault, turns: Turns, up: bool, down: bool) -> None:
        """A host and the store alone: everybody else reaches both."""
        host, network = f"host {self._seat(fault, turns)}", self.world.network
        for path in ([(host, STORE)] if up else []) + ([(STORE, host)] if down else []):
            if not network.stalled(*path):
                network.stall(*path)
                self._later(fault, network.heal, *path)

    def _later(self, fault: ScheduleFault, call: Callable[..., None], *args: Any) -> None:
        self.world.kernel.after(fault.lasts, self.world.launcher, call, *args)
