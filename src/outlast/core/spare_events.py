"""What the journal is told of spares: part of the vocabulary of `events.py`."""

from __future__ import annotations

from outlast.core.event_base import Event

__all__ = ["SparesHeld"]


class SparesHeld(Event, frozen=True, kw_only=True, tag="spares_held"):
    """The run holds `number` spares from now on, since that is left to outlast. `worth`: as many as its policy asked
    for, which the hosts may have no slots for; `reason`: what it decided by; `replicas`: those that leave."""

    number: int
    worth: int
    reason: str
    replicas: list[str]
