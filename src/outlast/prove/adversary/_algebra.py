"""Gradients without numbers: an element is the exact expression that produced it, as a hash.

A leaf is (step, microbatch, block); a sum is the pair of its operands, so two elements are equal only if they were
built from the same leaves by the same tree. A gradient has `BUCKETS` buckets of `BLOCKS` blocks; a member's slice of a
bucket is a range of blocks that depends on the number of members, blocks never do (protocol, 8 and 9).
"""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

from outlast.core.protocol import Node, roots, split

__all__ = [
    "BLOCKS", "BUCKETS", "EMPTY", "INITIAL", "Gradient", "add", "apply", "chain", "garbage", "leaf", "norm_of",
    "outcome_of", "reduce_block", "slice_of",
]  # fmt: skip

BUCKETS, BLOCKS = 2, 4
INITIAL = hash((0x5EED, 0))
Gradient = tuple[int, ...]  # one element a block, bucket after bucket
EMPTY: Gradient = (0,) * (BUCKETS * BLOCKS)  # of a sum that is not there
Outcome = tuple[Gradient, int]  # the reduced gradient, and the norm taken of it


@lru_cache(maxsize=4096)
def leaf(step: int, microbatch: int) -> Gradient:
    """The gradient of one microbatch."""
    return tuple(hash((step, microbatch, block)) for block in range(BUCKETS * BLOCKS))


def add(left: Gradient, right: Gradient) -> Gradient:
    """Not commutative and not associative, like floating point at its worst."""
    return tuple(map(hash, zip(left, right, strict=True)))


def garbage(*what: object) -> int:
    """An element that nobody else computes."""
    return hash((0xBAD, crc32(repr(what).encode())))


@lru_cache(maxsize=1024)
def slice_of(index: int, num_members: int) -> tuple[int, int]:
    """Blocks lo..hi-1 of each bucket that member `index` reduces."""
    return index * BLOCKS // num_members, (index + 1) * BLOCKS // num_members


@lru_cache(maxsize=16384)
def _recipe(
    nodes: tuple[Node, ...], num_leaves: int, num_rows: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]] | None:
    """Additions (register, register) that turn the nodes' sums, in this order, into the roots, and where those are;
    None: they do not tile the leaves, so something would be counted twice or not at all."""
    if sorted(leaf for lo, hi in nodes for leaf in range(lo, hi)) != list(range(num_leaves)):
        return None
    registers = {node: index for index, node in enumerate(nodes)}
    program: list[tuple[int, int]] = []

    def value(node: Node) -> int:
        if node in registers:
            return registers[node]
        left, right = split(node)
        program.append((value(left), value(right)))
        return len(nodes) + len(program) - 1

    ends = tuple(value(root) for root in roots(num_leaves, num_rows))
    return tuple(program), ends


def reduce_block(nodes: tuple[Node, ...], sums: list[int], num_leaves: int, num_rows: int = 1) -> int:
    """The root's element from the elements of partial sums `sums` of `nodes`; of several rows, the rule's result."""
    recipe = _recipe(nodes, num_leaves, num_rows)
    if recipe is None:
        return garbage(nodes, sums)
    program, ends = recipe
    registers = sums.copy()
    for left, right in program:
        registers.append(hash((registers[left], registers[right])))
    return registers[ends[0]] if num_rows == 1 else hash(tuple(registers[end] for end in ends))


def norm_of(gradient: Gradient) -> int:
    """A tree over fixed blocks (rule 9)."""
    return hash((0x4011, *gradient))


@lru_cache(maxsize=1024)
def outcome_of(step: int, num_leaves: int, num_rows: int = 1) -> Outcome:
    """What step `step` must come to, whoever computes it."""

    def value(node: Node) -> Gradient:
        if node[1] - node[0] == 1:
            return leaf(step, node[0])
        left, right = split(node)
        return add(value(left), value(right))

    rows = [value(root) for root in roots(num_leaves, num_rows)]
    gradient = rows[0] if num_rows == 1 else tuple(map(hash, zip(*rows, strict=True)))
    return gradient, norm_of(gradient)


def apply(state: int, outcome: Outcome) -> int:
    """The optimizer's step."""
    return hash((state, outcome))


@lru_cache(maxsize=1024)
def chain(committed: int, num_leaves: int, num_rows: int = 1) -> int:
    """The state after `committed` undisturbed steps."""
    if committed == 0:
        return INITIAL
    return apply(chain(committed - 1, num_leaves, num_rows), outcome_of(committed - 1, num_leaves, num_rows))
