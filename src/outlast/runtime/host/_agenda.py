"""What a process has to do at a time: calls in the order in which they are due."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

__all__ = ["Agenda"]

_FAR_S = 3600.0


class Agenda:
    """Calls, each at its time; of those that are due together, the one that was put down first. `now_s`: the clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._calls: list[tuple[float, int, Callable[[], Any]]] = []
        self._ties = itertools.count()

    def at(self, delay_s: float, call: Callable[[], Any]) -> None:
        """Call this so much later."""
        heapq.heappush(self._calls, (self._now_s() + delay_s, next(self._ties), call))

    def left_s(self) -> float:
        """Until the next call is due."""
        return max(0.0, self._calls[0][0] - self._now_s()) if self._calls else _FAR_S

    def turn(self) -> None:
        """Make the calls that are due."""
        while self._calls and self._calls[0][0] <= self._now_s():
            heapq.heappop(self._calls)[2]()
