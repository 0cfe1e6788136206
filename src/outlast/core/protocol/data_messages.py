"""What members tell the coordinator of the data that they train on: part of `messages.py`."""

from __future__ import annotations

import msgspec

from outlast.core.data_events import Trouble

__all__ = ["DataNoted"]


class DataNoted(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """Something about the data, for the record (`outlast.core.events.DataTrouble`). Of samples that are skipped every
    member says the same, and one of them is heard."""

    member: str
    what: Trouble
    step: int
    text: str
    microbatch: int = -1
    samples: tuple[int, ...] = ()
    total: int = 0
    allowed: int = 0
