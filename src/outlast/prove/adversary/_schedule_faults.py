"""Faults as they are drawn: single ones, and themes, in which several lead together where one seldom does.

Faults are plain data, so a violating schedule can be shrunk by leaving them out, written down and replayed.
"""

from __future__ import annotations

from random import Random

import msgspec

__all__ = ["THEMES", "ScheduleFault", "any_fault", "cut_off_whole"]

_KINDS = (
    "crash", "crash", "crash", "pause", "hang", "slow", "agent crash", "agent pause", "coordinator crash",
    "coordinator crash", "coordinator pause", "coordinator replaced", "hang up", "hang up agent", "mesh break",
    "no path", "cut off", "cut down", "cut up", "mesh stall", "feed break", "leave",
)  # fmt: skip
_POINTS = (
    "persist", "persist", "tell", "decide", "decide", "commit", "called", "handover", "scattered", "serve", "form",
    "ready",
)  # fmt: skip


class ScheduleFault(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`kind` happens to number `who` (and `other`) of those it can happen to, for `lasts` seconds; at second `at`, or
    when point `point` is passed for the `nth` time (then, with `who` = -1, to the process that passes it)."""

    kind: str
    who: int = 0
    other: int = 0
    lasts: float = 0.0
    at: float = 0.0
    point: str = ""
    nth: int = 0


def cut_off_whole(rng: Random) -> tuple[ScheduleFault, ...]:
    """The coordinator and the whole view do not reach each other for longer than any deadline; before or in it,
    something makes the coordinator want a change."""
    at = 0.4 + rng.random()
    kind = rng.choice(("cut off", "cut down", "cut down", "cut up"))
    cut = ScheduleFault(kind=kind, other=3, lasts=3.0 + 2.0 * rng.random(), at=at)
    restart = ScheduleFault(kind="coordinator crash", lasts=0.05, at=at - 0.3 * rng.random())
    death = ScheduleFault(kind=rng.choice(("crash", "leave")), who=rng.randrange(8), at=at - 0.15 + 0.3 * rng.random())
    return rng.choice(((cut,), (restart, cut), (cut, death), (restart, cut, death), (restart, cut, death)))


def _left_behind(rng: Random) -> tuple[ScheduleFault, ...]:
    """A spare misses an outcome and is called into a view while the next step is half exchanged."""
    nth = rng.randint(1, 14)
    missed = ScheduleFault(kind="feed break", who=rng.randrange(4), point="commit", nth=nth)
    late = ScheduleFault(
        kind="mesh stall", who=rng.randrange(4), other=rng.randrange(1, 5), lasts=0.5, point="commit", nth=nth
    )
    death = ScheduleFault(kind="crash", who=-1, point="scattered", nth=nth + rng.randint(1, 5))
    return rng.choice(((missed, death), (late, death), (missed, late, death)))


def _torn(rng: Random) -> tuple[ScheduleFault, ...]:
    """Several paths between members break at once."""
    at = 0.1 + 0.3 * rng.random()
    kind = rng.choice(("mesh break", "mesh break", "no path"))
    pairs = [(rng.randrange(8), rng.randrange(1, 8)) for _ in range(rng.randint(2, 3))]
    return tuple(ScheduleFault(kind=kind, who=who, other=other, lasts=0.3, at=at) for who, other in pairs)


def _two_at_once(rng: Random) -> tuple[ScheduleFault, ...]:
    """The second fault strikes inside the recovery from the first."""
    first = ScheduleFault(
        kind="crash", who=-1, point=rng.choice(("decide", "commit", "scattered")), nth=rng.randint(1, 8)
    )
    point = rng.choice(("called", "handover", "form", "persist", "tell"))
    again = ScheduleFault(
        kind=rng.choice(("crash", "pause")), who=-1, point=point, nth=rng.randint(2, 9), lasts=rng.random()
    )
    return first, again


THEMES = (cut_off_whole, _left_behind, _left_behind, _torn, _two_at_once, _two_at_once)


def any_fault(rng: Random, span_s: float) -> ScheduleFault:
    """One of any kind, at some second of so many, or where some point is passed."""
    lasts = rng.choice((0.02, 0.1, 0.4, 1.2, 2.5)) * (0.5 + rng.random())
    if rng.random() < 0.5:
        return ScheduleFault(
            kind=rng.choice(_KINDS),
            who=rng.randrange(8),
            other=rng.randrange(1, 8),
            lasts=lasts,
            at=0.05 + span_s * rng.random() ** 0.7 * 1.3,
        )
    itself = rng.random() < 0.6
    kind = rng.choice(("crash", "crash", "crash", "pause")) if itself else rng.choice(_KINDS)
    return ScheduleFault(
        kind=kind,
        who=-1 if itself else rng.randrange(8),
        other=rng.randrange(1, 8),
        lasts=lasts,
        point=rng.choice(_POINTS),
        nth=rng.choice((1, 1, 2, 3, rng.randint(4, 12))),
    )
