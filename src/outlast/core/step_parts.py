"""Which part of a step each phase belongs to, and what a member says of its steps' parts and of whom it waited for.

Role: the vocabulary of a step's anatomy, shared by members, the coordinator, the journal and whoever shows it. Figures
are sums since a member's process joined: the newest word holds all, and one that is lost costs nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from outlast.core.phases import Phase

__all__ = ["PARTS", "PART_OF", "PairWait", "Part", "StepParts"]

Part = Literal["load", "compute", "exchange", "wait"]
PARTS: tuple[Part, ...] = ("load", "compute", "exchange", "wait")
"""Fetching samples; the loop's own code, backward and the optimizer; adding, reducing and copying gradients; waiting
for other members, which between hosts includes the time that their bytes are under way."""

_OF_PART: Mapping[Part, tuple[Phase, ...]] = {
    "load": (Phase.LOAD,),
    "compute": (Phase.BODY, Phase.BACKWARD, Phase.RECOMPUTE, Phase.AUDIT, Phase.OPTIMIZER),
    "exchange": (Phase.MERGE, Phase.SCATTER, Phase.REDUCE, Phase.GATHER, Phase.VERDICT, Phase.COMMIT),
    "wait": (Phase.SCATTERED, Phase.GATHERED, Phase.HEADER),
}
PART_OF: Mapping[Phase, Part] = MappingProxyType({phase: part for part, row in _OF_PART.items() for phase in row})
"""Phases of a change of views, of a join or of the end belong to no step."""


class PairWait(msgspec.Struct, frozen=True, kw_only=True):
    """One member's word about another, since it joined. `waited_s`: waiting for it; of what was waited for several at
    once each has its share. `exchanges`: headers of it, `late`: those that came much later than others' headers.
    `segments`, `resent`: TCP's, sent to it; 0 within a host."""

    waited_s: float = 0.0
    exchanges: int = 0
    late: int = 0
    segments: int = 0
    resent: int = 0


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a member's time went in `steps` steps: seconds by part, and other members by name. `batches`: microbatches
    that it computed of them, and the seconds from the first of a batch to the end of its backward."""

    steps: int
    seconds: dict[str, float]
    waits: dict[str, PairWait] = {}
    batches: tuple[int, float] = (0, 0.0)
