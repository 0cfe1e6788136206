"""The agent's eye on children that are stopped (state T), from their start to their end (protocol, 27).

Whoever is waited for by peers is evicted within their deadlines. This is for those for whom nobody waits: a replica
that still starts, a joiner, a sole survivor, a script after its loop, the process that replicas are forked from. Such a
child is continued once; when it is stopped again, the coordinator is told, and says what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from outlast.runtime.host.silence import kernel_state

__all__ = ["LOOK_S", "Stopped"]

LOOK_S = 1.0
"""How often to look."""
_PATIENCE_S = 5.0  # longer than the deadlines of those who are waited for
_FORGIVEN_S = 60.0


class Stopped:
    """Which children are stopped, since when, and when they were last continued. `state`: what the kernel says."""

    def __init__(self, state: Callable[[int], tuple[str, bool]] = kernel_state) -> None:
        self._state = state
        self._since: dict[str, float] = {}
        self._continued: dict[str, float] = {}

    def look(self, name: str, pid: int, now_s: float) -> tuple[Literal["", "once", "again"], float]:
        """(what is to be said about it now, for how long it has been stopped). A traced child belongs to a debugger."""
        if self._state(pid) != ("T", False):
            self._since.pop(name, None)
            return "", 0.0
        for_s = now_s - self._since.setdefault(name, now_s)
        if for_s < _PATIENCE_S:
            return "", for_s
        if now_s - self._continued.get(name, -_FORGIVEN_S) < _FORGIVEN_S + _PATIENCE_S:
            return "again", for_s
        self._continued[name] = now_s
        return "once", for_s

    def forget(self, name: str) -> None:
        self._since.pop(name, None)
        self._continued.pop(name, None)
