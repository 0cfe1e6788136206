"""Work follows speed: shares that are a pure function, change only where it is worth it, and leave every bit alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.policy import WorkPolicy, WorkState, longest_s
from outlast.core.protocol import Coordinator, Member, Settings, View, ViewId, plan_of, schedule
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol.delta import apply, diff
from outlast.core.protocol.tree import cover
from outlast.core.protocol.work_shares import even, ranges_of

NAMES = ("r0.1", "r1.1", "r2.1", "r3.1")
WORTH, BACK = WorkPolicy().worth, WorkPolicy().back
speeds = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


def shares_by_speed(
    members: Sequence[str], leaf_s: Mapping[str, float], num_leaves: int, now: Sequence[int] = ()
) -> tuple[int, ...]:
    state = WorkState(even=even(len(members), num_leaves), now=now)
    return WorkPolicy().decide([leaf_s.get(name, 0.0) for name in members], state).work


@given(speeds, st.integers(0, 20))
def test_no_shares_are_better_than_by_one_tenth(leaf_s: list[float], more: int) -> None:
    num = len(leaf_s) + more
    names = [f"r{i}" for i in range(len(leaf_s))]
    work = shares_by_speed(names, dict(zip(names, leaf_s, strict=True)), num) or even(len(names), num)
    assert sum(work) == num
    assert min(work) >= 1
    bound = num / sum(1 / each for each in leaf_s)  # no machine could be through before
    assert longest_s(work, leaf_s) <= max(bound + max(leaf_s), max(leaf_s)) / WORTH


@given(speeds, st.integers(0, 12))
def test_few_members_get_the_least_longest_time_there_is(leaf_s: list[float], more: int) -> None:
    leaf_s, num = leaf_s[:3], len(leaf_s[:3]) + more
    names = [f"r{i}" for i in range(len(leaf_s))]
    every = [w for w in itertools.product(range(1, num + 1), repeat=len(names)) if sum(w) == num]
    least = min(longest_s(work, leaf_s) for work in every)
    work = shares_by_speed(names, dict(zip(names, leaf_s, strict=True)), num) or even(len(names), num)
    assert longest_s(work, leaf_s) <= least / WORTH * (1 + 1e-9)


def test_one_of_four_hosts_at_a_third_costs_no_more_than_its_capacity() -> None:
    leaf_s = dict(zip(NAMES, (1.0, 1.0, 1.0, 3.0), strict=True))
    for num, most in ((20, 1.0), (32, 1.05), (64, 1.05)):
        work = shares_by_speed(NAMES, leaf_s, num)
        ideal_s = num / (3 + 1 / 3)
        assert longest_s(work, list(leaf_s.values())) <= most * ideal_s * 1.01


@given(st.lists(st.lists(st.floats(0.95, 1.05), min_size=4, max_size=4), max_size=8))
def test_noise_gives_a_fleet_of_equals_no_shares(noise: list[list[float]]) -> None:
    """Measurements that differ by five in a hundred: no shares promise a step that is a tenth shorter."""
    work: tuple[int, ...] = ()
    for row in noise:
        work = shares_by_speed(NAMES, dict(zip(NAMES, row, strict=True)), 32, work)
        assert work == ()


@given(st.lists(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4), min_size=1, max_size=8))
def test_shares_change_only_where_it_is_worth_it_or_back_to_even(measured: list[list[float]]) -> None:
    work, plain = even(4, 32), even(4, 32)
    for row in measured:
        told = shares_by_speed(NAMES, dict(zip(NAMES, row, strict=True)), 32, () if work == plain else work)
        after = told or plain
        gain = BACK if after == plain else WORTH
        assert after == work or longest_s(after, row) <= gain * longest_s(work, row)
        work = after


def test_who_is_now_a_little_faster_now_a_little_slower_keeps_its_shares() -> None:
    """One of four, 8 microbatches: even shares are an eighth worse in one window, a thirtieth better in the next."""
    work: tuple[int, ...] = ()
    told = []
    for over in (1.70, 1.45) * 4:
        work = shares_by_speed(NAMES, dict(zip(NAMES, (1.0, 1.0, 1.0, over), strict=True)), 8, work)
        told.append(work)
    assert set(told) == {(3, 2, 2, 1)}
    assert shares_by_speed(NAMES, dict.fromkeys(NAMES, 1.0), 8, work) == ()


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6))
def test_equals_come_back_to_even_or_lose_less_than_a_twentieth(work: list[int]) -> None:
    names, num = [f"r{i}" for i in range(len(work))], sum(work)
    told = shares_by_speed(names, dict.fromkeys(names, 1.0), num, work)
    assert told == () or (told == tuple(work) and max(even(len(work), num)) > BACK * max(work))


def test_who_is_not_known_counts_as_usual_and_who_is_as_fast_again_gets_as_much_again() -> None:
    leaf_s = {"r0.1": 1.0, "r1.1": 1.0, "r3.1": 3.0}
    work = shares_by_speed(NAMES, leaf_s, 20)
    assert work == (6, 6, 6, 2)
    assert shares_by_speed(NAMES, dict.fromkeys(NAMES, 1.0), 20, work) == ()
    assert shares_by_speed(NAMES, {}, 20, work) == ()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_any_shares_are_a_whole_step_of_the_one_tree(work: list[int]) -> None:
    names = [f"r{i}" for i in range(len(work))]
    plan = plan_of(names, 0, sum(work), 1, work)
    nodes = tuple(node for name in names for node in cover(plan.leaves[name], sum(work)))
    schedule(nodes, sum(work))  # ValueError: some microbatch would count twice or never
    assert [len(plan.leaves[name]) for name in names] == work


@pytest.mark.parametrize("work", [(1, 2), (3, 3, 3), (), (9, -1, 0)])
def test_shares_that_do_not_fit_are_even(work: tuple[int, ...]) -> None:
    assert ranges_of(work, 3, 8) == ranges_of((), 3, 8)


def test_a_difference_of_views_says_who_computes_what() -> None:
    base = View(id=ViewId(1, 1), members=NAMES)
    after = View(id=ViewId(1, 2), members=NAMES, work=(3, 3, 1, 1))
    assert apply(base, diff(base, after)) == after


# --- in the coordinator ----------------------------------------------------------------------------------------------
def fleet(num_microbatches: int = 20, by_speed: bool = True, **facts: str) -> Coordinator:
    c = Coordinator(Settings(num_replicas=4, by_speed=by_speed), 1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    told = {"microbatches": str(num_microbatches)} | facts
    for name in NAMES:
        c.handle(0.0, m.Hello(member=name, agent="a0", epoch=0, state="fresh", facts=told))
    enter(c)
    return c


def enter(c: Coordinator) -> None:
    view = c.planned or c.view
    assert view is not None
    for name in view.members:
        c.handle(1.0, m.Formed(member=name, view=view.id, step=3))


def measured(c: Coordinator, *leaf_s: float, at_s: float = 5.0) -> list[str]:
    """What people are told of it."""
    actions = c.handle(at_s, hm.SpeedsMeasured(leaf_s=dict(zip(NAMES, leaf_s, strict=True))))
    return [str(a.fields["text"]) for a in actions if isinstance(a, m.JournalEntry) and a.kind == "notice"]


def test_a_straggler_is_named_and_relieved_by_a_planned_view_once() -> None:
    c = fleet()
    (said,) = measured(c, 0.1, 0.1, 0.1, 0.3)
    assert said == (
        "r3.1 on a0 is slow to compute: a microbatch takes it 0.300 s, 3.0 x the usual; it gets 2 of 20 in place of 5"
    )
    assert c.change is None
    assert c.planned is not None
    assert (c.planned.members, c.planned.work) == (NAMES, (6, 6, 6, 2))
    enter(c)
    assert c.planned is None
    assert measured(c, 0.1, 0.103, 0.098, 0.31) == []
    assert c.planned is None, "noise"
    assert measured(c, 0.1, 0.1, 0.1, 0.1, at_s=65.0) == ["r3.1 on a0 computes as fast as others again, after 60 s"]
    assert c.planned is not None
    assert c.planned.work == ()


def test_a_death_keeps_what_is_known_of_the_others() -> None:
    c = fleet()
    measured(c, 0.1, 0.1, 0.1, 0.3)
    enter(c)
    view = c.view
    assert view is not None
    c.handle(6.0, m.Exited(member="r0.1", cause="signal", code=-9))
    for name in NAMES[1:]:
        c.handle(6.0, m.Left(member=name, view=view.id))
    assert c.view is not None
    assert dict(zip(c.view.members, c.view.work, strict=True)) == {"r1.1": 9, "r2.1": 8, "r3.1": 3}


def test_shares_wait_for_who_is_served() -> None:
    """A planned view would end its stream, and it would begin anew in each window."""
    c = fleet()
    view = c.view
    assert view is not None
    c.handle(6.0, m.Exited(member="r0.1", cause="signal", code=-9))
    for name in NAMES[1:]:
        c.handle(6.0, m.Left(member=name, view=view.id))
    enter(c)
    c.handle(7.0, m.Hello(member="r0.2", agent="a0", epoch=0, state="fresh", facts={"microbatches": "20"}))
    serve = c.roster.peers["r0.2"].serve
    assert (c.roster.count("joining"), c.planned) == (1, None)
    leaf_s = dict(zip(NAMES[1:], (0.1, 0.1, 0.3), strict=True))
    c.handle(8.0, hm.SpeedsMeasured(leaf_s=leaf_s))
    assert (c.planned, c.change) == (None, None)
    c.handle(9.0, m.Ready(member="r0.2", step=5, serve=serve))
    assert c.planned is not None
    assert dict(zip(c.planned.members, c.planned.work, strict=True)) == {
        "r0.2": 6, "r1.1": 6, "r2.1": 6, "r3.1": 2,
    }  # fmt: skip


def test_another_coordinator_measures_before_it_changes_shares() -> None:
    c = fleet()
    measured(c, 0.1, 0.1, 0.1, 0.3)
    enter(c)
    view = c.view
    c.persist()
    (record,) = [a.record for a in c._out if isinstance(a, m.Persist)]
    other = Coordinator(c.settings, 2, record)
    other.handle(9.0, m.AgentHello(agent="a0", pid=1, members=NAMES))
    for name in NAMES:
        other.handle(9.0, m.Hello(
            member=name, agent="a0", epoch=1, state="member", view=view, formed=True, facts={"microbatches": "20"}
        ))  # fmt: skip
    assert (other.view, other.change, other.planned) == (view, None, None)
    assert measured(other, 0.1, 0.1, 0.1, 0.3)[0].endswith("its work stays as it is")
    assert (other.view, other.change, other.planned) == (view, None, None)
    measured(other, 0.1, 0.1, 0.1, 0.1)
    assert other.change is not None, "an earlier coordinator's orders cannot be numbered: everybody leaves"
    assert view is not None
    for name in NAMES:
        other.handle(10.0, m.Left(member=name, view=view.id))
    assert other.view is not None
    assert (other.view.members, other.view.work) == (NAMES, ())


def test_who_computes_nothing_keeps_nobody_from_being_named() -> None:
    c = fleet(num_microbatches=3)
    actions = c.handle(5.0, hm.SpeedsMeasured(leaf_s=dict(zip(NAMES[:3], (0.1, 0.1, 0.3), strict=True))))
    (said,) = [str(a.fields["text"]) for a in actions if isinstance(a, m.JournalEntry) and a.kind == "notice"]
    assert said.startswith("r2.1 on a0 is slow to compute")
    assert said.endswith("its work stays as it is")


@pytest.mark.parametrize(("rule", "by_speed"), [("median", True), ("mean", False)])
def test_rows_and_replicas_of_several_ranks_stay_and_the_straggler_is_named(rule: str, by_speed: bool) -> None:
    c = fleet(by_speed=by_speed, aggregation=rule)
    (said,) = measured(c, 0.1, 0.1, 0.1, 0.3)
    assert said.endswith("its work stays as it is")
    assert c.planned is None


def test_members_compute_what_the_view_says_from_the_step_on_that_it_begins_with() -> None:
    view = View(id=ViewId(1, 1), members=NAMES, work=(3, 3, 1, 1))
    everybody = [_acting(name, view) for name in NAMES]
    entries = [member.roll(0, 0) for member in everybody]
    for member in everybody:
        member.called(entries)
        assert member.plan is not None
        assert member.plan.leaves == {"r0.1": (0, 1, 2), "r1.1": (3, 4, 5), "r2.1": (6,), "r3.1": (7,)}


def _acting(name: str, view: View) -> Member:
    member = Member(name, 8)
    member.state = "ready"
    member.told(m.Install(view=view, addresses={}, hosts={}, store="", cause="", epoch=1))
    member.next()
    return member
