"""A replica's connections to the peers of one view, its receive buffers, and streams to joiners.

What a peer sends is written into the buffers of the view that it was sent in, also when that view has been abandoned
here and the writer is late (protocol, 14): whether that can hurt is up to who owns the buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.core.protocol import View

if TYPE_CHECKING:
    from outlast.prove.adversary._replica import Replica

__all__ = ["Feed", "Mesh"]

Key = tuple[Any, ...]  # (kind, step, bucket)


class Mesh:
    """Fresh for each view. `buffers`: key -> sender -> what it sent."""

    def __init__(self, owner: Replica, view: View, buffers: dict[Key, dict[str, Any]]) -> None:
        self.owner, self.view, self.buffers = owner, view, buffers
        self.peers = [name for name in view.members if name != owner.name]
        self.suspects: list[str] = []
        self.parted = False  # somebody said goodbye

    def broadcast(self, key: Key, payload: Any) -> None:
        for name in self.peers:
            self.send(name, key, payload)

    def send(self, to: str, key: Key, payload: Any) -> None:
        owner = self.owner
        world = owner.world
        peer = world.replicas.get(to)
        if peer is not None and not peer.ended:
            at = self.view.id
            network = world.network
            network.send((owner.name, to, at), (owner.name, to), peer, peer.from_peer, at, owner.name, key, payload)

    def whole(self, key: Key) -> bool:
        return len(self.buffers.get(key, ())) == len(self.peers)

    def take(self, key: Key) -> dict[str, Any]:
        return self.buffers.pop(key, {})

    def close(self) -> None:
        """Say goodbye, so that the end of the connection is no suspicion."""
        if self.owner.world.variant.says_goodbye:
            self.broadcast(("bye", 0, 0), None)
        else:
            self.owner.world.mesh_ends(self.owner.name, self.view.id, self.peers)


class Feed:
    """One donor's stream to one joiner."""

    def __init__(self, donor: Replica, joiner: str, serial: int) -> None:
        self.donor, self.joiner, self.serial = donor, joiner, serial
        self.broken = False

    def put(self, kind: str, payload: Any, delay_s: float = 0.0) -> None:
        if self.broken:
            return
        world, donor = self.donor.world, self.donor.name
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
