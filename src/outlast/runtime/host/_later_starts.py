"""Starts of successors for which the host had no room just then, tried again until it has, and told of each minute.

Role: what dies is replaced, and the want of a process, a descriptor or memory that struck it may last a moment longer.
It must not end those that live: they train on meanwhile. Nothing is decided here of who is started, and the first
processes of a run are not started this way: where there is no room for them the run has not begun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from outlast.runtime.host._host_system import HostSystem

__all__ = ["LaterStarts"]

_AGAIN_S = 1.0  # between two tries; training has lost the one that died already
_SAY_S = 60.0  # between two sentences about the same start: who looks at the newest lines sees why nothing goes on


@dataclass(slots=True)
class _Waiting:
    begin: Callable[[], None]
    since_s: float
    said_s: float


class LaterStarts:
    """Starts that wait for room, by what they start. `system`: this host's clock."""

    def __init__(self, system: HostSystem) -> None:
        self._system = system
        self._waiting: dict[str, _Waiting] = {}
        self._next_s = 0.0

    def start(self, what: str, begin: Callable[[], None]) -> None:
        """Call `begin`, which starts `what`; again in later turns, if it raises OSError. That is said each minute."""
        try:
            begin()
        except OSError as error:
            now_s = self._system.now_s()
            self._waiting[what], self._next_s = _Waiting(begin, now_s, now_s), now_s + _AGAIN_S
            _say(what, "", error)

    def turn(self) -> None:
        """Try what waits, if the last try was long enough ago. Call it now and then."""
        if not self._waiting or self._system.now_s() < self._next_s:
            return
        now_s = self._system.now_s()
        self._next_s = now_s + _AGAIN_S
        for what, waiting in list(self._waiting.items()):
            try:
                waiting.begin()
            except OSError as error:
                if now_s - waiting.said_s >= _SAY_S:
                    waiting.said_s = now_s
                    _say(what, f", for {now_s - waiting.since_s:.0f} s now", error)
            else:
                del self._waiting[what]


def _say(what: str, how_long: str, error: OSError) -> None:
    why, room = error.strerror or error, "what this host lacks: ulimit -u, ulimit -n, free"
    said = f"outlast: {what} cannot be started{how_long}: {why}; it is tried again ({room})"
    print(said, file=sys.stderr, flush=True)
