"""What a coordinator hears from its own driver: time has passed, who goes, that members go on, how many spares
are worth holding, that it is replaced."""

from __future__ import annotations

import msgspec

__all__ = ["Departing", "Resumed", "SparesWorth", "Superseded", "Timer"]


class Timer(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    name: str


class Departing(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """Members that were asked to go, and of whom a save is published: all at once, or another step would be made by
    those of whom nobody has heard it yet."""

    members: tuple[str, ...]


class Resumed(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """A step was committed in a view whose faults are not reported yet."""


class SparesWorth(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """So many spares the policy finds worth holding, by the run's record of now; of a run that is told `auto`."""

    number: int
    reason: str = ""


class Superseded(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """A durable write was refused: a newer coordinator holds the epoch."""
