"""What people ask of a run while it trains, and what they are answered.

Frozen tagged records beside `messages.py`. Each names its asker, which is one connection; the answer goes back on it.
What is asked may be said twice: a number, or a host to be emptied, is the same the second time.
An eviction is not: of a slot, the second is of the process that took the place of the first.
"""

from __future__ import annotations

import msgspec

__all__ = ["ASKS", "Answered", "DrainAsked", "EvictAsked", "ScaleAsked", "is_operator"]

_PREFIX = "operator:"


class ScaleAsked(msgspec.Struct, frozen=True, kw_only=True, tag="ScaleAsked"):
    """Train with so many replicas from now on; spares stay as many as they were."""

    asker: str
    replicas: int


class DrainAsked(msgspec.Struct, frozen=True, kw_only=True, tag="DrainAsked"):
    """Have the replicas of this host leave between two steps, and start none there. `undo`: take it back."""

    asker: str
    host: str
    undo: bool = False


class EvictAsked(msgspec.Struct, frozen=True, kw_only=True, tag="EvictAsked"):
    """Put another process in this replica's place. `now`: kill it, in place of letting it leave between two steps."""

    asker: str
    replica: str
    now: bool = False


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="Answered"):
    """To the asker, once what was decided is durable. `text`: what follows, or why nothing does. `leaving`: replicas
    that go."""

    epoch: int
    accepted: bool
    text: str
    remedy: str = ""
    leaving: tuple[str, ...] = ()


ASKS = (ScaleAsked, DrainAsked, EvictAsked)


def is_operator(name: str) -> bool:
    """Whether a connection of this name is of somebody who asks: no member, agent or host is called so."""
    return name.startswith(_PREFIX)
