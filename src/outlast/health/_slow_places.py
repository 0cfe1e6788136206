"""Places whose steps took longer than those of others in a run: step times by replica as a reading. Pure.

A device that slows down for weeks before it dies is known by that, and by nothing else. It is a note in the diary and
no finding: who is slow computes what is right, and half of a fleet may be of an older kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from outlast.core import events as ev

__all__ = ["slow_places"]

_FEW_STEPS, _FEW_REPLICAS = 100, 3
_SLOW, _WORTH_S = 1.25, 1e-3  # times the median of the others, and so much of a step


def slow_places(events: Iterable[ev.AnyEvent], places: Mapping[str, str]) -> dict[str, str]:
    """By place (`places`: of each replica): what is said of it, if the own part of its steps, which others may have to
    wait for, was that much longer than the others' median. The newest word of a replica holds all of its steps."""
    newest = {event.replica: event for event in events if isinstance(event, ev.StepAnatomy)}
    own: dict[str, tuple[float, int]] = {}
    for replica, word in newest.items():
        if word.steps >= _FEW_STEPS and replica in places:
            spent = word.seconds.get("load", 0.0) + word.seconds.get("compute", 0.0)
            own[places[replica]] = max(own.get(places[replica], (0.0, 0)), (spent / word.steps, word.steps))
    if len(own) < _FEW_REPLICAS:
        return {}
    told = {}
    for place, (seconds, steps) in own.items():
        usual = median(other for name, (other, _) in own.items() if name != place)
        if seconds > _SLOW * usual and seconds - usual > _WORTH_S:
            times = f"{seconds / max(usual, 1e-9):.2f} times the median of the other {len(own) - 1}"
            told[place] = f"slow: its part of a step took {seconds * 1e3:.0f} ms over {steps} steps, {times}"
    return told
