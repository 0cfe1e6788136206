"""Who there is: every member and agent that the coordinator knows, and which slots want a process.

Pure bookkeeping under the coordinator; it decides restarts and their budget, never membership of a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from outlast.core.protocol._types import ViewId

__all__ = ["Peer", "Roster", "Settings", "slot_of"]

Status = Literal["spawning", "fresh", "joining", "ready", "member", "condemned", "gone"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the run was started with; seconds are floats."""

    num_replicas: int
    num_spares: int = 0
    ack_s: float = 5.0
    doubt_s: float = 0.5  # how long "its connection ended" waits for the agent's certainty
    lease_s: float = 600.0
    clock_margin: float = 0.1  # how much longer than the lease the coordinator waits, as a share
    start_s: float = 600.0
    formation_s: float = 30.0
    outside_s: float = 1800.0
    max_restarts: int = 16
    backoff_s: float = 1.0
    respawn: bool = True


@dataclass(slots=True, kw_only=True)
class Peer:
    """One incarnation of a slot, e.g. r2.1."""

    name: str
    agent: str
    status: Status
    view: ViewId | None = None  # the newest view it has formed
    left: ViewId | None = None
    heard: int = 0
    committed: int = 0
    done: bool = False
    leaving: bool = False
    joined: bool = False
    address: str = ""
    store: str = ""
    pid: int = 0

    @property
    def alive(self) -> bool:
        return self.status not in ("gone", "condemned")


def slot_of(member: str) -> str:
    """The slot of a member: r2.1 -> r2."""
    return member.partition(".")[0]


@dataclass(slots=True)
class Roster:
    """Members by name, agents by name, incarnation numbers by slot."""

    settings: Settings
    peers: dict[str, Peer] = field(default_factory=dict)
    agents: set[str] = field(default_factory=set)
    incarnations: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    recent: dict[str, list[float]] = field(default_factory=dict)  # slot -> times of death
    _live: dict[str, str] = field(default_factory=dict)  # slot -> live member

    def alive(self, members: Iterable[str]) -> list[str]:
        return [m for m in members if m in self.peers and self.peers[m].alive]

    def having(self, *statuses: Status) -> list[str]:
        """Members with one of the statuses, by slot number."""
        return sorted((p.name for p in self.peers.values() if p.status in statuses), key=_order)

    def add(self, name: str, agent: str, status: Status) -> Peer:
        slot, _, number = name.partition(".")
        self.incarnations[slot] = max(self.incarnations.get(slot, 0), int(number or 1))
        peer = self.peers.setdefault(name, Peer(name=name, agent=agent, status=status))
        self._live[slot] = name
        return peer

    def drop(self, name: str, now_s: float) -> None:
        """The member is gone for certain. Its record stays, so that it is refused should it come back."""
        peer = self.peers.get(name) or self.add(name, "", "gone")
        peer.status = "gone"
        slot = slot_of(name)
        if self._live.get(slot) == name:
            del self._live[slot]
        self.recent[slot] = [t for t in self.recent.get(slot, []) if now_s - t < 60.0] + [now_s]

    def vacancies(self) -> Iterator[tuple[str, str, float]]:
        """(member to start, agent, delay) for each slot without a live process, within the budget of restarts."""
        if not self.settings.respawn or not self.agents:
            return
        load = dict.fromkeys(sorted(self.agents), 0)
        for peer in self.peers.values():
            if peer.alive and peer.agent in load:
                load[peer.agent] += 1
        for index in range(self.settings.num_replicas + self.settings.num_spares):
            slot = f"r{index}"
            if slot in self._live:
                continue
            again = self.incarnations.get(slot, 0) > 0
            if again and self.restarts >= self.settings.max_restarts:
                continue
            self.restarts += again
            deaths = len(self.recent.get(slot, []))
            delay = min(60.0, self.settings.backoff_s * 2.0 ** (deaths - 1)) if deaths else 0.0
            agent = min(load, key=lambda a: (load[a], a))
            load[agent] += 1
            name = f"{slot}.{self.incarnations.get(slot, 0) + 1}"
            self.add(name, agent, "spawning")
            yield name, agent, delay


def _order(name: str) -> tuple[int, str]:
    digits = slot_of(name)[1:]
    return (int(digits) if digits.isdigit() else 0, name)
