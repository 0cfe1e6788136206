"""What members of a view say to each other over its connections: frozen tagged records. Travelling is `mesh.py`'s."""

from __future__ import annotations

import msgspec

from outlast.core.policy import Culprit
from outlast.core.protocol import Commitment, Header, RollEntry

__all__ = [
    "Bye",
    "CloserLook",
    "Extra",
    "Final",
    "Frame",
    "Hand",
    "HeaderSaid",
    "Hi",
    "Key",
    "Parts",
    "Ping",
    "Pong",
    "Prints",
    "Reduced",
    "Roll",
    "SayAgain",
    "SettingsSeen",
    "SumsReady",
]


class Hi(msgspec.Struct, frozen=True, tag=True):
    """I am in this view too. My region's descriptor comes with it, if I have one."""


class SayAgain(msgspec.Struct, frozen=True, tag=True):
    """Your `Hi` came without the region that you had sent with it: I had no descriptor or memory left for that."""


class Roll(msgspec.Struct, frozen=True, tag=True):
    entry: RollEntry


class Parts(msgspec.Struct, frozen=True, tag=True):
    """After a roll in which states differ: one fingerprint for each part of mine, by name. `step`: -1."""

    step: int
    rows: tuple[tuple[str, int], ...]


class Prints(msgspec.Struct, frozen=True, tag=True):
    """Fingerprints of the microbatches that I contribute to a step, before audits are drawn."""

    step: int
    said: Commitment


class SumsReady(msgspec.Struct, frozen=True, tag="Ready"):
    """My partial sums of a bucket lie in these slots of my region, in the order of my nodes. `prints`: of their blocks,
    taken when the sums were made (with audits)."""

    step: int
    bucket: int
    slots: tuple[int, ...]
    prints: tuple[bytes, ...] = ()


class Reduced(msgspec.Struct, frozen=True, tag=True):
    """My slice of a bucket is reduced and lies in my region's outcome slot."""

    step: int
    bucket: int


class HeaderSaid(msgspec.Struct, frozen=True, tag="Head"):
    """My header; and the module buffers after microbatch 0, from who computed it."""

    header: Header
    buffers: tuple[bytes, ...] = ()


class Hand(msgspec.Struct, frozen=True, tag=True):
    """The outcome of `step` lies in my outcome slot; `meta` is the rest of it."""

    step: int
    meta: bytes


class Extra(msgspec.Struct, frozen=True, tag=True):
    """What a robust rule needs told beside the gradients; `bucket`: the channel (`exchange/row_plane.py`)."""

    step: int
    bucket: int
    body: bytes


class Key(msgspec.Struct, frozen=True, tag=True):
    """A key of the view's store, and its value (`exchange/_rendezvous.py`)."""

    name: str
    value: bytes


class CloserLook(msgspec.Struct, frozen=True, tag="Found"):
    """What I found when the guards had reason to look closer."""

    step: int
    culprits: tuple[Culprit, ...]


class SettingsSeen(msgspec.Struct, frozen=True, tag="Settings"):
    """What my optimizers see beside gradients and state, and fingerprints of registered parts by name, where headers
    show that they are not the same on all."""

    step: int
    told: bytes
    registered: dict[str, int] = {}


class Final(msgspec.Struct, frozen=True, tag=True):
    """I committed the last step."""

    step: int


class Bye(msgspec.Struct, frozen=True, tag=True):
    """I leave this view."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Say whether you hear me."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """I have heard your `Ping`."""


Frame = (
    Hi
    | SayAgain
    | Roll
    | Parts
    | Prints
    | SumsReady
    | Reduced
    | HeaderSaid
    | Hand
    | Extra
    | Key
    | CloserLook
    | SettingsSeen
    | Final
    | Bye
    | Ping
    | Pong
)
"""All that can come over a connection of a view."""
