"""The base of every event."""

from __future__ import annotations

import msgspec

__all__ = ["Event"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all events. `at_s`: Unix time."""

    at_s: float
