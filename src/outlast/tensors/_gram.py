"""Gram matrices that do not depend on who computed which part: blocks, a fixed tree over them, dyadic partial sums.

Role: a vector is cut at block boundaries (32 Ki elements) into one slice a member. Each member sums its blocks as
far as the tree over *all* blocks allows (`partial_grams`: the aligned powers of two inside its slice, at most two a
level), and whoever has the sums of all members finishes the tree (`total_gram`). The bits are those of one process that
saw everything.

Invariant: a block's matrix is exact up to the stated grid (`_eager.center_and_round`), so it is the same on every
device; the tree is over block number. Not here: what is done with the matrix (`_selection.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from outlast.errors import ProtocolViolation
from outlast.tensors._eager import tree_sum

__all__ = ["Node", "canonical", "partial_grams", "total_gram"]

Node = tuple[int, int]  # (level, index): blocks index * 2^level up to (index + 1) * 2^level


def partial_grams(blocks: Tensor, first_block: int, num_blocks: int) -> dict[Node, Tensor]:
    """Blocks (b, n, n) numbered from `first_block` among `num_blocks`, added up into the nodes they cover alone.

    A node may reach past the last block: what is not there is zero.
    """
    last_block = first_block + len(blocks)
    end = 1 << max(0, num_blocks - 1).bit_length() if last_block == num_blocks else last_block
    nodes, at = {}, first_block
    while at < last_block:
        level = 0
        while at % (2 << level) == 0 and at + (2 << level) <= end:
            level += 1
        inside = blocks[at - first_block : min(at + (1 << level), last_block) - first_block]
        nodes[level, at >> level] = tree_sum(inside)
        at += 1 << level
    return nodes


def total_gram(parts: Iterable[Mapping[Node, Tensor]], num_blocks: int) -> Tensor:
    """The sum of all blocks, (n, n), from everybody's partial sums. Raises ProtocolViolation when one is missing."""
    nodes = {node: matrix for part in parts for node, matrix in part.items()}
    root = max(0, num_blocks - 1).bit_length()
    return _sum(nodes, (root, 0), num_blocks)


def _sum(nodes: Mapping[Node, Tensor], node: Node, num_blocks: int) -> Tensor:
    if node in nodes:
        return nodes[node]
    level, index = node
    if level == 0:
        raise ProtocolViolation(f"no partial sum covers block {index} of {num_blocks}")
    left = _sum(nodes, (level - 1, 2 * index), num_blocks)
    if (2 * index + 1) << (level - 1) >= num_blocks:
        return left
    return left + _sum(nodes, (level - 1, 2 * index + 1), num_blocks)


def canonical(gram: Tensor) -> Tensor:
    """The matrix on the CPU in float64, for the decisions taken from it."""
    return gram.detach().to(device="cpu", dtype=torch.float64)
