"""A replica's connections to the peers of one view, its receive buffers, and streams to joiners.

What a peer sends is written into the buffers of the view that it was sent in, also when that view has been abandoned
here and the writer is late (protocol, 14): whether that can hurt is up to who owns the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from outlast.core.protocol import View
from outlast.prove.adversary._surroundings import Surroundings

__all__ = ["Feed", "SimulatedMesh"]

Key = tuple[Any, ...]  # (kind, step, bucket)


class SimulatedMesh:
    """Fresh for each view. `buffers`: key -> sender -> what it sent."""

    def __init__(self, world: Surroundings, owner: str, view: View) -> None:
        self.world, self.owner, self.view = world, owner, view
        self.buffers: dict[Key, dict[str, Any]] = {}
        self.peers = [name for name in view.members if name != owner]
        self.suspects: list[str] = []
        self.expected: dict[Key, list[str]] = {}  # from whom, where not from all
        self.parted = False  # somebody said goodbye

    def broadcast(self, key: Key, payload: Any) -> None:
        for name in self.peers:
            self.send(name, key, payload)

    def send(self, to: str, key: Key, payload: Any) -> None:
        owner, world = self.owner, self.world
        peer = world.replicas.get(to)
        if peer is not None and not peer.ended:
            at = self.view.id
            network = world.network
            network.send((owner, to, at), (owner, to), peer, peer.from_peer, at, owner, key, payload)

    def whole(self, key: Key) -> bool:
        return len(self.buffers.get(key, ())) == len(self.expected.get(key, self.peers))

    def heard(self, key: Key) -> AbstractSet[str]:
        """Who has sent it so far."""
        return self.buffers.get(key, {}).keys()

    def missing(self, keys: Iterable[Key]) -> list[str]:
        """Who has yet to send one of these."""
        absent = {name for key in keys for name in self.expected.get(key, self.peers) if name not in self.heard(key)}
        return [name for name in self.peers if name in absent]

    def take(self, key: Key) -> dict[str, Any]:
        return self.buffers.pop(key, {})

    def close(self) -> None:
        """Say goodbye, so that the end of the connection is no suspicion."""
        if self.world.variant.says_goodbye:
            self.broadcast(("bye", 0, 0), None)
        else:
            self.world.mesh_ends(self.owner, self.view.id, self.peers)


class Feed:
    """One donor's stream to one joiner."""

    def __init__(self, world: Surroundings, donor: str, joiner: str) -> None:
        self.world, self.donor, self.joiner, self.serial = world, donor, joiner, world.serial()
        self.broken = False

    def put(self, kind: str, payload: Any, delay_s: float = 0.0) -> None:
        if self.broken:
            return
        world, donor = self.world, self.donor
        joiner = world.replicas.get(self.joiner)
        if joiner is None or joiner.ended:
            self.broken = True
            return
        channel, path = ("feed", self.serial), (donor, self.joiner)
        if delay_s:  # a snapshot takes its time, and what follows it waits
            world.network.lag(channel, delay_s)
        world.network.send(channel, path, joiner, joiner.from_donor, self.serial, donor, kind, payload)

    def close(self) -> None:
        self.put("end", None)
        self.broken = True
