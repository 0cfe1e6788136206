"""Slices of a reduced gradient: who checks whose, and who was wrong where a checker computes something else.

Pure, and the same on every member (protocol, 25). Reduced again are slices by `runtime/exchange/second_reduction.py`,
and by the adversary's members in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from outlast.core.position import position_seed
from outlast.core.protocol.disputes import AuditFinding, Claim, findings_of
from outlast.core.protocol.types import Header

__all__ = [
    "Slice",
    "Words",
    "accused_slices",
    "bucket_name",
    "checked_by",
    "checker_of",
    "in_lane",
    "lane_and_bucket",
    "settled",
]

_MOST = 64  # slices looked at in one dispute; the others are checked again when the step is
Slice = tuple[int, str]
"""Bucket and reducer."""
Words = dict[Slice, tuple[int, int]]
"""Two fingerprints of each slice: as it was gathered, and as it is computed now."""


_LANE = 1 << 20  # above any number of buckets


def in_lane(place: int, bucket: int) -> int:
    """The number that a bucket of rank `place` of each replica has between replicas."""
    return place * _LANE + bucket


def lane_and_bucket(number: int) -> tuple[int, int]:
    """(rank of each replica, bucket there) of such a number."""
    return divmod(number, _LANE)


def bucket_name(number: int) -> str:
    """Such a number in words."""
    place, bucket = lane_and_bucket(number)
    return f"{bucket} of rank {place}" if place else str(bucket)


def checker_of(seed: int, step: int, bucket: int, reducer: int, num_members: int) -> int:
    """The member that would check this slice: anyone but who reduced it, each one slice of a bucket; nobody (-1) where
    there is no other."""
    if num_members < 2:
        return -1
    return (reducer + 1 + (_turn(seed, step, num_members) + bucket) % (num_members - 1)) % num_members


def checked_by(seed: int, step: int, bucket: int, checker: int, num_members: int) -> int:
    """The inverse of `checker_of`: the reducer whose slice of the bucket this member would check."""
    return (checker - 1 - (_turn(seed, step, num_members) + bucket) % (num_members - 1)) % num_members


def _turn(seed: int, step: int, num_members: int) -> int:
    """Where the step begins: one bucket on, a slice's checker is the next member."""
    return position_seed(seed, step, 0xC4EC) if num_members > 2 else 0


def accused_slices(headers: Sequence[Header]) -> list[Slice]:
    """The slices that somebody found to be false, in an order that all share."""
    return sorted({(bucket, reducer) for h in headers for bucket, reducer, _ in h.audit.false})[:_MOST]


def settled(step: int, key: Slice, headers: Sequence[Header], said: Mapping[str, Words]) -> list[AuditFinding]:
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
            AuditFinding(step=step, leaf=-1, culprit=name, kind="memory", agreeing=len(headers) - 1, asked=len(headers))
            for name in who
        )
    return [msgspec.structs.replace(found, bucket=bucket) for found in rows]
