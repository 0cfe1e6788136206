"""What prediction was worth: how often alarms came true and failures were foretold, from the diary. No torch.

The diary has an entry for each alarm that is settled (`passed`: it was false) and one for each failure. Alarms that
work was moved away from prove nothing unless a test did, so they are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from outlast.core.policy import AlarmKind, prior_of, wilson
from outlast.health._diary import DiaryEntry

__all__ = ["Foretold", "KindRecord", "alarm_kinds", "foretold_of", "worth_of"]


class KindRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of alarm: how many came true and how many did not, the probability believed now (the stated prior, and
    these), and how long before the failure a true one came."""

    kind: str
    true: int
    false: int
    chance: float
    delay_s: float


class Foretold(msgspec.Struct, frozen=True, kw_only=True):
    """Shares with their 95 % interval (Wilson); (0, 0, 1) where nothing was seen. `share`: of failures that an alarm
    had told before; `precision`: of alarms that came true; `notice_s`: from a true alarm to its failure, on average."""

    failures: int
    foretold: int
    share: tuple[float, float, float]
    alarms: int
    precision: tuple[float, float, float]
    notice_s: float
    kinds: list[KindRecord]


def alarm_kinds(entries: Iterable[DiaryEntry]) -> dict[str, AlarmKind]:
    """What all runs before have taught of each kind of alarm, on top of its stated prior."""
    sums: dict[str, list[float]] = {}
    for entry in entries:
        if entry.kind == "alarm" and entry.passed is not None:
            row = sums.setdefault(entry.text, [0.0, 0.0, 0.0])
            row[entry.passed] += 1
            row[2] += 0.0 if entry.passed else max(0.0, entry.hours) * 3600
    return {
        name: replace(prior_of(name), num_true=true, num_false=false, delays_s=delays)
        for name, (true, false, delays) in sums.items()
    }


def foretold_of(entries: Iterable[DiaryEntry]) -> Foretold:
    """Over all runs that the diary has learned."""
    rows = list(entries)
    kinds = alarm_kinds(rows)
    true, false = (sum(int(getattr(kind, name)) for kind in kinds.values()) for name in ("num_true", "num_false"))
    failures = max(true, sum(entry.kind == "failure" for entry in rows))
    notice_s = sum(kind.delays_s for kind in kinds.values()) / true if true else 0.0
    return Foretold(
        failures=failures,
        foretold=true,
        share=wilson(true, failures),
        alarms=true + false,
        precision=wilson(true, true + false),
        notice_s=notice_s,
        kinds=[
            KindRecord(
                kind=name, true=int(kind.num_true), false=int(kind.num_false), chance=kind.p, delay_s=kind.delay_s
            )
            for name, kind in sorted(kinds.items())
        ],
    )


def worth_of(found: Foretold) -> str:
    """What prediction was worth so far, in a sentence."""
    if not found.alarms and not found.failures:
        return "Prediction: no alarm and no failure was seen yet."
    share, low, high = found.share
    told = f"{found.foretold} of {found.failures} failures were foretold ({share:.0%}, 95 % {low:.0%} to {high:.0%})"
    if not found.alarms:
        return f"Prediction: {told}; no alarm was settled yet."
    true, low, high = found.precision
    ahead = f", {found.notice_s / 60:.1f} min ahead on average" if found.foretold else ""
    return (
        f"Prediction: {told}{ahead}; of {found.alarms} alarms {true:.0%} came true (95 % {low:.0%} to {high:.0%}). "
        "outlast plan prediction says what that is worth to a job."
    )
