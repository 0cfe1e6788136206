"""Does the network still join all machines? Ring, tree, fat-tree (leaf-spine), rail-optimised.

Links and switches fail independently with the probabilities given. Ring and tree are exact; fat-tree and rails are the
same bipartite question (leaves or nodes against hubs): exact up to `EXACT_HUBS` hubs, else bounds and Monte Carlo.
Invariant: lower bound <= exact <= upper bound. Sources: Ball, Colbourn & Provan, Network Reliability (1995) for the
inclusion-exclusion over partitions; Al-Fares et al., SIGCOMM'08 (fat-tree); Wang et al., Rail-only, HOTI'24 (rails).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb, factorial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .check import count, probability

__all__ = [
    "EXACT_HUBS", "Connectivity", "Topology", "connected_bounds", "connected_exact", "connected_sampled", "fat_tree",
    "rails", "ring", "topology_reliability", "tree",
]  # fmt: skip

EXACT_HUBS = 10
Topology = Literal["ring", "tree", "fat-tree", "rail"]


def ring(num_nodes: int, p_link: float, *, two_way: bool = False) -> float:
    """All links of a one-way ring; a two-way ring still joins everyone with one link gone."""
    n, p = count("num_nodes", num_nodes, 1), float(probability("p_link", p_link))
    if n == 1:
        return 1.0
    return p**n + (n * (1 - p) * p ** (n - 1) if two_way else 0.0)


def tree(num_nodes: int, p_link: float) -> float:
    """A spanning tree: every one of its n - 1 links."""
    return float(probability("p_link", p_link)) ** (count("num_nodes", num_nodes, 1) - 1)


def _partitions(total: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
        return
    for part in range(min(total, largest or total), 0, -1):
        for rest in _partitions(total - part, part):
            yield (part, *rest)


def _joined(leaves: int, hubs: int, p_link: float, absent: int) -> float:
    """P(all leaves and these `hubs` form one piece, no leaf uses the `absent` others): Moebius over hub partitions."""
    q, total = 1 - p_link, 0.0
    for parts in _partitions(hubs):
        ways = factorial(hubs)
        for size, times in Counter(parts).items():
            ways //= factorial(size) ** times * factorial(times)
        inside = sum((1 - q**size) * q ** (hubs - size) for size in parts) * q**absent
        total += (-1) ** (len(parts) - 1) * factorial(len(parts) - 1) * ways * inside**leaves
    return total


def connected_exact(leaves: int, hubs: int, p_link: float, p_hub: float) -> float:
    """P(all `leaves` are joined through the hubs), each leaf linked to each hub. Exact; hubs <= EXACT_HUBS."""
    (
        count("leaves", leaves, 1),
        count("hubs", hubs, 1, EXACT_HUBS),
        probability("p_link", p_link),
        probability("p_hub", p_hub),
    )
    if leaves == 1:
        return float(1 - (1 - p_hub * p_link) ** hubs)
    chance = 0.0
    for up in range(1, hubs + 1):
        weight = comb(hubs, up) * p_hub**up * (1 - p_hub) ** (hubs - up)
        chance += weight * sum(comb(up, used) * _joined(leaves, used, p_link, up - used) for used in range(1, up + 1))
    return min(1.0, max(0.0, chance))


def connected_bounds(leaves: int, hubs: int, p_link: float, p_hub: float) -> tuple[float, float]:
    """Lower: one live hub reaches all leaves. Upper: every leaf reaches some live hub (necessary, not sufficient)."""
    count("leaves", leaves, 1), count("hubs", hubs, 1), probability("p_link", p_link), probability("p_hub", p_hub)
    low = 1 - (1 - p_hub * p_link**leaves) ** hubs
    up = np.arange(hubs + 1)
    from ._structures import binomial_pmf

    high = float((binomial_pmf(hubs, p_hub) * (1 - (1 - p_link) ** up) ** leaves).sum())
    return float(low), float(max(low, high))


def connected_sampled(
    leaves: int, hubs: int, p_link: float, p_hub: float, rng: np.random.Generator, samples: int = 4000
) -> tuple[float, float]:
    """Monte Carlo (share, standard error) of the same event: labels spread over links until they settle."""
    links: NDArray[np.bool_] = np.zeros((samples, leaves, hubs), dtype=np.bool_)
    links[:] = (rng.random((samples, leaves, hubs)) < p_link) & (rng.random((samples, 1, hubs)) < p_hub)
    reached: NDArray[np.bool_] = np.zeros((samples, leaves), dtype=np.bool_)
    reached[:, 0] = True
    while True:
        hub_reached = np.asarray(np.any(links & reached[:, :, None], axis=1))
        grown = np.asarray(reached | np.any(links & hub_reached[:, None, :], axis=2))
        if (grown == reached).all():
            break
        reached = grown
    good = float(np.mean(np.all(reached, axis=1) & np.all(np.any(links, axis=2), axis=1)))
    return good, float(np.sqrt(max(good * (1 - good), 1 / samples) / samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class Connectivity:
    """A probability with what is known of it: low = high = value when exact."""

    value: float
    low: float
    high: float
    exact: bool


def _bipartite(leaves: int, hubs: int, p_link: float, p_hub: float, common: float) -> Connectivity:
    low, high = (common * bound for bound in connected_bounds(leaves, hubs, p_link, p_hub))
    if hubs <= EXACT_HUBS:
        value = common * connected_exact(leaves, hubs, p_link, p_hub)
        return Connectivity(value=value, low=value, high=value, exact=True)
    # With h hubs a spread of less than 1e-9 is the usual case: the bounds pinch. Their middle is the estimate.
    return Connectivity(value=(low + high) / 2, low=low, high=high, exact=False)


def fat_tree(
    num_nodes: int,
    p_link: float,
    p_switch: float,
    *,
    nodes_per_leaf: int = 32,
    num_spines: int = 8,
    p_uplink: float | None = None,
) -> Connectivity:
    """Two-level leaf-spine: each node's own link and each leaf switch in series, leaves joined through the spines."""
    leaves = -(-count("num_nodes", num_nodes, 1) // count("nodes_per_leaf", nodes_per_leaf, 1))
    common = float(probability("p_link", p_link)) ** num_nodes * float(probability("p_switch", p_switch)) ** leaves
    if leaves == 1:
        return Connectivity(value=common, low=common, high=common, exact=True)
    return _bipartite(leaves, num_spines, p_link if p_uplink is None else p_uplink, p_switch, common)


def rails(num_nodes: int, p_link: float, p_switch: float, *, num_rails: int = 8) -> Connectivity:
    """Rail-optimised: accelerator i of every node on rail i; a node forwards between its rails inside."""
    return _bipartite(count("num_nodes", num_nodes, 1), count("num_rails", num_rails, 1), p_link, p_switch, 1.0)


def topology_reliability(topology: Topology, num_nodes: int, p_link: float, p_switch: float) -> Connectivity:
    """One entry for all four; ring and tree have no switches of their own (each hop's switch is in p_link)."""
    if topology == "ring":
        value = ring(num_nodes, p_link)
    elif topology == "tree":
        value = tree(num_nodes, p_link)
    elif topology == "fat-tree":
        return fat_tree(num_nodes, p_link, p_switch)
    else:
        return rails(num_nodes, p_link, p_switch)
    return Connectivity(value=value, low=value, high=value, exact=True)
