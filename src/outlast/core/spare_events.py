"""What the journal is told of spares, and of places that no spare fills: part of the vocabulary of `events.py`."""

from __future__ import annotations

from typing import Literal

from outlast.core.event_base import Event

__all__ = ["SparesHeld", "VacancyDecided"]


class SparesHeld(Event, frozen=True, kw_only=True, tag="spares_held"):
    """The run holds `number` spares from now on, since that is left to outlast. `worth`: as many as its policy asked
    for, which the hosts may have no slots for; `reason`: what it decided by; `replicas`: those that leave."""

    number: int
    worth: int
    reason: str
    replicas: list[str]


class VacancyDecided(Event, frozen=True, kw_only=True, tag="vacancy_decided"):
    """Replicas were lost and no spare was there, or the wait for others is over. `action`: the `running` of `wanted` go
    on, wait for others for up to `wait_s` seconds (None: as long as it takes), or save and stop; `least`: the fewest
    that may go on; `reason`: what it was decided by, in a sentence."""

    action: Literal["shrink", "wait", "stop"]
    running: int
    wanted: int
    least: int
    wait_s: float | None
    reason: str
