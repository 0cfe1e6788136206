"""Which losses a placement of copies or parity survives: exact counts of loss patterns, domains included.

A placement is a set of stripes over machines 0..n-1; a stripe tolerates some number of lost machines among its own.
GEMINI's mixed and ring placements of copies, Reed-Solomon groups (k, m) and rotated parity are all of this kind.
Invariant: `survival` is a ratio of exact counts; beyond the enumeration limit only `survival_sampled` answers, with
its interval. Source: Wang et al., GEMINI, SOSP'23, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from outlast.errors import ConfigError

from .check import count

__all__ = [
    "Placement", "copies_mixed", "copies_ring", "copies_survival", "parity_rotated", "parity_survival", "reed_solomon",
    "survival", "survival_sampled",
]  # fmt: skip

_ENUMERATION_LIMIT = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """`stripes[i]`: the machines of stripe i; it is lost when more than `tolerates` of them are."""

    name: str
    num_machines: int
    stripes: tuple[tuple[int, ...], ...]
    tolerates: int
    bytes_ratio: float  # bytes stored over bytes of state


def copies_mixed(num_machines: int, copies: int) -> Placement:
    """GEMINI's mixed placement: groups of `copies` machines hold each other; the last, larger group is a ring."""
    n, m = count("num_machines", num_machines, 2), count("copies", copies, 2, num_machines)
    full = n // m if n % m == 0 else n // m - 1
    stripes = [tuple(range(g * m, (g + 1) * m)) for g in range(full)]
    rest = list(range(full * m, n))
    stripes += [tuple(rest[(i + s) % len(rest)] for s in range(m)) for i in range(len(rest))]
    return Placement(name="mixed", num_machines=n, stripes=tuple(stripes), tolerates=m - 1, bytes_ratio=float(m))


def copies_ring(num_machines: int, copies: int) -> Placement:
    """Each machine's state lies on itself and on the next `copies` - 1 around the ring."""
    n, m = count("num_machines", num_machines, 2), count("copies", copies, 2, num_machines)
    stripes = tuple(tuple((i + s) % n for s in range(m)) for i in range(n))
    return Placement(name="ring", num_machines=n, stripes=stripes, tolerates=m - 1, bytes_ratio=float(m))


def reed_solomon(num_machines: int, data: int, parity: int) -> Placement:
    """Groups of data + parity machines; each survives the loss of any `parity`; they must fill the machines."""
    width = count("data", data, 1) + count("parity", parity, 1)
    if num_machines % width:
        raise ConfigError(
            f"{num_machines} machines are not groups of {width}", remedy=f"use a multiple of {width} machines"
        )
    stripes = tuple(tuple(range(g, g + width)) for g in range(0, num_machines, width))
    return Placement(
        name=f"rs({data},{parity})",
        num_machines=num_machines,
        stripes=stripes,
        tolerates=parity,
        bytes_ratio=width / data,
    )


def parity_rotated(num_machines: int, data: int, parity: int) -> Placement:
    """Stripes of data + parity consecutive machines, one starting at each machine: parity spread evenly."""
    width = count("data", data, 1) + count("parity", parity, 1)
    count("data + parity", width, 2, num_machines)
    starts = range(num_machines) if width < num_machines else range(1)
    stripes = tuple(tuple((i + s) % num_machines for s in range(width)) for i in starts)
    name = f"rotated({data},{parity})"
    return Placement(name=name, num_machines=num_machines, stripes=stripes, tolerates=parity, bytes_ratio=width / data)


def _units(placement: Placement, domains: Sequence[int] | None) -> list[list[int]]:
    if domains is None:
        return [[i] for i in range(placement.num_machines)]
    if len(domains) != placement.num_machines:
        raise ConfigError(
            "one failure domain per machine is needed", remedy=f"give {placement.num_machines} domain numbers"
        )
    found: dict[int, list[int]] = {}
    for machine, domain in enumerate(domains):
        found.setdefault(domain, []).append(machine)
    return list(found.values())


def _weights(placement: Placement, units: list[list[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[stripe, unit]: machines of the stripe that the unit's loss takes."""
    table = np.zeros((len(placement.stripes), len(units)), dtype=np.int64)
    home = {machine: u for u, unit in enumerate(units) for machine in unit}
    for row, stripe in enumerate(placement.stripes):
        for machine in stripe:
            table[row, home[machine]] += 1
    return table


def _components(table: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> list[tuple[list[int], list[int]]]:
    """Independent blocks (stripes, units): the loss pattern of one says nothing of another's."""
    touched = [np.flatnonzero(row) for row in table]
    parent = list(range(table.shape[1]))

    def root(u: int) -> int:
        while parent[u] != u:
            parent[u] = parent[parent[u]]
            u = parent[u]
        return u

    for units in touched:
        for u in units[1:]:
            parent[root(int(u))] = root(int(units[0]))
    blocks: dict[int, tuple[list[int], list[int]]] = {}
    for u in range(table.shape[1]):
        blocks.setdefault(root(u), ([], []))[1].append(u)
    for row, units in enumerate(touched):
        blocks[root(int(units[0]))][0].append(row)
    return list(blocks.values())


def _block_counts(rows: np.ndarray[tuple[int, int], np.dtype[np.int64]], tolerates: int, most: int) -> list[int]:
    """Surviving subsets of a block's units by size 0..most: a depth-first walk that drops a lost branch at once."""
    num = rows.shape[1]
    found = [0] * (min(most, num) + 1)
    visited = 0
    stack: list[tuple[int, int, np.ndarray[tuple[int], np.dtype[np.int64]]]] = [
        (0, 0, np.zeros(len(rows), dtype=np.int64))
    ]
    while stack:
        first, size, lost = stack.pop()
        found[size] += 1
        visited += 1
        if visited > _ENUMERATION_LIMIT:
            raise ConfigError("too many loss patterns to count exactly", remedy="use survival_sampled, or fewer losses")
        if size < most:
            for u in range(first, num):
                after = lost + rows[:, u]
                if not (after > tolerates).any():
                    stack.append((u + 1, size + 1, after))
    return found


def survival(placement: Placement, losses: int, domains: Sequence[int] | None = None) -> float:
    """P(all state survives) when `losses` distinct machines, or whole `domains` (one number per machine), are lost.

    Exact: surviving patterns over all patterns; independent groups are counted once and multiplied as polynomials.
    """
    units = _units(placement, domains)
    count("losses", losses, 0, len(units))
    table = _weights(placement, units)
    total, known = [1], {}
    for stripes, members in _components(table):
        rows = table[np.ix_(stripes, members)]
        key = (rows.shape, rows.tobytes())
        if key not in known:
            known[key] = _block_counts(rows, placement.tolerates, losses)
        total = _multiply(total, known[key], losses)
    return _at(total, losses) / comb(len(units), losses)


def _multiply(a: list[int], b: list[int], most: int) -> list[int]:
    out = [0] * min(len(a) + len(b) - 1, most + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            if i + j <= most:
                out[i + j] += x * y
    return out


def copies_survival(num_machines: int, copies: int, losses: int, *, ring: bool = False) -> float:
    """P(all state survives) of `copies_mixed` (or `copies_ring`) when `losses` of any number of machines are lost.

    Exact, as `survival` is, from counts in closed form instead of an enumeration.
    """
    n, m = count("num_machines", num_machines, 2), count("copies", copies, 2, num_machines)
    k = count("losses", losses, 0, n)
    groups = 0 if ring else n // m if n % m == 0 else n // m - 1
    alive = _power([comb(m, j) for j in range(m)], groups, k)
    if rest := n - groups * m:
        alive = _multiply(alive, _ring_counts(rest, m, k), k)
    return _at(alive, k) / comb(n, k)


def parity_survival(num_machines: int, data: int, parity: int, losses: int) -> float:
    """P(all state survives) of groups of data + parity machines when `losses` machines are lost, on any number of them.

    Exact. Where the groups do not fill the machines the last one is larger, and its parity rotates.
    """
    width = count("data", data, 1) + count("parity", parity, 1)
    n = count("num_machines", num_machines, width)
    k = count("losses", losses, 0, n)
    groups = n // width if n % width == 0 else n // width - 1
    alive = _power([comb(width, j) for j in range(parity + 1)], groups, k)
    if rest := n - groups * width:
        last = parity_rotated(rest, data, parity)
        table = _weights(last, _units(last, None))
        alive = _multiply(alive, _block_counts(table, parity, min(k, rest)), k)
    return _at(alive, k) / comb(n, k)


def _ring_counts(num: int, copies: int, most: int) -> list[int]:
    """Subsets by size, 0..most, of a ring of machines without `copies` neighbours in a row.

    Each of the num - k that live is followed by a run of at most copies - 1 that are lost: num / (num - k) times the
    coefficient of x^k in (1 + x + ... + x^(copies - 1))^(num - k).
    """
    run = [1] * copies
    return [num * _at(_power(run, num - k, k), k) // (num - k) for k in range(min(most, num - 1) + 1)]


def _power(counts: list[int], times: int, most: int) -> list[int]:
    """The polynomial to a power, up to x^most, by squaring."""
    out, base = [1], counts[: most + 1]
    while times:
        if times & 1:
            out = _multiply(out, base, most)
        times >>= 1
        base = _multiply(base, base, most) if times else base
    return out


def _at(counts: list[int], k: int) -> int:
    return counts[k] if k < len(counts) else 0


def survival_sampled(
    placement: Placement,
    losses: int,
    rng: np.random.Generator,
    samples: int = 20_000,
    domains: Sequence[int] | None = None,
) -> tuple[float, float, float]:
    """Monte Carlo estimate with its 95 % Wilson interval: (share, low, high)."""
    units = _units(placement, domains)
    count("losses", losses, 0, len(units))
    table = _weights(placement, units)
    kept = sum(
        not (table[:, rng.choice(len(units), losses, replace=False)].sum(axis=1) > placement.tolerates).any()
        for _ in range(samples)
    )
    share, z2 = kept / samples, 1.959963985**2
    middle = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = np.sqrt(z2 * (share * (1 - share) / samples + z2 / (4 * samples**2))) / (1 + z2 / samples)
    return share, float(middle - half), float(middle + half)


def brute_force(placement: Placement, losses: int) -> float:
    """The definition, by enumeration: for tests and small cases."""
    patterns = list(combinations(range(placement.num_machines), losses))
    alive = sum(all(len(set(lost) & set(s)) <= placement.tolerates for s in placement.stripes) for lost in patterns)
    return alive / len(patterns)
