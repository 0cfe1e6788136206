"""The network: ordered connections that can break, paths that can stall, and no order at all between connections.

Delay has a heavy tail. What is lost on a connection is lost with the connection: both ends see it end, whoever dialled
dials again. A stalled path (a partition) keeps what is sent over it and delivers it when it heals. What an old
connection had already carried towards the coordinator may arrive after its successor's first words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outlast.prove.adversary._kernel import EventHeap, SimulatedProcess

__all__ = ["COORDINATOR", "Dialled", "Network"]

_TICK = 1e-6
_TWICE = 0.03  # a word to the coordinator is said again, as by a sender that cannot know whether it was heard
COORDINATOR = "coordinator"
"""The coordinator's end of a path, whichever process it is."""
_Sent = tuple[tuple[object, ...], SimulatedProcess, Callable[..., None], tuple[Any, ...]]


class Dialled:
    """One dialled connection to the coordinator. `up`: to it, `down`: from it."""

    __slots__ = ("broken", "client", "late", "serial", "server")

    def __init__(self, serial: int, client: SimulatedProcess, server: SimulatedProcess) -> None:
        self.serial, self.client, self.server = serial, client, server
        self.broken = False
        self.late = False  # what had been sent up still arrives though the connection is gone


class Network:
    """Delays, stalls and breaks. Names of processes are the ends of paths."""

    def __init__(self, kernel: EventHeap, mean_s: float, tail: float) -> None:
        self.kernel, self.mean_s, self.tail = kernel, mean_s, tail
        self._stalled: dict[tuple[str, str], list[_Sent]] = {}
        self._serial = 0
        self._random = kernel.rng.random
        self._last: dict[tuple[object, ...], float] = {}
        self.cut_meshes: set[tuple[object, frozenset[str]]] = set()  # (view, the two ends) whose connection broke
        self.no_path: set[frozenset[str]] = set()  # pairs that cannot connect

    def delay(self) -> float:
        return self.mean_s * (0.2 + self._random()) * (12.0 if self._random() < self.tail else 1.0)

    def send(
        self,
        channel: tuple[object, ...],
        path: tuple[str, str],
        to: SimulatedProcess,
        call: Callable[..., None],
        *args: Any,
    ) -> None:
        """Deliver in order with what was sent on the same channel before, unless the path is stalled."""
        if self._stalled and path in self._stalled:
            self._stalled[path].append((channel, to, call, args))
            return
        self._deliver(channel, to, call, args)

    def _deliver(
        self, channel: tuple[object, ...], to: SimulatedProcess, call: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        kernel, last = self.kernel, self._last
        random = self._random
        at = kernel.now + self.mean_s * (0.2 + random()) * (12.0 if random() < self.tail else 1.0)
        before = last.get(channel, 0.0)
        if at <= before:
            at = before + _TICK
        last[channel] = at
        kernel.put(at, to, call, args)

    def lag(self, channel: tuple[object, ...], delay_s: float) -> None:
        """What is sent on the channel from now on arrives after `delay_s` at the earliest."""
        self._last[channel] = max(self._last.get(channel, 0.0), self.kernel.now + delay_s)

    def dial(self, client: SimulatedProcess, server: SimulatedProcess) -> Dialled:
        self._serial += 1
        return Dialled(self._serial, client, server)

    def up(self, link: Dialled, call: Callable[..., None], *args: Any) -> None:
        if not link.broken:
            channel, path = (link.serial, 1), (link.client.name, COORDINATOR)
            self.send(channel, path, link.server, call, link, *args)
            if self.tail and self._random() < _TWICE:
                self.send(channel, path, link.server, call, link, *args)

    def down(self, link: Dialled, call: Callable[..., None], *args: Any) -> None:
        if not link.broken:
            self.send((link.serial, 0), (COORDINATOR, link.client.name), link.client, call, link, *args)

    def stall(self, source: str, target: str) -> None:
        self._stalled.setdefault((source, target), [])

    def stalled(self, source: str, target: str) -> bool:
        return (source, target) in self._stalled

    def heal(self, source: str, target: str) -> None:
        for sent in self._stalled.pop((source, target), ()):
            self._deliver(*sent)

    def heal_all(self) -> None:
        for source, target in list(self._stalled):
            self.heal(source, target)
        self.no_path.clear()
