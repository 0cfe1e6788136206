"""What the journal is told of the data: part of the vocabulary of `events.py`."""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.core.event_base import Event

__all__ = ["DataTrouble", "Trouble"]

Trouble = Literal["skipped", "died", "hung", "leaked"]


class DataTrouble(Event, frozen=True, kw_only=True, tag="data_trouble"):
    """Something was wrong with the data, and training went on. `skipped`: `samples` could not be read, others stand in
    for them from this step on, on every replica; `total` of the `allowed` are by now. `died`, `hung`, `leaked`: the
    workers of `replica` on `host` were replaced, as one of them did so at this sample, if at any."""

    what: Trouble
    step: int
    text: str
    replica: str = ""
    host: str = ""
    microbatch: int = -1
    samples: list[int] = msgspec.field(default_factory=list)
    total: int = 0
    allowed: int = 0
