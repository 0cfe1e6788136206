"""A slice of the tree: the same bits for any tiling, and inputs are never written."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core.protocol import cover, schedule, split
from outlast.tensors import BLOCK, reduce_slice


def node_sum(leaves: list[torch.Tensor], node: tuple[int, int]) -> torch.Tensor:
    if node[1] - node[0] == 1:
        return leaves[node[0]]
    left, right = split(node)
    return node_sum(leaves, left) + node_sum(leaves, right)


@settings(max_examples=40)
@given(st.integers(1, 13), st.integers(1, 8), st.randoms(use_true_random=False), st.sampled_from([1.0, 0.125, 1 / 3]))
def test_any_tiling_gives_the_root(num_leaves: int, num_members: int, draw: random.Random, scale: float) -> None:
    generator = torch.Generator().manual_seed(num_leaves)
    leaves = [torch.randn(50, generator=generator) for _ in range(num_leaves)]
    owner = [draw.randrange(num_members) for _ in range(num_leaves)]
    nodes = [n for m in range(num_members) for n in cover([i for i in range(num_leaves) if owner[i] == m], num_leaves)]
    parts = {node: node_sum(leaves, node) for node in nodes}
    kept = {node: part.clone() for node, part in parts.items()}
    out = torch.full((50,), float("nan"))
    reduce_slice(parts, list(schedule(tuple(nodes), num_leaves)), (0, num_leaves), scale, out)
    assert torch.equal(out, node_sum(leaves, (0, num_leaves)) * scale)
    assert all(torch.equal(parts[node], kept[node]) for node in nodes)


def test_more_than_one_cache_block() -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2 * BLOCK + 5, generator=generator) for _ in range(3)]
    out = torch.empty(2 * BLOCK + 5)
    parts = {(i, i + 1): leaf for i, leaf in enumerate(leaves)}
    reduce_slice(parts, list(schedule(tuple(parts), 3)), (0, 3), 0.25, out)
    assert torch.equal(out, node_sum(leaves, (0, 3)) * 0.25)


@pytest.mark.parametrize("nodes", [((0, 2), (0, 1)), ((0, 1),), ((0, 1), (1, 2), (2, 3), (2, 4))])
def test_what_does_not_tile_is_refused(nodes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="partial sum"):
        schedule(nodes, 4)
