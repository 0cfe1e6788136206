"""The shortest schedule that still fails: delta debugging over a run's strikes. Pure, but for `fails`, which runs them.

What strikes meet is not fixed by their moments, so a schedule that does not fail may do so the next time: a part that
was left out wrongly costs a longer answer, never a wrong one, since what is told has failed as it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from outlast.prove.script_plan import ScriptFleet
from outlast.prove.strike_plan import Strike
from outlast.runtime.settings.fault_points import Fault

__all__ = ["shrink"]

_Item = tuple[float, Strike] | Fault  # strikes with their moments since the start


def shrink(fleet: ScriptFleet, fails: Callable[[ScriptFleet], bool], most: int) -> ScriptFleet:
    """A fleet of the same shape with as few strikes as were found to still fail, in at most `most` runs.

    `fleet` itself is known to fail. First all strikes are left out: a run that fails without any is the script's fault.
    """
    runs = 0
    kept = _items(fleet)
    parts = 1  # then halves, quarters, … until single strikes are left out
    while kept and runs < most:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if runs >= most:
                break
            runs += 1
            if fails(_fleet(fleet, rest)):
                kept, parts = rest, max(1, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), parts * 2)
    return _fleet(fleet, kept)


def _items(fleet: ScriptFleet) -> list[_Item]:
    found: list[_Item] = list(fleet.faults)
    at_s = 0.0
    for strike in fleet.strikes:
        at_s += strike.wait_s
        found.append((at_s, strike))
    return found


def _fleet(fleet: ScriptFleet, items: Sequence[_Item]) -> ScriptFleet:
    """With these strikes at the moments that they had."""
    strikes: list[Strike] = []
    last_s = 0.0
    for item in items:
        if isinstance(item, tuple):
            strikes.append(msgspec.structs.replace(item[1], wait_s=round(item[0] - last_s, 3)))
            last_s = item[0]
    faults = tuple(item for item in items if isinstance(item, Fault))
    return msgspec.structs.replace(fleet, strikes=tuple(strikes), faults=faults)
