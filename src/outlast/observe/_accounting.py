"""Where the wall time of a run went.

Role: the accounting identity, productive + checkpoint + lost + recovery + degraded + idle = wall, from the journal's
events alone, asserted each time. Pure. The rules, in words:

- **idle**: before the first view has formed, and after the last step, recovery or view that the journal knows of.
- **recovery**: from a victim's last sign of life to the moment that every survivor computes again; overlapping
  recoveries count once.
- **lost**: work that was done twice or in vain: the steps a recovery lost, and its orphans' recomputation.
- **degraded**: of each moment of training with n members of N, the share (N - n) / N that was missing.
- **checkpoint**: training held up by saves, as each published one reports of its slowest writer. What came to nothing
  reports nothing; waiting for the last save is after the last step, hence idle.
- **productive**: the rest. The useful-time ratio (ETTR) is productive / wall.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from outlast.core import events as ev

__all__ = ["Accounting", "accounting"]


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by use; they sum to `wall_s`."""

    wall_s: float
    productive_s: float
    checkpoint_s: float
    lost_s: float
    recovery_s: float
    degraded_s: float
    idle_s: float

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive over wall; 0 for a run without a wall time."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    def seconds(self) -> dict[str, float]:
        """By name without `_s`, as `RunFinished.seconds` has it; `wall` included."""
        return {name.removesuffix("_s"): value for name, value in msgspec.structs.asdict(self).items()}


class _Facts(msgspec.Struct):
    """What the sweep needs. `sizes`: (from when, members); `redone_s`: by the view that mended it; `step_s`: latest."""

    start_s: float = 0.0
    end_s: float = 0.0
    active_from_s: float = math.inf
    active_until_s: float = -math.inf
    full: int = 0
    sizes: list[tuple[float, int]] = []
    outages: list[tuple[float, float]] = []
    redone_s: dict[tuple[int, int], float] = {}
    step_s: float = 0.0
    planned: ev.ViewInstalled | None = None
    microbatches: int = 0
    blocked_s: float = 0.0


def accounting(events: Iterable[ev.AnyEvent], *, now_s: float | None = None) -> Accounting:
    """The account of a run; of one that goes on, up to `now_s` (Unix seconds) or else to its last event."""
    facts = _gather(events, now_s)
    wall = facts.end_s - facts.start_s
    cuts = {facts.start_s, facts.end_s, facts.active_from_s, facts.active_until_s, *(at for at, _ in facts.sizes)}
    outages = _union(facts.outages)
    cuts.update(edge for outage in outages for edge in outage)
    edges = sorted(edge for edge in cuts if facts.start_s <= edge <= facts.end_s)
    productive = recovery = degraded = idle = 0.0
    for begin, end in itertools.pairwise(edges):
        middle, length = (begin + end) / 2, end - begin
        if not facts.active_from_s <= middle <= facts.active_until_s:
            idle += length
        elif _inside(middle, outages):
            recovery += length
        else:
            share = _share(middle, facts)
            productive += length * share
            degraded += length * (1 - share)
    lost = min(math.fsum(facts.redone_s.values()), productive)
    checkpoint = min(facts.blocked_s, productive - lost)
    account = Accounting(
        wall_s=wall,
        productive_s=productive - lost - checkpoint,
        checkpoint_s=checkpoint,
        lost_s=lost,
        recovery_s=recovery,
        degraded_s=degraded,
        idle_s=idle,
    )
    assert_identity(account)
    return account


def assert_identity(account: Accounting) -> None:
    """An AssertionError if the parts are not the whole, or one of them is negative: a bug in this module."""
    parts = [value for name, value in msgspec.structs.asdict(account).items() if name != "wall_s"]
    assert min(parts) >= 0, account
    assert math.isclose(math.fsum(parts), account.wall_s, rel_tol=1e-9, abs_tol=1e-6), account


def _gather(events: Iterable[ev.AnyEvent], now_s: float | None) -> _Facts:
    facts = _Facts()
    latest_s: float | None = None
    for event in events:
        if latest_s is None:
            latest_s = facts.start_s = event.at_s
        latest_s = max(latest_s, event.at_s)  # the clock of the wall may be set back; time does not run back
        _note(event, latest_s, facts)
        if isinstance(event, ev.RunFinished):
            now_s = None
    facts.end_s = max(latest_s or 0.0, now_s if now_s is not None and latest_s is not None else 0.0)
    if now_s is not None and facts.active_from_s < math.inf:
        facts.active_until_s = max(facts.active_until_s, facts.end_s)
    return facts


def _note(event: ev.AnyEvent, at_s: float, facts: _Facts) -> None:
    match event:
        case ev.RunStarted():
            facts.full = event.num_replicas
        case ev.ViewInstalled():
            facts.microbatches = event.num_microbatches or facts.microbatches
            facts.planned = event if event.planned else None
            if not event.planned:  # a planned one leaves the old view at work until it has formed
                facts.sizes.append((at_s, len(event.members)))
        case ev.ViewFormed():
            if facts.planned is not None and (facts.planned.epoch, facts.planned.n) == (event.epoch, event.n):
                facts.sizes.append((at_s, len(facts.planned.members)))
            facts.active_from_s = min(facts.active_from_s, at_s)
            facts.active_until_s = at_s
        case ev.Progress():
            facts.active_from_s, facts.active_until_s = min(facts.active_from_s, at_s), at_s
            facts.step_s = event.step_s
        case ev.CheckpointSaved():
            facts.blocked_s += event.blocked_s
        case ev.Recovery():
            facts.active_until_s = max(facts.active_until_s, at_s)
            facts.outages.append((max(facts.start_s, at_s - event.downtime_s - event.detect_s), at_s))
            members = facts.sizes[-1][1] if facts.sizes else 0
            steps = event.lost_steps + _redone(event.microbatches_recomputed, facts.microbatches, members)
            view = (event.view[0], event.view[1])  # faults that one view mended were redone once
            facts.redone_s[view] = max(facts.redone_s.get(view, 0.0), facts.step_s * steps)


def _redone(orphans: int, microbatches: int, members: int) -> float:
    """Orphans' recomputation in steps: whole microbatches a member, against a whole step's a member."""
    if not (orphans and microbatches and members):
        return 0.0
    return math.ceil(orphans / members) / math.ceil(microbatches / members)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans in order that cover the same points."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _inside(point: float, spans: Sequence[tuple[float, float]]) -> bool:
    index = bisect_right(spans, point, key=lambda span: span[0]) - 1
    return index >= 0 and point < spans[index][1]


def _share(point: float, facts: _Facts) -> float:
    """The part of the full fleet that was training."""
    index = bisect_right(facts.sizes, point, key=lambda size: size[0]) - 1
    if index < 0 or facts.full <= 0:
        return 1.0
    return min(1.0, facts.sizes[index][1] / facts.full)
