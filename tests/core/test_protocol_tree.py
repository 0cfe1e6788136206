"""The reduction tree, shares and roll calls: arithmetic under the protocol, against brute force."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.protocol import Node, RollEntry, ViewId, cover, leaves_of, parent, plan_of, resolve, shares, split

sizes = st.integers(1, 40)


def all_nodes(num_leaves: int) -> list[Node]:
    out, stack = [], [(0, num_leaves)]
    while stack:
        node = stack.pop()
        out.append(node)
        if node[1] - node[0] > 1:
            stack += split(node)
    return out


@given(sizes)
def test_parent_is_the_inverse_of_split(num_leaves: int) -> None:
    nodes = all_nodes(num_leaves)
    assert len(nodes) == 2 * num_leaves - 1
    for node in nodes:
        if node[1] - node[0] > 1:
            left, right = split(node)
            assert (left[0], left[1], right[1]) == (node[0], right[0], node[1])
            assert parent(left, num_leaves) == (node, right)
            assert parent(right, num_leaves) == (node, left)
    assert parent((0, num_leaves), num_leaves) is None


def test_what_is_not_a_node_has_no_parent() -> None:
    with pytest.raises(ValueError, match="not a node"):
        parent((1, 3), 4)


@given(st.integers(1, 9), st.data())
def test_cover_is_exact_and_smallest(num_leaves: int, data: st.DataObject) -> None:
    leaves = data.draw(st.sets(st.integers(0, num_leaves - 1)))
    nodes = cover(leaves, num_leaves)
    assert leaves_of(nodes) == sorted(leaves)
    possible = [node for node in all_nodes(num_leaves) if leaves.issuperset(range(*node))]
    for size in range(len(nodes)):
        assert not any(leaves_of(chosen) == sorted(leaves) for chosen in combinations(possible, size))


@given(st.integers(1, 6), st.integers(1, 10))
def test_shares_tile_with_least_compute_then_fewest_subtrees(num_members: int, num_leaves: int) -> None:
    ranges = shares(num_members, num_leaves)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_leaves
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    lengths = [hi - lo for lo, hi in ranges]
    small, larger = divmod(num_leaves, num_members)
    assert sorted(lengths) == [small] * (num_members - larger) + [small + 1] * larger

    def cost(larger_at: tuple[int, ...]) -> int:
        at, worst = 0, 0
        for index in range(num_members):
            size = small + (index in larger_at)
            worst = max(worst, len(cover(range(at, at + size), num_leaves)))
            at += size
        return worst

    best = min(cost(chosen) for chosen in combinations(range(num_members), larger))
    assert max(len(cover(range(lo, hi), num_leaves)) for lo, hi in ranges) == best


def entry(
    member: str, committed: int, held: tuple[Node, ...] = (), keeps: bool = True, late: bool = False
) -> RollEntry:
    return RollEntry(
        member=member, view=ViewId(1, 1), committed=committed, held=held, keeps_output=keeps, fingerprint=0, outcome=0,
        late=late,
    )  # fmt: skip


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_every_microbatch_counts_once_whatever_is_held(num_members: int, num_leaves: int, data: st.DataObject) -> None:
    nodes = all_nodes(num_leaves)
    entries = []
    for index in range(num_members):
        offered = data.draw(st.lists(st.sampled_from(nodes), max_size=4))
        held: list[Node] = []
        for node in offered:
            if not set(leaves_of(held)) & set(range(*node)):
                held.append(node)
        entries.append(entry(f"r{index}", data.draw(st.integers(4, 5)), tuple(held)))
    plan = resolve(entries, num_leaves)
    assert sorted(leaf for leaves in plan.leaves.values() for leaf in leaves) == list(range(num_leaves))
    top = max(e.committed for e in entries)
    assert plan.step == top
    held_by = {e.member: set(leaves_of(e.held)) if e.committed == top else set() for e in entries}
    for member, leaves in plan.leaves.items():
        assert set(leaves) - set(plan.orphans[member]) <= held_by[member]
    if any(held_by.values()):
        everything = set().union(*held_by.values())
        orphans = sorted(leaf for leaves in plan.orphans.values() for leaf in leaves)
        assert orphans == sorted(set(range(num_leaves)) - everything)
        counts = [len(leaves) for leaves in plan.orphans.values()]
        assert max(counts) - min(counts) <= 1


@given(st.integers(1, 5), st.integers(1, 9), st.booleans(), st.data())
def test_who_is_late_computes_nothing_where_others_can(
    num_members: int, num_leaves: int, half_done: bool, data: st.DataObject
) -> None:
    late = data.draw(st.lists(st.booleans(), min_size=num_members, max_size=num_members))
    held = ((0, 1),) if half_done and not late[0] else ()
    entries = [entry(f"r{i}", 5, held if i == 0 else (), late=late[i]) for i in range(num_members)]
    plan = resolve(entries, num_leaves)
    assert list(plan.leaves) == [e.member for e in entries]
    assert sorted(leaf for leaves in plan.leaves.values() for leaf in leaves) == list(range(num_leaves))
    if not all(late):
        assert all(plan.leaves[e.member] == plan.orphans[e.member] == () for e in entries if e.late)


def test_who_is_one_behind_takes_the_outcome_from_the_first_that_keeps_it() -> None:
    entries = [entry("a", 5, keeps=False), entry("b", 4), entry("c", 5), entry("d", 5)]
    plan = resolve(entries, 4)
    assert (plan.step, plan.donor, plan.behind, plan.stale) == (5, "c", ("b",), ())


def test_further_behind_is_stale_and_so_is_one_behind_without_a_donor() -> None:
    assert resolve([entry("a", 5), entry("b", 3), entry("c", 4)], 4).stale == ("b",)
    plan = resolve([entry("a", 5, keeps=False), entry("b", 4)], 4)
    assert (plan.stale, plan.behind, plan.donor) == (("b",), (), None)


def test_an_undisturbed_step_is_everybodys_own_range() -> None:
    plan = plan_of(["a", "b", "c"], 7, 8)
    assert sorted(leaf for leaves in plan.leaves.values() for leaf in leaves) == list(range(8))
    assert plan.orphans == plan.leaves
