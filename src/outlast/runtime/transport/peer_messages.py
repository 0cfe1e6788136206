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
    "Hand",
    "HeaderSaid",
    "Key",
    "Parts",
    "Prints",
    "Reduced",
    "Roll",
    "SettingsSeen",
    "SumsReady",
]


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
    """Of the view's store (`exchange/_rendezvous.py`)."""

    name: str
    value: bytes


class CloserLook(msgspec.Struct, frozen=True, tag="Found"):
    """What I found when the guards had reason to look closer."""

    step: int
    culprits: tuple[Culprit, ...]


class SettingsSeen(msgspec.Struct, frozen=True, tag="Settings"):
    """What my optimizers see beside gradients and state, where headers show that it is not the same on all."""

    step: int
    told: bytes


class Final(msgspec.Struct, frozen=True, tag=True):
    """I committed the last step."""

    step: int


class Bye(msgspec.Struct, frozen=True, tag=True):
    """I leave this view."""
