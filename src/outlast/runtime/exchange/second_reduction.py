"""Is what a member reduced what the sums give? A second member reduces a drawn share of the slices once more (25).

The mean's counterpart of a rule's checked reducers: after the gather a member that is not the reducer computes the
slice again from the same sums; over a network, where it has none of others', it asks for them first (`c10d_plane.py`).
A difference holds the step: then everybody computes the slice, reducer and checker for the second time, which tells a
transient fault from a lasting one, and who was wrong by counting replicas. The view is left; sums survive, so the step
is done again at the price of the exchange. Which slices are checked is drawn by the checker alone, after they were
reduced: a reducer cannot know.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from outlast.core.phases import Phase
from outlast.core.position import position_seed
from outlast.core.protocol import Claim, Finding, Header
from outlast.core.protocol.disputes import findings_of
from outlast.errors import ViewAbandoned
from outlast.runtime.view.port import ViewPort
from outlast.runtime.view.rounds import SLICES, Words

__all__ = ["Checks", "checker_of", "settle", "settled"]

_MOST = 64  # slices looked at in one dispute; the others are checked again when the step is
Slice = tuple[int, str]  # bucket, reducer


class SliceWitness(Protocol):
    """A plane that can reduce others' slices once more."""

    def look_again(self, slices: Sequence[Slice]) -> Words:
        """Fingerprints of these slices: as I gathered them, and as I compute them now."""


class Checks:
    """What this replica checks. `share()`: of all slices, now; `always`: spans of elements of a bucket that are checked
    in every step."""

    def __init__(self, share: Callable[[], float], seed: int) -> None:
        self.share, self.seed = share, seed
        self.always: dict[int, list[tuple[int, int]]] = {}
        self.num_checked = 0
        self._draw = random.Random()  # seeded by the system: nobody else can know it

    @property
    def active(self) -> bool:
        """Whether anybody may check anything in this step: the same on all members."""
        return bool(self.share() or self.always)

    def due(self, step: int, ranges: Sequence[Sequence[tuple[int, int]]], me: int) -> Iterator[tuple[int, int]]:
        """(bucket, index of its reducer) of the slices that are mine to check in this step."""
        share, num_members = self.share(), len(ranges[0]) if ranges else 0
        if (not share and not self.always) or num_members < 2:
            return
        turn = _turn(self.seed, step, num_members)
        for bucket, slices in enumerate(ranges):
            reducer = (me - 1 - (turn + bucket) % (num_members - 1)) % num_members
            lo, hi = slices[reducer]
            if hi == lo:
                continue
            watched = any(lo < end and start < hi for start, end in self.always.get(bucket, ()))
            if watched or self._draw.random() < share:
                self.num_checked += 1
                yield bucket, reducer


def checker_of(seed: int, step: int, bucket: int, reducer: int, num_members: int) -> int:
    """The member that would check this slice: anyone but who reduced it, each one slice of a bucket; nobody (-1) where
    there is no other."""
    if num_members < 2:
        return -1
    return (reducer + 1 + (_turn(seed, step, num_members) + bucket) % (num_members - 1)) % num_members


def _turn(seed: int, step: int, num_members: int) -> int:
    """Where the step begins: one bucket on, a slice's checker is the next member."""
    return position_seed(seed, step, 0xC4EC) if num_members > 2 else 0


def settle(port: ViewPort, plane: SliceWitness, headers: Sequence[Header]) -> None:
    """All headers are there. Raises ViewAbandoned, on every member alike, if somebody found a slice to be false."""
    accused = sorted({(bucket, reducer) for h in headers for bucket, reducer, _ in h.audit.false})[:_MOST]
    if not accused:
        return
    step = headers[0].step
    said = port.on(SLICES, step, plane.look_again(accused), Phase.HEADER)
    findings = [found for key in accused for found in settled(step, key, headers, said)]
    with port.lock:
        port.member.audits.hold(findings)
    what = ", ".join(f"bucket {bucket} by {reducer}" for bucket, reducer in accused)
    names = ", ".join(dict.fromkeys(found.culprit for found in findings))
    raise ViewAbandoned(f"audit: what was reduced in step {step} is not what the sums give ({what}): {names}")


def settled(step: int, key: Slice, headers: Sequence[Header], said: Mapping[str, Words]) -> list[Finding]:
    """Who was wrong about one slice: the same on all members, from what all have said."""
    bucket, reducer = key
    case: list[Claim] = []
    for header in headers:
        name = header.member
        first = [said[name][key][0]] if name == reducer else []
        first += [value for b, r, value in header.audit.false if (b, r) == key]
        tries = [*first[:1], said[name][key][1]]
        case += [Claim(leaf=-1, member=name, attempt=i, print=value) for i, value in enumerate(tries, 1)]
    if len({claim.print for claim in case}) > 1:
        rows = findings_of(step, -1, case)
    else:  # everybody computes what the reducer wrote: the accuser gathered something else
        who = [h.member for h in headers if any((b, r) == key for b, r, _ in h.audit.false)]
        rows = tuple(
            Finding(step=step, leaf=-1, culprit=name, kind="memory", agreeing=len(headers) - 1, asked=len(headers))
            for name in who
        )
    return [msgspec.structs.replace(found, bucket=bucket) for found in rows]
