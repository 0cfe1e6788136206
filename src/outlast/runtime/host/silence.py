"""The launcher's eye on what it started: who is stopped, or hangs, though it has not ended.

A child publishes signs of life in shared memory; how long it may be silent is learned from how long it usually is. The
launcher's own absence (a suspended machine, its own stop) counts for nothing. It looks and says; it kills nobody.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from outlast.core.policy import DeadlinePolicy, DeadlineState, Durations
from outlast.runtime.transport.progress_block import Progress

__all__ = ["BEAT_S", "Watch", "cpu_s", "excused", "is_full", "kernel_state", "why_out"]

BEAT_S = 0.1
"""How often the coordinator and the agents give a sign of life."""
_FLOOR_S = 5 * BEAT_S
_DEAF_S = 10.0  # a coordinator that nobody can be said to join
_ABSENT_S = 1.0
"""A pause between two looks above this was the launcher's own."""
_CPUCLOCK_SCHED = 2
"""What the kernel adds to a process's number for the clock of its processor time: clock_getcpuclockid(3)."""
_ASKING_S = 2.0  # for an agent that wakes up: to connect, to beat, and to be answered


def kernel_state(pid: int) -> tuple[str, bool]:
    """(the kernel's state letter, X for gone; whether a debugger is attached)."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "X", False
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return rows["State"].split()[0], rows.get("TracerPid", "0").strip() != "0"


def cpu_s(pid: int) -> float:
    """Processor time of all the process's threads, in seconds, of those that have ended too: else who works would seem
    not to whenever a thread ends. It takes no descriptor. 0 for a process that is gone."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def is_full(pid: int) -> bool:
    """Whether a process can open nothing more: every descriptor below its limit is taken."""
    try:
        taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return False
    limit = next(line.split()[3] for line in limits if line.startswith("Max open files"))
    return limit != "unlimited" and taken.issuperset(range(int(limit)))


def why_out(coordinator: Progress | None, now_s: float) -> str:
    """Why nobody can join the run just now, by the signs of life of its coordinator; "" if they can."""
    if coordinator is None:
        return "there is no coordinator"
    silent_s = now_s - coordinator.read()[3]
    return f"the coordinator is silent for {silent_s:.0f} s" if silent_s > _DEAF_S else ""


def excused(answered_s: float, paused_s: float, now_s: float, lease_s: float) -> float:
    """When the coordinator's word is taken to have come last by an agent that has not run for `paused_s`. It could not
    hear: its replicas did, or are ended soon after, not before it has asked. It gets no whole lease more: a writer that
    slept as long may have been followed by another."""
    return answered_s if paused_s < _ABSENT_S else max(answered_s, now_s - lease_s + min(_ASKING_S, lease_s))


class Watch:
    """On one child. `hung_s`: how long one that is not stopped, but sleeps, may be silent; `state`: what the kernel
    says of a process, as `kernel_state` does."""

    def __init__(
        self,
        pid: int,
        progress: Progress,
        floor_s: float,
        hung_s: float,
        state: Callable[[int], tuple[str, bool]] = kernel_state,
    ) -> None:
        self.pid, self.progress, self._state = pid, progress, state
        self._policy, self._hung_s = DeadlinePolicy(floor_s=max(floor_s, _FLOOR_S)), hung_s
        self._gaps = Durations()
        self._alive_s = progress.read()[3]
        self._looked_s = self._since_s = math.nan

    def look(self, now_s: float) -> tuple[Literal["", "stopped", "hung"], float]:
        """(what is wrong with it, seconds of silence). Call it several times a second."""
        alive_s = self.progress.read()[3]
        if not now_s - self._looked_s < _ABSENT_S:
            self._since_s = now_s
        elif alive_s > self._alive_s and self._since_s < self._alive_s:
            self._gaps.observe(alive_s - self._alive_s)
        self._looked_s, self._alive_s = now_s, alive_s
        silent_s = now_s - max(alive_s, self._since_s)
        found = self._policy.decide(self._gaps, DeadlineState())
        young = not found.learned  # it may load for long, but not while it is stopped
        if silent_s <= (self._policy.floor_s if young else found.allowed_s):
            return "", silent_s
        state, traced = self._state(self.pid)
        if traced:
            return "", silent_s
        if state == "T":
            return "stopped", silent_s
        if state in "SD" and silent_s > self._hung_s and not young:
            return "hung", silent_s
        return "", silent_s
