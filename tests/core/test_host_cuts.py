"""The two cuts of a bucket: every part is reduced by one member, and carried for each other host by one."""

from __future__ import annotations

import itertools

import pytest

from outlast.core.protocol.host_cuts import HostCuts, host_nodes, overlap, together
from outlast.core.protocol.tree import schedule, within


@pytest.mark.parametrize("places", ["ab", "aabb", "aaab", "abbbaa", "aabbbcccccd", "abcabcabc"])
def test_each_part_is_reduced_once_and_carried_once_by_each_other_host(places: str) -> None:
    cuts = HostCuts(together(places))
    fine = [(i, i + 1) for i in range(cuts.num_fine)]
    members = range(len(places))
    owned = sorted(cuts.owned(fine, member) for member in members)
    assert [owned[0][0], owned[-1][1]] == [0, len(fine)]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(owned))
    for host, other in itertools.product(range(len(cuts.hosts)), repeat=2):
        lanes = [cuts.carried(fine, host, member) for member in cuts.hosts[other]]
        parts = [cuts.owned(fine, member) for member in cuts.hosts[host]]
        assert (lanes[0][0], lanes[-1][1]) == (parts[0][0], parts[-1][1])
        assert len(fine) == len(cuts.hosts) * (parts[-1][1] - parts[0][0]), "as much for each host"
        pieces = [overlap(lane, part) for lane, part in itertools.product(lanes, parts)]
        assert sum(hi - lo for lo, hi in pieces) == parts[-1][1] - parts[0][0]


def test_only_hosts_that_are_idle_whole_reduce_nothing() -> None:
    assert HostCuts(together("aabb"), frozenset({2, 3})).idle_fine == {2, 3}
    assert HostCuts(together("aabb"), frozenset({2})).idle_fine == set()
    assert HostCuts(together("aabb"), frozenset(range(4))).idle_fine == set()


@pytest.mark.parametrize("places", ["a", "ab", "aabb", "aaabbb", "abbbaa", "aabbbcccccd", "abcabcabc"])
def test_cuts_turn_through_all_slices(places: str) -> None:
    for idle in (frozenset[int](), frozenset({0})):
        cuts = HostCuts(together(places), idle)
        num = cuts.num_fine - len(cuts.idle_fine)
        assert sorted(cuts.turns(num)) == list(range(num))


@pytest.mark.parametrize("num_leaves", [4, 6, 7, 8, 12])
def test_sums_of_hosts_are_nodes_of_the_one_tree(num_leaves: int) -> None:
    for first in range(1, num_leaves):
        nodes = [[(i, i + 1)] for i in range(num_leaves)]
        hosts = [range(first), range(first, num_leaves)]
        found = host_nodes(hosts, nodes, num_leaves)
        adds = [add for host, sums in zip(hosts, found, strict=True) for node in sums
                for add in within([nodes[i][0] for i in host], node)]  # fmt: skip
        above = schedule(tuple(node for sums in found for node in sums), num_leaves)
        leaves = tuple(node for row in nodes for node in row)
        assert sorted([*adds, *above]) == sorted(schedule(leaves, num_leaves))
