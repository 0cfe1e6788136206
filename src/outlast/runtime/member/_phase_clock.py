"""Where a rank is, published as it goes on, and how long it may be there: learned from how long it usually is.

Role: one `enter` for a replica's lead and for its other ranks, so that the agent knows for each process of a replica
when it is silent for too long (protocol, 19). It judges nobody.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from outlast.config import RunConfig
from outlast.core.phases import OWNED, Phase
from outlast.core.policy import DeadlinePolicy, DeadlineState, Durations
from outlast.runtime.transport.progress_block import Progress

__all__ = ["PhaseClock"]

_OWN = DeadlineState()


class PhaseClock:
    """Publishes the phase that a member is in, and learns how long each may take. `phase`: the newest one;
    `passed(phase, seconds)` is told of each that is over."""

    def __init__(
        self,
        progress: Progress,
        config: RunConfig,
        passed: Callable[[Phase, float], None] = lambda phase, seconds: None,
    ) -> None:
        self._progress, self._policy = progress, DeadlinePolicy(floor_s=config.stall_floor_s)
        # Half: who hangs in a group that forms is to be found before the coordinator tries another group with it.
        self._waiting = DeadlineState(longest_s=config.formation_s / 2)
        self._hosts = bool(config.endpoint)  # several
        self._durations: dict[Phase, Durations] = defaultdict(Durations)
        self._passed, self.phase, self._since_ns = passed, Phase.IDLE, 0

    def enter(self, phase: Phase, step: int, microbatch: int = -1, bucket: int = -1) -> None:
        """Publish the phase with the silence that is allowed in it, and learn how long the last one took."""
        allowed_s = self._policy.decide(self._durations[phase], _OWN).allowed_s if phase in OWNED else 0.0
        now_ns = self._progress.enter(phase, step, microbatch, bucket, 0.0 if allowed_s == math.inf else allowed_s)
        if self._since_ns:
            took_s = (now_ns - self._since_ns) / 1e9
            self._durations[self.phase].observe(took_s)
            self._passed(self.phase, took_s)
        self.phase, self._since_ns = phase, now_ns

    def interrupted(self) -> None:
        """What is under way teaches no deadline: its end was another's doing."""
        self._since_ns = 0

    def awaited_s(self, phase: Phase) -> float:
        """How long to wait for others in a phase that has no deadline yet before it is said that they are awaited,
        which accuses nobody; inf where it has one. Only a host that is cut off ends no connection."""
        known = self._policy.decide(self._durations[phase], _OWN).learned
        return math.inf if known or not self._hosts else self._policy.floor_s

    def patience(self, phase: Phase) -> float:
        """How long to wait for others in a phase before they are named."""
        return self._policy.decide(self._durations[phase], self._waiting).allowed_s
