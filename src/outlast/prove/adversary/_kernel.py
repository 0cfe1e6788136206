"""Virtual time: a heap of deliveries with a tie-break counter, and processes that can stop, hold and end.

Everything that happens is a delivery to a process. A process that is paused keeps what arrives and gets it, in order,
when it goes on; one that has ended gets nothing any more. The same seed gives the same history.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

__all__ = ["ProcessEnded", "EventHeap", "SimulatedProcess"]


class ProcessEnded(Exception):
    """The process that was running has just been ended: unwind, nothing of it happens any more."""


class SimulatedProcess:
    """Something that runs. `life` changes when it ends, so that what was under way to it is dropped."""

    def __init__(self, kernel: EventHeap, name: str) -> None:
        self.kernel, self.name = kernel, name
        self.life = 0
        self.ended = False
        self.paused = False
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def end(self) -> None:
        self.ended, self.paused = True, False
        self.life += 1
        self._held.clear()

    def pause(self) -> None:
        self.paused = not self.ended

    def hold(self, call: Callable[..., None], args: tuple[Any, ...], *, first: bool = False) -> None:
        """Keep a delivery until the process goes on."""
        if first:
            self._held.insert(0, (call, args))
        else:
            self._held.append((call, args))

    def resume(self) -> None:
        """Go on, with everything that arrived meanwhile."""
        if not self.paused:
            return
        self.paused = False
        held, self._held = self._held, []
        for index, (call, args) in enumerate(held):
            if self.ended:
                return
            if self.paused:  # stopped again by what it just did
                self._held = held[index:] + self._held
                return
            try:
                call(*args)
            except ProcessEnded:
                return


class EventHeap:
    """The heap. `run` returns when nothing is left, `stop` was called, or a bound is reached."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self.events = 0
        self.stopped = False
        self._order = 0
        self._heap: list[tuple[float, int, SimulatedProcess, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time_s: float, process: SimulatedProcess, call: Callable[..., None], *args: Any) -> None:
        """Deliver `call(*args)` to the process at `time_s`, if it still lives the same life."""
        self.put(time_s, process, call, args)

    def put(self, time_s: float, process: SimulatedProcess, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """`at`, for who has the arguments as a tuple."""
        self._order += 1
        heapq.heappush(self._heap, (time_s, self._order, process, process.life, call, args))

    def after(self, delay_s: float, process: SimulatedProcess, call: Callable[..., None], *args: Any) -> None:
        self.put(self.now + delay_s, process, call, args)

    def run(self, until_s: float, max_events: int) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and not self.stopped and self.events < max_events:
            time_s, _, process, life, call, args = pop(heap)
            if time_s > until_s:
                self.now = until_s
                return
            self.now = time_s
            if process.life != life:
                continue
            self.events += 1
            if process.paused:
                process.hold(call, args)
                continue
            try:
                call(*args)
            except ProcessEnded:
                continue

    def stop(self) -> None:
        self.stopped = True
