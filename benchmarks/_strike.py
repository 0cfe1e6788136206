"""One fault in a running fleet: choose a victim and a moment, hurt it, hear how the others go on.

What is hurt is one replica, with SIGKILL or SIGSTOP; with `-coordinator` in the fault's name outlast's coordinator is
killed at the same moment. Deciding what the commits mean is `_analysis`'s.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import time
from typing import TYPE_CHECKING

from benchmarks import _outlast
from benchmarks._analysis import Outcome, join_stall, measure_restart, measure_survivors, newest_step, quiet_wait
from benchmarks._fleet import FleetStuck

if TYPE_CHECKING:
    from benchmarks._fleet import Fleet, Member
    from benchmarks._systems import Launch, System

__all__ = ["FAULTS", "START_S", "Striker", "steady"]

FAULTS = {
    "SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGKILL-coordinator": signal.SIGKILL,
}  # fmt: skip
WARM_STEPS, AFTER_STEPS, JOINED_STEPS = 40, 4, 5
START_S, GIVE_UP_S = 120.0, 90.0


def steady(fleet: Fleet, replicas: int) -> bool:
    """Whether that many members have trained long enough to know their median step."""
    return sum(len(member.commits) >= WARM_STEPS for member in fleet.living) >= replicas


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Striker:
    """Strikes one fleet, once or again and again."""

    name: str
    system: System
    launch: Launch
    rng: random.Random

    def strike(self, fleet: Fleet, fault: str) -> Outcome:
        """Hurt one member at a random moment and wait until everybody else has gone on for a few steps."""
        told = Outcome(system=self.name, fault=fault)
        fleet.listen(self.rng.uniform(0.3, 1.0))
        before = fleet.living
        victim = self.rng.choice([m for m in before if m.commits and m.rank != self.system.immune])
        others = [member for member in before if member is not victim and member.commits]
        doomed = [_outlast.coordinator_pid(self.launch.run_dir)] if fault.endswith("-coordinator") else []
        told, at_s = dataclasses.replace(told, phase=fleet.phase(victim)), time.monotonic()
        for pid, number in [*((pid, signal.SIGKILL) for pid in doomed), (victim.pid, FAULTS[fault])]:
            os.kill(pid, number)
        reached = newest_step(before, at_s)
        try:
            self._await_recovery(fleet, victim, others, reached, at_s)
        except FleetStuck as stuck:
            return dataclasses.replace(told, failed=str(stuck))
        new = [member for member in fleet.members if member not in before]
        found = measure_survivors(others, at_s) if self.system.keeps else measure_restart(before, new, at_s, reached)
        own = fault == "SIGSTOP" and self.name.startswith("outlast")
        return dataclasses.replace(
            found, system=self.name, fault=fault, phase=told.phase, struck_s=at_s,
            deadline_s=_outlast.LEAST_DEADLINE_S if own else 0.0,
        )  # fmt: skip

    def rejoin(self, fleet: Fleet, outcome: Outcome) -> Outcome:
        """Wait until a replacement trains too; adds how long it held up the others at worst, until it had made a few
        steps: from then on it is a member like any other."""
        began_s = time.monotonic()
        old = [member for member in fleet.living if len(member.commits) >= WARM_STEPS]
        try:
            fleet.wait_for("replacement", lambda: steady(fleet, self.launch.replicas), START_S)
        except FleetStuck as stuck:
            return dataclasses.replace(outcome, failed=str(stuck))
        served_s = max(began_s, _outlast.newest_served_s(self.launch.run_dir))
        new = [member for member in fleet.living if member not in old and len(member.commits) >= JOINED_STEPS]
        joined_s = max((member.commits[JOINED_STEPS - 1].at_s for member in new), default=served_s)
        return dataclasses.replace(
            outcome, join_stall_s=join_stall(old, began_s, joined_s), later_stall_s=join_stall(old, began_s, math.inf),
            served_stall_s=join_stall(old, served_s, joined_s, waits_only=True),
            quiet_wait_s=quiet_wait(old, outcome.struck_s, served_s, joined_s),
        )  # fmt: skip

    def _await_recovery(self, fleet: Fleet, victim: Member, others: list[Member], reached: int, at_s: float) -> None:
        keeps = self.system.keeps
        wanted = self.launch.replicas - 1 if keeps else self.launch.replicas

        def recovered() -> bool:
            if keeps and any(member.gone for member in others):
                raise FleetStuck(f"{sum(m.gone for m in others)} or more survivors died too\n{fleet.tail()}")
            going = (member for member in fleet.living if member is not victim)
            return sum(_has_gone_on(member, reached, at_s) for member in going) >= wanted

        fleet.wait_for("new step after the fault", recovered, GIVE_UP_S)


def _has_gone_on(member: Member, reached: int, at_s: float) -> bool:
    return sum(commit.at_s > at_s and commit.step > reached for commit in member.commits) >= AFTER_STEPS
