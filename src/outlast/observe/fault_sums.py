"""What a run's faults came to: downtime, steps lost, microbatches computed again. One home for terminal, page, metrics.

Role: sums over recoveries and over the verdicts of guards that took steps back. Pure. Invariants: what one view mended
counts once, as its faults share the standstill; a step that was lost twice counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from outlast.core import events as ev

__all__ = ["FaultSums", "sums_of"]


class FaultSums(msgspec.Struct, frozen=True, kw_only=True):
    """`downtime_s`: in which no step was committed on their account; `lost_steps`: done twice or in vain, also
    those that a guard took back."""

    downtime_s: float
    lost_steps: int
    microbatches_recomputed: int


def sums_of(events: Iterable[ev.AnyEvent], gone: int, saved: ev.CheckpointSaved | None) -> FaultSums:
    """The sums of all recoveries and rewinds among `events`. `gone`: steps of a run that is over which no checkpoint
    holds, the newest of which is `saved`."""
    recoveries: list[ev.Recovery] = []
    rewinds: list[ev.VerdictReached] = []
    for event in events:
        if isinstance(event, ev.Recovery):
            recoveries.append(event)
        elif isinstance(event, ev.VerdictReached) and event.action == "rewind" and event.to_step >= 0:
            rewinds.append(event)
    kept = (saved.step if saved else 0) if gone else None
    return FaultSums(
        downtime_s=_once(recoveries, "downtime_s"),
        lost_steps=round(_once(recoveries, "lost_steps")) + _taken_back(rewinds, kept) + gone,
        microbatches_recomputed=round(_once(recoveries, "microbatches_recomputed")),
    )


def _taken_back(rewinds: Sequence[ev.VerdictReached], kept: int | None) -> int:
    """Steps that rewinds took back, from the one gone back to up to the one judged, which was not applied. Steps do not
    count back, so two rewinds to one state share the earlier steps. `kept`: later ones are counted elsewhere."""
    count, passed = 0, 0  # steps below `passed` were taken back already
    for verdict in rewinds:
        passed = passed if verdict.step >= passed else 0  # the whole fleet had gone, and does them again
        end = verdict.step if kept is None else min(verdict.step, kept)
        count += max(0, end - max(verdict.to_step, passed))
        passed = verdict.step + 1
    return count


def _once(recoveries: Sequence[ev.Recovery], figure: str) -> float:
    """The sum of a figure; of faults that one view mended, which share it, the largest."""
    by_view: dict[tuple[int, ...], float] = {}
    for event in recoveries:
        view = tuple(event.view)
        by_view[view] = max(by_view.get(view, 0.0), getattr(event, figure))
    return sum(by_view.values())
