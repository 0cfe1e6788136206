"""Rounds in which every member of a view says one thing to all, typed by the channel that they go over.

What is said rarely and is small goes over channels; sums and headers have messages of their own (`transport/mesh.py`).
Each channel has a number that no other has, here and nowhere else; those of planes are listed as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from outlast.core.phases import Phase
from outlast.core.protocol.slices import Words
from outlast.runtime.transport.connections import decoded
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import Extra

__all__ = ["EVALUATED", "GRAMS", "HOLD", "LANES", "SLICES", "STATES", "VOTE", "WANTED", "Channel", "round_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class Channel(Generic[T]):
    """`read(peer, body)`: what a peer said. It raises WireRefusal for what cannot be meant."""

    number: int
    write: Callable[[T], bytes]
    read: Callable[[str, bytes], T]


def _words(peer: str, body: bytes) -> Words:
    rows = decoded(peer, body, list[tuple[int, str, int, int]])
    return {(bucket, reducer): (old, new) for bucket, reducer, old, new in rows}


GRAMS = 0  # of `exchange/row_plane.py`: Gram matrices, as bytes
VOTE: Channel[str] = Channel(1 << 20, msgspec.msgpack.encode, lambda peer, body: decoded(peer, body, str))
"""Who is wrong about a reduced slice of rows."""
HOLD: Channel[int] = Channel(1 << 21, lambda n: n.to_bytes(4, "big"), lambda peer, body: int.from_bytes(body, "big"))
"""Orders that I have heard, in a view that waits for rows; a turn for each order that is carried out."""
STATES: Channel[int] = Channel(1 << 25, lambda n: n.to_bytes(8, "big"), lambda peer, body: int.from_bytes(body, "big"))
"""Fingerprints of states in such a view, before orders that bring somebody are carried out; by turn, too."""
SLICES: Channel[Words] = Channel(
    1 << 22, lambda words: msgspec.msgpack.encode([(*key, *pair) for key, pair in words.items()]), _words
)
"""Fingerprints of slices whose reduction is disputed: as gathered, and as computed now."""
EVALUATED = 1 << 24  # of `member/shared_evaluation.py`: what is known of an evaluation, and one more for each further
LANES: Channel[list[str]] = Channel(1 << 19, msgspec.msgpack.encode, lambda peer, body: decoded(peer, body, list[str]))
"""Where the other ranks of a replica are reached, after a view's roll call."""
WANTED = 1 << 23  # of `exchange/c10d_plane.py`: which slices I check


def round_of(mesh: Mesh, channel: Channel[T], step: int, mine: T, phase: Phase, turn: int = 0) -> dict[str, T]:
    """Everybody's word, in the view's order. Raises ViewAbandoned if the view ends first."""
    at = channel.number + turn
    mesh.broadcast(Extra(step, at, channel.write(mine)))
    box: dict[str, Any] = mesh.collect(Extra, step, at, phase)
    return {name: mine if name == mesh.me else channel.read(name, box[name].body) for name in mesh.view.members}
