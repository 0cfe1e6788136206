"""Who computed which microbatch to which fingerprint: the draw of audits, and what claims that differ come to.

Pure, and the same on every member: an audit is drawn from the fingerprints that all members have committed to, so
nobody can know it while computing (protocol, 25); a dispute is decided by counting replicas, never by trusting one.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from outlast.core.protocol.tree import Node

__all__ = [
    "Certificate", "Claim", "Commitment", "Evidence", "AuditFinding", "Incident", "Said", "Stand", "claims_in",
    "committed", "disputed", "draw", "draw_key", "findings_of", "leaf_name", "leaves_in", "place", "to_ask",
    "truth_of", "void",
]  # fmt: skip


class Claim(msgspec.Struct, frozen=True, array_like=True, order=True):
    """`member` computed microbatch `leaf` for the `attempt`-th time in this step: its gradient's fingerprint."""

    leaf: int
    member: str
    attempt: int
    print: int


Incident = tuple[int, str]
"""(step, who): something computed wrongly and silently; audits and guards that see the same count it once."""

Row = tuple[int, int, int]
"""A claim of mine: leaf, attempt, print."""

Commitment = bytes
"""`Row`s of one member, packed: all members read all of them in every step, and almost always only hash them."""

Said = dict[str, Commitment]
"""What every member committed to in a step, in view order."""

_ROW = struct.Struct("<3Q")


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A header's part. `claims`: what I computed beside my share. `said`: digest of what everybody told me since my
    last header (what they committed to, and their last headers): who tells different things to different members is
    seen by it (26). `unlike`: members whose sums, as I read them, are not what they said they sent. `false`: (bucket,
    reducer, what I compute) of slices that were reduced to something else. `incidents` (that the state does not know
    yet) and `step_s` (what a step takes): where the share follows from them."""

    claims: tuple[Claim, ...] = ()
    said: int = 0
    unlike: tuple[str, ...] = ()
    false: tuple[tuple[int, str, int], ...] = ()
    incidents: tuple[Incident, ...] = ()
    step_s: float = 0.0


class Stand(msgspec.Struct, frozen=True, kw_only=True):
    """A roll entry's part: where I run, the claims that I know of about disputed microbatches of this step, and whose
    sums of it were found changed: who is meant may have left the view before it heard so."""

    host: str = ""
    device: str = ""
    claims: tuple[Claim, ...] = ()
    unlike: tuple[str, ...] = ()


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found out about one microbatch. `agreeing` of `asked` replicas got the fingerprint that counts.

    transient: it computed the right thing when asked again. persistent: it did not. gone: it could not be asked
    again. undecided: no majority, and the run stops. rewound: no majority, and the last certified state is gone back
    to. equivocal: it told members different things. memory: its sums were not what it sent.
    """

    step: int
    leaf: int
    culprit: str
    kind: Literal["transient", "persistent", "gone", "undecided", "rewound", "equivocal", "memory"]
    agreeing: int
    asked: int
    host: str = ""
    device: str = ""
    bucket: int = -1  # if it is about a slice that was reduced
    ranks: int = 1  # of a replica: what `leaf` counts are so many microbatches


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The state after `step` steps is finite, agreed by all members, and each step to it passed its audits. A single
    wrong gradient on the way was seen with probability `share`. `audited`: microbatches computed twice so far."""

    step: int = 0
    share: float = 0.0
    audited: int = 0


def leaf_name(leaf: int, ranks: int) -> str:
    """What the ranks of a replica compute at a time, in words."""
    return f"microbatch {leaf}" if ranks == 1 else f"microbatches {leaf * ranks} to {(leaf + 1) * ranks - 1}"


# --- the draw --------------------------------------------------------------------------------------------------------
def committed(rows: Iterable[Row]) -> Commitment:
    """A member's word on these microbatches."""
    return b"".join(_ROW.pack(*row) for row in rows)


def _rows(said: Commitment) -> Iterator[Row]:
    """What lacks its end counts for nothing, with everybody who heard it alike."""
    return _ROW.iter_unpack(said[: len(said) // _ROW.size * _ROW.size])


def claims_in(said: Mapping[str, Commitment]) -> Iterator[Claim]:
    """All that was committed to, as claims of who said it."""
    return (Claim(leaf, name, attempt, value) for name, rows in said.items() for leaf, attempt, value in _rows(rows))


def leaves_in(said: Iterable[Commitment]) -> list[int]:
    """The microbatches that were committed to, as often as they were."""
    return [leaf for rows in said for leaf, _, _ in _rows(rows)]


def draw_key(seed: int, step: int, said: Iterable[Commitment]) -> int:
    """Known only when every member has committed to its fingerprints; the same whoever computed which leaf."""
    return _mix(seed, step, sorted((leaf, value) for rows in said for leaf, _, value in _rows(rows)))


def _mix(key: int, *what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr((key, *what)).encode(), digest_size=8).digest(), "big")


def draw(
    leaves: Mapping[str, Sequence[int]], hosts: Mapping[str, str], share: float, key: int
) -> dict[str, tuple[int, ...]]:
    """Second -> microbatches of others that it computes, of this step.

    Every owner has floor(share x its leaves + u) of its leaves audited, with one u in [0, 1) for all: the expected
    share is exact, and members owe as much as each other in every step, so an audit costs its share and no more.
    A second is on another host where there is one; ties go to who owes least, then by the key. O(audits x members).
    """
    members, share, u = list(leaves), min(share, 1.0), key / 2.0**64
    if len(members) < 2 or share <= 0.0 or share * max(map(len, leaves.values())) + u < 1.0:  # as in most steps
        return dict.fromkeys(members, ())
    counts = {owner: int(share * len(mine) + u) for owner, mine in leaves.items()}
    owed: dict[str, list[int]] = {name: [] for name in members}
    chosen: list[tuple[int, int, str]] = []
    for owner, mine in leaves.items():
        if count := counts[owner]:
            chosen += [(*row, owner) for row in sorted((_mix(key, leaf), leaf) for leaf in mine)[:count]]
    for _, leaf, owner in sorted(chosen):
        far = [m for m in members if hosts.get(m, "") != hosts.get(owner, "")] or [m for m in members if m != owner]
        least = min(len(owed[name]) for name in far)
        second = min((name for name in far if len(owed[name]) == least), key=lambda name: _mix(key, leaf, name))
        owed[second].append(leaf)
    return {name: tuple(sorted(mine)) for name, mine in owed.items()}


# --- disputes --------------------------------------------------------------------------------------------------------
def disputed(claims: Iterable[Claim]) -> dict[int, list[Claim]]:
    """The microbatches on which claims differ, with all claims about them in order."""
    claims = set(claims)
    if len({claim.leaf for claim in claims}) == len(claims):  # as in almost every step
        return {}
    cases: dict[int, list[Claim]] = defaultdict(list)
    for claim in sorted(claims):
        cases[claim.leaf].append(claim)
    return {leaf: rows for leaf, rows in cases.items() if len({row.print for row in rows}) > 1}


def _latest(case: Iterable[Claim]) -> dict[str, int]:
    return {claim.member: claim.print for claim in sorted(case)}


def truth_of(case: Sequence[Claim]) -> int | None:
    """The fingerprint that counts: the last word of more than half of the replicas that computed it; else what the
    only replicas that repeated themselves say, if every other one contradicted itself. None: it cannot be told."""
    last = _latest(case)
    (value, votes), *_ = Counter(last.values()).most_common()
    if votes > 1 and 2 * votes > len(last):
        return value
    tries = Counter(claim.member for claim in case)
    fickle = {name for name in last if len({c.print for c in case if c.member == name}) > 1}
    steady = {value for name, value in last.items() if tries[name] > 1 and name not in fickle}
    known = all(name in fickle or last[name] in steady for name in last)
    return next(iter(steady)) if len(steady) == 1 and known else None


def to_ask(case: Sequence[Claim], members: Sequence[str], hosts: Mapping[str, str]) -> tuple[str, ...]:
    """Who of the view computes the microbatch (again): once the truth is known, those who said otherwise and were
    asked once; before, everybody who was asked once, and others until three replicas have spoken, then one by one."""
    truth, last = truth_of(case), _latest(case)
    tries = Counter(claim.member for claim in case)
    if truth is not None:
        return tuple(name for name in members if tries[name] == 1 and last[name] != truth)
    again = [name for name in members if tries[name] == 1]
    taken = {hosts.get(name, "") for name in last}
    fresh = sorted((name for name in members if name not in last), key=lambda n: hosts.get(n, "") in taken)
    return (*again, *fresh[: max(3 - len(last), 0 if again else 1)])


def void(node: Node, member: str, cases: Mapping[int, Sequence[Claim]]) -> bool:
    """Whether a partial sum counts for nothing: a microbatch in it is disputed, and its holder's last word on that is
    not known to be the truth."""
    for leaf in cases:
        if node[0] <= leaf < node[1]:
            truth = truth_of(cases[leaf])
            if truth is None or _latest(cases[leaf]).get(member) != truth:
                return True
    return False


def place(orphans: Mapping[str, tuple[int, ...]], cases: Mapping[int, Sequence[Claim]]) -> dict[str, tuple[int, ...]]:
    """The same orphans, a disputed one with a replica that has not spoken on it, where there is one: what a party to
    the dispute contributes may be wrong again."""
    given = {name: list(mine) for name, mine in orphans.items()}
    for leaf, case in cases.items():
        spoke = {claim.member for claim in case}
        owner = next((name for name, mine in given.items() if leaf in mine), None)
        fresh = [name for name in given if name not in spoke]
        if owner is None or owner not in spoke or not fresh:
            continue
        other = min(fresh, key=lambda name: (len(given[name]), name))
        swap = next((mine for mine in given[other] if mine not in cases), None)
        given[owner].remove(leaf)
        given[other].append(leaf)
        if swap is not None and len(given[other]) > len(given[owner]) + 1:
            given[other].remove(swap)
            given[owner].append(swap)
    return {name: tuple(sorted(mine)) for name, mine in given.items()}


def findings_of(step: int, leaf: int, case: Sequence[Claim]) -> tuple[AuditFinding, ...]:
    """One record a culprit, once nobody is left to be asked."""
    truth, last = truth_of(case), _latest(case)
    votes = sum(value == truth for value in last.values())
    if truth is None:
        best = Counter(last.values()).most_common(1)[0][1]
        names = ", ".join(sorted(last))
        return (AuditFinding(step=step, leaf=leaf, culprit=names, kind="undecided", agreeing=best, asked=len(last)),)
    tries = Counter(claim.member for claim in case)
    out = []
    for name in sorted({claim.member for claim in case if claim.print != truth}):
        kind: Literal["transient", "persistent", "gone"] = "gone"
        if last[name] == truth:
            kind = "transient"
        elif tries[name] > 1:
            kind = "persistent"
        out.append(AuditFinding(step=step, leaf=leaf, culprit=name, kind=kind, agreeing=votes, asked=len(last)))
    return tuple(out)
