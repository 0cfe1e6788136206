"""What a run's faults came to: downtime, steps lost, microbatches computed again. One home for terminal, page, metrics.

Role: sums over recoveries. Pure. Invariant: what one view mended counts once, as its faults share the standstill.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outlast.core import events as ev

__all__ = ["FaultSums", "sums_of"]


class FaultSums(msgspec.Struct, frozen=True, kw_only=True):
    """`downtime_s`: in which no step was committed on their account; `lost_steps`: done twice or in vain."""

    downtime_s: float
    lost_steps: int
    microbatches_recomputed: int


def sums_of(recoveries: Sequence[ev.Recovery], gone: int) -> FaultSums:
    """The sums of all recoveries. `gone`: steps of a run that is over which no checkpoint holds."""
    return FaultSums(
        downtime_s=_once(recoveries, "downtime_s"),
        lost_steps=round(_once(recoveries, "lost_steps")) + gone,
        microbatches_recomputed=round(_once(recoveries, "microbatches_recomputed")),
    )


def _once(recoveries: Sequence[ev.Recovery], figure: str) -> float:
    """The sum of a figure; of faults that one view mended, which share it, the largest."""
    by_view: dict[tuple[int, ...], float] = {}
    for event in recoveries:
        view = tuple(event.view)
        by_view[view] = max(by_view.get(view, 0.0), getattr(event, figure))
    return sum(by_view.values())
