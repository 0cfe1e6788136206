"""Starts of successors for which the host had no room just then, tried again until it has.

Role: what dies is replaced, and the want of a process, a descriptor or memory that struck it may last a moment longer.
It must not end those that live: they train on meanwhile. Nothing is decided here of who is started, and the first
processes of a run are not started this way: where there is no room for them the run has not begun.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from outlast.runtime.host._host_system import HostSystem

__all__ = ["LaterStarts"]

_AGAIN_S = 1.0  # between two tries; training has lost the one that died already


class LaterStarts:
    """Starts that wait for room, by what they start. `system`: this host's clock."""

    def __init__(self, system: HostSystem) -> None:
        self._system = system
        self._waiting: dict[str, Callable[[], None]] = {}
        self._next_s = 0.0

    def start(self, what: str, begin: Callable[[], None]) -> None:
        """Call `begin`, which starts `what`; again in later turns, if it raises OSError. That is said once."""
        try:
            begin()
        except OSError as error:
            self._waiting[what] = begin
            self._next_s = self._system.now_s() + _AGAIN_S
            why = error.strerror or error
            room = "what this host lacks: ulimit -u, ulimit -n, free"
            print(f"outlast: {what} cannot be started: {why}; it is tried again ({room})", file=sys.stderr, flush=True)

    def turn(self) -> None:
        """Try what waits, if the last try was long enough ago. Call it now and then."""
        if not self._waiting or self._system.now_s() < self._next_s:
            return
        self._next_s = self._system.now_s() + _AGAIN_S
        for what, begin in list(self._waiting.items()):
            with contextlib.suppress(OSError):
                begin()
                del self._waiting[what]
