"""Who owns which rows of a robust rule: the arithmetic of shares and orphans when rows must not be shared.

A row is a fixed range of microbatches (`tree.roots`). Whoever computes any of it can spoil all of it, so work is dealt
by whole rows: what a member can spoil is then as little as the number of members allows (protocol, 23). Pure, and the
same on every member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from outlast.core.protocol.tree import Node, roots, shares

__all__ = ["RowsNote", "deal_orphans", "host_shares", "owners_of", "row_shares", "rows_spoilt", "rows_touched"]


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
    return _dealt(num_members, roots(num_leaves, num_rows))


def _dealt(num_members: int, rows: Sequence[Node]) -> tuple[tuple[int, int], ...]:
    """One range a member of these rows, which lie side by side."""
    if num_members <= len(rows):
        return tuple((rows[lo][0], rows[hi - 1][1]) for lo, hi in shares(num_members, len(rows)))
    of_row = _spread(num_members, [hi - lo for lo, hi in rows])
    parts = [shares(members, hi - lo) for members, (lo, hi) in zip(of_row, rows, strict=True)]
    return tuple((lo + at, lo + to) for (lo, _), part in zip(rows, parts, strict=True) for at, to in part)


def _spread(number: int, sizes: Sequence[int]) -> list[int]:
    """How many of `number` each row gets, at least one, by how large it is."""
    out = [1] * len(sizes)
    for _ in range(number - len(sizes)):
        out[max(range(len(sizes)), key=lambda row: sizes[row] / out[row])] += 1
    return out


def host_shares(places: Sequence[str], num_leaves: int, num_rows: int) -> tuple[tuple[int, int], ...]:
    """The same where rows count by host; `places`: where each member is. Each host gets whole rows, as even as they go,
    and who has more members one more; with fewer rows than hosts, each a part of one row. So no host can spoil more
    than its even share of them, wherever members are; with hosts unlike in members, some of these compute more.
    """
    of_host: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        of_host.setdefault(place, []).append(index)
    hosts, rows = list(of_host.values()), roots(num_leaves, num_rows)
    out = [(0, 0)] * len(places)
    for members, own in _whole_rows(hosts, rows) if len(hosts) <= num_rows else _parts_of_rows(hosts, rows):
        for index, part in zip(members, _dealt(len(members), own), strict=True):
            out[index] = part
    return tuple(out)


def _whole_rows(hosts: Sequence[list[int]], rows: Sequence[Node]) -> Iterator[tuple[list[int], Sequence[Node]]]:
    """(members of a host, its rows)."""
    sizes = sorted((hi - lo for lo, hi in shares(len(hosts), len(rows))), reverse=True)
    fullest = sorted(range(len(hosts)), key=lambda host: -len(hosts[host]))
    num_of = dict(zip(fullest, sizes, strict=True))
    at = 0
    for host, members in enumerate(hosts):
        yield members, rows[at : at + num_of[host]]
        at += num_of[host]


def _parts_of_rows(hosts: Sequence[list[int]], rows: Sequence[Node]) -> Iterator[tuple[list[int], Sequence[Node]]]:
    """(members of the hosts that share a row, that row)."""
    at = 0
    for row, number in zip(rows, _spread(len(hosts), [hi - lo for lo, hi in rows]), strict=True):
        yield [index for host in hosts[at : at + number] for index in host], [row]
        at += number


def deal_orphans(
    kept: Mapping[str, Collection[int]],
    members: Sequence[str],
    lost: Sequence[int],
    num_leaves: int,
    num_rows: int,
    hosts: Mapping[str, str] = {},
) -> dict[str, tuple[int, ...]]:
    """Lost microbatches to members, by whole rows: to who holds the rest of the row, else to who touches fewest rows,
    then has the fewest microbatches, then comes first. `hosts`: as of `rows_spoilt`; a host's touch rows together."""
    of_host: dict[str, set[int]] = {}
    for m in members:
        of_host.setdefault(hosts.get(m, m), set()).update(rows_touched(kept.get(m, ()), num_leaves, num_rows))
    touched = {m: of_host[hosts.get(m, m)] for m in members}
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
