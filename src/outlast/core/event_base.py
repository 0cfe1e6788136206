"""The base of every event."""

from __future__ import annotations

import msgspec

__all__ = ["Event"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", gc=False):
    """Base of all events. `at_s`: Unix time. No event holds another that holds it, so the collector of cycles, which
    would walk through all of them again and again while a journal is read, is told nothing of events."""

    at_s: float
