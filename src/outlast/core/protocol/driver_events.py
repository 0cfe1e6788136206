"""What a coordinator hears from its own driver: time has passed, who goes, what was saved, that it is replaced."""

from __future__ import annotations

import msgspec

__all__ = ["Departing", "Resumed", "SavePublished", "Superseded", "Timer"]


class Timer(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    name: str


class Departing(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """Members that were asked to go, and of whom a save is published: all at once, or another step would be made by
    those of whom nobody has heard it yet."""

    members: tuple[str, ...]


class Resumed(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """A step was committed in a view whose faults are not reported yet."""


class SavePublished(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """A checkpoint of so many steps was published: the newest of this run."""

    step: int


class Superseded(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """A durable write was refused: a newer coordinator holds the epoch."""
