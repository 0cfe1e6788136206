"""Who owns which rows of a robust rule: the arithmetic of shares and orphans when rows must not be shared.

A row is a fixed range of microbatches (`tree.roots`). Whoever computes any of it can spoil all of it, so work is dealt
by whole rows: what a member can spoil is then as little as the number of members allows (protocol, 23). Pure, and the
same on every member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from outlast.core.protocol.tree import roots, shares

__all__ = ["RowsNote", "deal_orphans", "owners_of", "row_shares", "rows_spoilt", "rows_touched"]


class RowsNote(msgspec.Struct, frozen=True, kw_only=True):
    """A member's part of the header where a rule is active.

    `bad`: (group of parameters, row) that is not finite in one of my slices. `accused`: (bucket, member) whose reduced
    slice is not what I get from the same rows.
    """

    bad: tuple[tuple[int, int], ...] = ()
    accused: tuple[tuple[int, str], ...] = ()


def row_shares(num_members: int, num_leaves: int, num_rows: int) -> tuple[tuple[int, int], ...]:
    """One range of microbatches a member: whole rows, as even as they go; with fewer rows than members, part of one
    row each, so that nobody can spoil two.

    With one row (a mean) exactly `shares`.
    """
    ranges = roots(num_leaves, num_rows)
    if num_members <= num_rows:
        return tuple((ranges[lo][0], ranges[hi - 1][1]) for lo, hi in shares(num_members, num_rows))
    sizes, of_row = [hi - lo for lo, hi in ranges], [1] * num_rows
    for _ in range(num_members - num_rows):
        of_row[max(range(num_rows), key=lambda row: sizes[row] / of_row[row])] += 1
    parts = [shares(members, size) for members, size in zip(of_row, sizes, strict=True)]
    return tuple((lo + at, lo + to) for (lo, _), part in zip(ranges, parts, strict=True) for at, to in part)


def deal_orphans(
    kept: Mapping[str, Collection[int]], members: Sequence[str], lost: Sequence[int], num_leaves: int, num_rows: int
) -> dict[str, tuple[int, ...]]:
    """Lost microbatches to members, by whole rows: to who holds the rest of the row, else to who touches fewest rows,
    then has the fewest microbatches, then comes first."""
    touched = {m: set(rows_touched(kept.get(m, ()), num_leaves, num_rows)) for m in members}
    work = {m: len(kept.get(m, ())) for m in members}
    out: dict[str, list[int]] = {m: [] for m in members}
    for row, (lo, hi) in enumerate(roots(num_leaves, num_rows)):
        missing = [leaf for leaf in lost if lo <= leaf < hi]
        if missing:
            taker = min(members, key=lambda m: (row not in touched[m], len(touched[m]), work[m], members.index(m)))
            touched[taker].add(row)
            work[taker] += len(missing)
            out[taker] += missing
    return {m: tuple(leaves) for m, leaves in out.items()}


def rows_touched(leaves: Collection[int], num_leaves: int, num_rows: int) -> list[int]:
    """Rows of which any microbatch is among `leaves`."""
    ranges = roots(num_leaves, num_rows)
    return [row for row, (lo, hi) in enumerate(ranges) if any(lo <= leaf < hi for leaf in leaves)]


def owners_of(rows: Collection[int], leaves: Mapping[str, Sequence[int]], num_leaves: int, num_rows: int) -> list[str]:
    """Members that computed any part of one of these rows."""
    return [m for m, own in leaves.items() if not set(rows).isdisjoint(rows_touched(own, num_leaves, num_rows))]


def rows_spoilt(
    hosts: Mapping[str, str], plans: Sequence[Mapping[str, Sequence[int]]], num_leaves: int, num_rows: int
) -> dict[str, int]:
    """Rows that each host can spoil, in the worse of the plans; `hosts`: where members are, each for itself if not
    said."""
    worst: dict[str, int] = {}
    for leaves in plans:
        of_host: dict[str, set[int]] = {}
        for name, own in leaves.items():
            of_host.setdefault(hosts.get(name, name), set()).update(rows_touched(own, num_leaves, num_rows))
        for host, rows in of_host.items():
            worst[host] = max(worst.get(host, 0), len(rows))
    return worst
