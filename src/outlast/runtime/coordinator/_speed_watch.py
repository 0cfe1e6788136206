"""How long a microbatch takes each member of late, from what members say of their own steps.

Role: the coordinator's process feeds it each member's words, sums since the member joined. After each window in which
all members of the view that compute at all have computed enough, it tells the protocol of each the lesser of its last
two figures: who was busy for a moment is not slow. What follows is the protocol's (`core/protocol/fleet/_work.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outlast.core.protocol import View
from outlast.core.protocol import host_messages as hm
from outlast.core.step_parts import StepParts

__all__ = ["SpeedWatch"]

_ENOUGH = 8  # microbatches of each member
_STEPS = 4
_MOST = 0.9  # of the window: words come a little early, too


class SpeedWatch:
    """Measures seconds a microbatch of each member, and tells of them once a window. `window_s`: the least time between
    two figures of a member; 0: nothing is told."""

    def __init__(self, window_s: float, tell: Callable[[hm.SpeedsMeasured], None]) -> None:
        self._window_s, self._tell = window_s, tell
        self._base: dict[str, tuple[float, StepParts]] = {}
        self._leaf_s: dict[str, float] = {}  # in this window
        self._before_s: dict[str, float] = {}  # in the one before it
        self._idle: set[str] = set()  # have no microbatches

    def heard(self, replica: str, parts: StepParts, view: View | None, now_s: float) -> None:
        """A member's word. Its first is what later ones are compared with: its process was just warming up."""
        if not self._window_s:
            return
        since_s, base = self._base.setdefault(replica, (now_s, parts))
        number, seconds = (now - was for now, was in zip(parts.batches, base.batches, strict=True))
        steps = parts.steps - base.steps
        if number > 0:
            self._idle.discard(replica)
        elif number == 0 and steps >= _STEPS:
            self._idle.add(replica)
        if number < 0 or steps < 0:
            self._base[replica] = now_s, parts
        elif self._enough(number, steps, now_s - since_s) and seconds > 0.0:
            self._leaf_s[replica], self._base[replica] = seconds / number, (now_s, parts)
        names = [name for name in view.members if name not in self._idle] if view is not None else []
        if names and self._leaf_s.keys() >= set(names):
            self._conclude(names)

    def _enough(self, number: float, steps: int, passed_s: float) -> bool:
        return number >= _ENOUGH and steps >= _STEPS and passed_s >= _MOST * self._window_s

    def _conclude(self, names: Sequence[str]) -> None:
        now, before = self._leaf_s, self._before_s
        self._before_s, self._leaf_s = {name: now[name] for name in names}, {}
        self._base = {name: word for name, word in self._base.items() if name in now}
        told = {name: min(now[name], before.get(name, math.inf)) for name in names}
        if before.keys() >= set(names):
            self._tell(hm.SpeedsMeasured(leaf_s=told))
