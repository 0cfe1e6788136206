"""Fault points: `probe(phase, …)` does nothing unless a fault was ordered for exactly this place.

Orders come as JSON in OUTLAST_FAULTS (a list): member or slot, phase, step, bucket or microbatch, the n-th pass, and
what to do: a signal to this process, an exception, a hang, silence towards one peer, or a single flipped bit later.
`prove` and tests supply them; in a normal run the list is empty and a probe costs one truth test.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Literal

import msgspec

from outlast.core.phases import Phase
from outlast.errors import ConfigError

__all__ = ["Fault", "InjectedFault", "Probe", "save_probe"]


class InjectedFault(RuntimeError):
    """The exception that a fault of kind `raise` throws."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ordered fault. Unset fields match anything. `replica`: a slot (r1) or one incarnation (r1.2)."""

    replica: str
    phase: str
    action: Literal["SIGKILL", "SIGSTOP", "SIGTERM", "raise", "hang", "spin", "mute", "exit"]
    step: int | None = None
    microbatch: int | None = None
    bucket: int | None = None
    count: int = 1  # strike at the n-th matching pass
    peer: str = ""  # for mute


class Probe:
    """The faults ordered for one process."""

    def __init__(self, me: str, text: str | None) -> None:
        self.me = me
        self.muted: set[str] = set()
        self.faults: list[tuple[Fault, Phase]] = []
        self._passes: dict[int, int] = {}
        self._lock = threading.Lock()
        if text:
            try:
                faults = msgspec.json.decode(text, type=list[Fault])
                self.faults = [(f, Phase[f.phase.upper()]) for f in faults if f.replica in (me, me.partition(".")[0])]
            except (msgspec.DecodeError, KeyError) as error:
                raise ConfigError(f"OUTLAST_FAULTS is no list of faults: {error}", remedy="see prove") from error

    def __call__(self, phase: Phase, step: int = -1, microbatch: int = -1, bucket: int = -1) -> None:
        for fault in self._due(phase, step, microbatch, bucket):
            self._strike(fault)

    def _due(self, phase: Phase, step: int, microbatch: int, bucket: int) -> list[Fault]:
        """Which strike now. A pass counts for all of them, whichever hangs, and threads pass one at a time."""
        due = []
        with self._lock:
            for index, (fault, where) in enumerate(self.faults):
                if where is not phase or fault.step not in (None, step):
                    continue
                if fault.microbatch not in (None, microbatch) or fault.bucket not in (None, bucket):
                    continue
                self._passes[index] = self._passes.get(index, 0) + 1
                if self._passes[index] == fault.count:
                    due.append(fault)
        return due

    def _strike(self, fault: Fault) -> None:
        if fault.action == "raise":
            raise InjectedFault(f"ordered for {self.me} in {fault.phase}")
        if fault.action == "hang":
            threading.Event().wait()
        elif fault.action == "spin":
            while True:
                pass
        elif fault.action == "mute":
            self.muted.add(fault.peer)
        elif fault.action == "exit":
            os._exit(3)
        else:
            os.kill(os.getpid(), signal.Signals[fault.action])


def save_probe(probe: Probe) -> Callable[[str], None] | None:
    """What a checkpoint engine calls with the names of its fault points (`save.written`: Phase.SAVE_WRITTEN)."""
    return (lambda name: probe(Phase[name.replace(".", "_").upper()])) if probe.faults else None
