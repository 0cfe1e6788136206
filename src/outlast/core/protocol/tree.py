"""The fixed reduction tree over microbatch index, and who owns which leaves.

A node is (lo, hi): the sum of microbatches lo..hi-1. Every node of more than one leaf splits after its largest power
of two of leaves (the split of RFC 6962), so aligned groups are subtrees whatever the number of microbatches, and the
sum has the same bits whoever adds. With `num_rows` above 1 the tree is a forest: the microbatches fall into that many
fixed ranges (the rows of a robust rule), each with a tree of its own, and no sum ever crosses from one to the next.
Nothing here knows tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

__all__ = [
    "Node", "combine", "cover", "leaves_of", "merges", "parent", "partials", "roots", "schedule", "shares", "split",
    "within",
]  # fmt: skip

Node = tuple[int, int]
_FEW = 1024  # nodes of a tiling whose additions are kept from step to step


def split(node: Node) -> tuple[Node, Node]:
    """The two children of a node of two or more leaves."""
    lo, hi = node
    middle = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return (lo, middle), (middle, hi)


@lru_cache(maxsize=1024)
def roots(num_leaves: int, num_rows: int = 1) -> tuple[Node, ...]:
    """The ranges of microbatches that are summed by themselves, in order: one for a mean, one a row for a rule."""
    return shares(num_rows, num_leaves)


@lru_cache(maxsize=65536)
def parent(node: Node, num_leaves: int, num_rows: int = 1) -> tuple[Node, Node] | None:
    """(parent, sibling) of a node in its tree over `num_leaves` leaves; None for a root. ValueError: not a node."""
    at = next(((lo, hi) for lo, hi in roots(num_leaves, num_rows) if lo <= node[0] < hi), node)
    if node == at:
        return None
    while at[1] - at[0] > 1:
        left, right = split(at)
        if node in (left, right):
            return at, right if node == left else left
        at = left if node[1] <= left[1] else right
    raise ValueError(f"{node} is not a node of the tree over {num_leaves} microbatches")


def merges(held: Collection[Node], leaf: int, num_leaves: int, num_rows: int = 1) -> list[tuple[Node, Node, Node]]:
    """The additions (left, right, parent) that a new leaf completes among the sums already held, in order."""
    out: list[tuple[Node, Node, Node]] = []
    node: Node = (leaf, leaf + 1)
    while (up := parent(node, num_leaves, num_rows)) is not None and up[1] in held:
        out.append((min(node, up[1]), max(node, up[1]), up[0]))
        node = up[0]
    return out


def partials(values: Mapping[int, float], num_leaves: int) -> tuple[tuple[int, int, float], ...]:
    """Sums of scalars over the fewest nodes that cover their leaves: what a member contributes to a tree of scalars."""
    out = []
    for node in cover(values, num_leaves):
        out.append((*node, combine([(i, i + 1, values[i]) for i in range(*node)], node)))
    return tuple(out)


def combine(parts: Iterable[tuple[int, int, float]], root: Node) -> float:
    """The root of a tree of scalars from any tiling of it: the same bits whoever summed what (protocol, 9)."""
    nodes: list[Node] = []
    values: list[float] = []
    for lo, hi, value in parts:
        nodes.append((lo, hi))
        values.append(value)
    known = _additions if len(nodes) <= _FEW else _additions.__wrapped__  # what is kept stays small
    additions, whole = known(tuple(nodes), root)
    for into, other in additions:
        values[into] += values[other]
    return values[whole]


@lru_cache(maxsize=128)
def _additions(tiling: tuple[Node, ...], root: Node) -> tuple[tuple[tuple[int, int], ...], int]:
    """(pairs of places in a tiling: the first becomes the sum of both, in this order; where the root is then)."""
    places = {node: place for place, node in enumerate(tiling)}
    additions: list[tuple[int, int]] = []

    def place(node: Node) -> int:
        if node in places:
            return places[node]
        left, right = split(node)
        into, other = place(left), place(right)
        additions.append((into, other))
        return into

    whole = place(root)
    return tuple(additions), whole


def leaves_of(nodes: Iterable[Node]) -> list[int]:
    """The microbatches under the nodes, in order."""
    return sorted(leaf for lo, hi in nodes for leaf in range(lo, hi))


def cover(leaves: Collection[int], num_leaves: int, num_rows: int = 1) -> tuple[Node, ...]:
    """The fewest nodes whose leaves are exactly `leaves`: what a member with these microbatches sends."""
    return _cover(tuple(sorted(leaves)), num_leaves, num_rows)


@lru_cache(maxsize=4096)
def _cover(have: tuple[int, ...], num_leaves: int, num_rows: int) -> tuple[Node, ...]:
    out: list[Node] = []
    stack: list[tuple[Node, int, int]] = []  # node, slice of `have` inside it
    for root in reversed(roots(num_leaves, num_rows)):
        stack.append((root, bisect_left(have, root[0]), bisect_left(have, root[1])))
    while stack:
        node, start, stop = stack.pop()
        if start == stop:
            continue
        if stop - start == node[1] - node[0]:
            out.append(node)
            continue
        left, right = split(node)
        cut = start
        while cut < stop and have[cut] < left[1]:
            cut += 1
        stack += [(right, cut, stop), (left, start, cut)]
    return tuple(out)


@lru_cache(maxsize=4096)
def schedule(nodes: tuple[Node, ...], num_leaves: int, num_rows: int = 1) -> tuple[tuple[Node, Node, Node], ...]:
    """The additions (left, right, parent) that lead from these nodes to the root(s), children before parents.

    ValueError if the nodes do not tile the tree: then some microbatch would count twice or never.
    """
    todo: list[tuple[Node, Node, Node]] = []
    have = set(nodes)
    stack: list[Node] = list(roots(num_leaves, num_rows))
    found = 0
    while stack:
        node = stack.pop()
        if node in have:
            found += 1
        elif node[1] - node[0] == 1:
            raise ValueError(f"microbatch {node[0]} is in no partial sum of {sorted(nodes)}")
        else:
            left, right = split(node)
            todo.append((left, right, node))
            stack += [left, right]
    if found != len(nodes):
        raise ValueError(f"partial sums overlap: {sorted(nodes)}")
    return tuple(reversed(todo))


def within(nodes: Collection[Node], root: Node) -> list[tuple[Node, Node, Node]]:
    """The additions (left, right, parent) that lead from these nodes to one sum over all of them, children first."""
    if root in nodes:
        return []
    left, right = split(root)
    return [*within(nodes, left), *within(nodes, right), (left, right, root)]


@lru_cache(maxsize=1024)
def shares(num_members: int, num_leaves: int) -> tuple[tuple[int, int], ...]:
    """One contiguous range of microbatches a member, in order: first the least compute, then the least bytes.

    The largest share is ceil(G/N) (compute decides); among the ways to place the larger shares, the one whose largest
    number of subtrees is least, because k subtrees cost (1+k)/2 of ring all-reduce's bytes. O(N · (G mod N)); beyond
    10,000 states the larger shares simply come first.
    """
    small, larger = divmod(num_leaves, num_members)
    if larger == 0 or num_members * larger > 10_000:
        sizes = [small + 1] * larger + [small] * (num_members - larger)
        return _ranges(sizes)
    # best[j]: (largest number of subtrees, total), after i members of which j took the larger share
    best: list[tuple[tuple[int, int], tuple[int, ...]] | None] = [((0, 0), ())] + [None] * larger
    for i in range(num_members):
        new: list[tuple[tuple[int, int], tuple[int, ...]] | None] = [None] * (larger + 1)
        for j, entry in enumerate(best):
            if entry is None:
                continue
            start = i * small + j
            for extra in (1, 0) if j < larger else (0,):
                k = len(cover(range(start, start + small + extra), num_leaves))
                cost = (max(entry[0][0], k), entry[0][1] + k)
                old = new[j + extra]
                if old is None or cost < old[0]:
                    new[j + extra] = (cost, (*entry[1], small + extra))
        best = new
    final = best[larger]
    assert final is not None
    return _ranges(final[1])


def _ranges(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    out, at = [], 0
    for size in sizes:
        out.append((at, at + size))
        at += size
    return tuple(out)
