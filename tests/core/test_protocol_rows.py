"""Robust rules as the coordinator and the members' arithmetic see them: who is condemned, and who may spoil what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.policy import AdmissionPolicy, most_rows_per_host
from outlast.core.protocol import (
    Coordinator,
    Member,
    RollEntry,
    Settings,
    ViewId,
    owners_of,
    plan_of,
    rows_spoilt,
    rows_touched,
    shares,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.row_plans import row_shares
from outlast.core.protocol.step.roll import resolve


def started(num_replicas: int, **settings: int) -> Coordinator:
    c = Coordinator(Settings(num_replicas=num_replicas, **settings), 1)  # type: ignore[arg-type]
    c.handle(0.0, m.AgentHello(agent="a", pid=1))
    for index in range(num_replicas):
        c.handle(0.0, m.Hello(member=f"r{index}.1", agent="a", epoch=0, state="fresh", device=f"cuda:{index}"))
    assert c.view is not None
    for name in c.view.members:
        c.handle(0.0, m.Formed(member=name, view=c.view.id, step=0))
    return c


def vote(c: Coordinator, member: str, culprit: str, view: ViewId) -> list[m.Action]:
    said = m.Accused(
        member=member, view=view, step=7, bucket=2, reducer="r1.1", accuser="r0.1", culprit=culprit,
        members=tuple(f"r{i}.1" for i in range(c.settings.num_replicas)),
    )  # fmt: skip
    return c.handle(1.0, said)


def journalled(actions: list[m.Action]) -> list[str]:
    return [a.kind for a in actions if isinstance(a, m.JournalEntry)]


@pytest.mark.parametrize("culprit", ["r1.1", "r0.1"], ids=["the reducer lied", "the checker lied"])
def test_who_is_wrong_by_most_votes_is_condemned(culprit: str) -> None:
    c = started(4)
    assert c.view is not None
    view = c.view.id
    assert journalled(vote(c, "r2.1", culprit, view)) == []
    assert journalled(vote(c, "r3.1", culprit, view)) == []  # half is not most
    other = {"r0.1": "r1.1", "r1.1": "r0.1"}[culprit]
    actions = vote(c, other, culprit, view)
    (told,) = [a.fields for a in actions if isinstance(a, m.JournalEntry) and a.kind == "reducer_accused"]
    assert (told["host"], told["device"], told["confidence"]) == ("a", f"cuda:{culprit[1]}", 0.75)
    assert "test it" in told["remedy"]
    assert any(isinstance(a, m.Tell) and isinstance(a.message, m.Kill) and a.message.member == culprit for a in actions)
    assert c.change is not None
    assert not c.roster.is_alive(culprit)


def test_one_member_s_word_condemns_nobody() -> None:
    c = started(4)
    assert c.view is not None
    for _ in range(5):
        assert journalled(vote(c, "r0.1", "r1.1", c.view.id)) == []
    assert c.roster.is_alive("r1.1")


def test_two_cannot_tell_who_is_wrong() -> None:
    c = started(2)
    assert c.view is not None
    actions = vote(c, "r0.1", "r1.1", c.view.id)
    end = next(a for a in actions if isinstance(a, m.Finish))
    assert end.exit_code == 5
    assert "cannot tell" in end.detail


def test_votes_that_come_after_the_view_has_ended_count() -> None:
    c = started(4)
    assert c.view is not None
    old = c.view.id
    vote(c, "r0.1", "r1.1", old)
    vote(c, "r2.1", "r1.1", old)
    c.handle(1.0, m.Left(member="r0.1", view=old))
    for name in ("r1.1", "r2.1", "r3.1"):
        c.handle(1.0, m.Left(member=name, view=old))
    assert c.view.id > old
    assert "reducer_accused" in journalled(vote(c, "r3.1", "r1.1", old))
    assert c.change is not None


def test_hosts_are_told_with_every_kind_of_view() -> None:
    c = started(3)
    members = {name: Member(name, 6, num_rows=3) for name in ("r0.1", "r1.1")}
    assert c.view is not None
    for member in members.values():
        member.told(c.install_message(c.view, "start"))
    actions = c.handle(1.0, m.Exited(member="r2.1", cause="signal"))
    actions += c.handle(1.0, m.Left(member="r0.1", view=c.view.id))
    actions += c.handle(1.0, m.Left(member="r1.1", view=c.view.id))
    for action in actions:
        if isinstance(action, m.Tell):
            for name in members.keys() & set(action.to):
                members[name].told(action.message)
    for member in members.values():
        assert member.view is not None
        assert member.view.members == ("r0.1", "r1.1")
        assert [member.hosts[name] for name in member.view.members] == ["a", "a"]


@given(st.data())
def test_shares_are_whole_rows_or_part_of_one(data: st.DataObject) -> None:
    """A view of more members than rows was dealt by microbatch: some touched two, and a run of four replicas and three
    rows waited for more replicas from its first view on."""
    leaves = data.draw(st.integers(1, 64))
    rows, members = data.draw(st.integers(1, leaves)), data.draw(st.integers(1, leaves))
    found = row_shares(members, leaves, rows)
    assert [leaf for lo, hi in found for leaf in range(lo, hi)] == list(range(leaves))
    assert all(lo < hi for lo, hi in found)
    touched = [len(rows_touched(range(lo, hi), leaves, rows)) for lo, hi in found]
    assert max(touched) == most_rows_per_host(rows, members)
    if rows == 1:
        assert found == shares(members, leaves)


@pytest.mark.parametrize("restarts", [0, 1])
def test_that_nobody_can_come_for_whom_a_view_waits_is_told_once(restarts: int) -> None:
    c = started(3, max_restarts=restarts)
    actions = c.handle(1.0, m.Exited(member="r2.1", cause="signal", detail="9", noticed_at_s=1.0))
    for name in ("r0.1", "r1.1"):
        actions += c.handle(1.0, m.Left(member=name, view=ViewId(epoch=1, n=1)))
    assert c.view is not None
    view = c.view.id
    assert view > ViewId(epoch=1, n=1)
    for name in c.view.members:
        actions += c.handle(1.2, m.Formed(member=name, view=view, step=0))
    waits = m.Admitted(
        member="r0.1",
        view=view,
        step=0,
        action="wait",
        tolerated=0,
        most_rows=2,
        trim_count=1,
        lowered=False,
        reason="",
    )
    actions += c.handle(1.3, waits)
    actions += c.handle(1.4, m.Formed(member="r0.1", view=view, step=0))
    texts = [str(a.fields["text"]) for a in actions if isinstance(a, m.JournalEntry) and a.kind == "notice"]
    assert ["outlast scale --replicas starts another one" in text for text in texts] == [True] * (restarts == 0)


def test_what_a_member_can_spoil() -> None:
    assert rows_touched([0, 1, 2], 8, 4) == [0, 1]
    assert owners_of([1], {"a": [0, 1], "b": [2], "c": [3, 4]}, 8, 4) == ["b", "c"]
    policy = AdmissionPolicy(trim_count=2, tolerated_hosts=2, on_shortfall="lower")
    lowered = policy.decide({"a": 2, "b": 1, "c": 1})
    assert (lowered.action, lowered.tolerated_hosts, lowered.lowered) == ("go", 1, True)


@given(st.data())
def test_after_a_death_nobody_answers_for_more_rows_than_in_an_undisturbed_step(data: st.DataObject) -> None:
    """Else the view would wait for others, and if nobody is missing none comes."""
    num_leaves = data.draw(st.integers(1, 10))
    num_rows, num_members = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 6))
    num_rows = min(num_rows, num_leaves)
    names = [f"r{i}.1" for i in range(num_members)]
    owner = data.draw(st.lists(st.sampled_from([*names, ""]), min_size=num_leaves, max_size=num_leaves))  # "": it died
    held = {name: tuple((leaf, leaf + 1) for leaf, who in enumerate(owner) if who == name) for name in names}
    said = {"view": ViewId(1, 2), "committed": 3, "keeps_output": False, "fingerprint": 0, "outcome": 0}
    entries = [RollEntry(member=name, held=held[name], **said) for name in names]
    plan, usual = resolve(entries, num_leaves, num_rows), plan_of(names, 3, num_leaves, num_rows)
    most = [max(len(rows_touched(own, num_leaves, num_rows)) for own in p.leaves.values()) for p in (plan, usual)]
    assert num_rows == 1 or most[0] <= most[1]
    assert sorted(leaf for own in plan.leaves.values() for leaf in own) == list(range(num_leaves))
    for name in names:  # what is called lost is what nobody's own sums have
        kept = {leaf for leaf, _ in held[name]}
        assert set(plan.orphans[name]) == set(plan.leaves[name]) - kept


@given(st.data())
def test_no_host_answers_for_more_than_its_even_share_of_rows_wherever_members_are(data: st.DataObject) -> None:
    """Neither in an undisturbed step nor after a death; every microbatch is somebody's."""
    num_leaves, num_rows = data.draw(st.integers(6, 12)), data.draw(st.integers(2, 6))
    places = data.draw(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=8))
    hosts = {f"r{i}.1": place for i, place in enumerate(places)}
    names = list(hosts)
    usual = plan_of(names, 3, num_leaves, num_rows, (), hosts)
    owner = data.draw(st.lists(st.sampled_from([*names, ""]), min_size=num_leaves, max_size=num_leaves))  # "": it died
    held = {name: tuple((leaf, leaf + 1) for leaf, who in enumerate(owner) if who == name) for name in names}
    said = {"view": ViewId(1, 2), "committed": 3, "keeps_output": False, "fingerprint": 0, "outcome": 0}
    entries = [RollEntry(member=name, held=held[name], **said) for name in names]
    for plan in (usual, resolve(entries, num_leaves, num_rows, (), hosts)):
        most = max(rows_spoilt(hosts, [plan.leaves], num_leaves, num_rows).values())
        assert most <= most_rows_per_host(num_rows, len(set(places)))
        assert sorted(leaf for own in plan.leaves.values() for leaf in own) == list(range(num_leaves))


def test_a_host_with_more_members_gets_the_odd_row_and_each_of_its_members_a_part() -> None:
    """Three rows of four on hosts a, b, a: two for a, one for each of its members."""
    hosts = {"r0": "b", "r1": "a", "r2": "a"}
    leaves = plan_of(list(hosts), 0, 12, 3, (), hosts).leaves
    assert {name: rows_touched(own, 12, 3) for name, own in leaves.items()} == {"r0": [0], "r1": [1], "r2": [2]}
    many = {f"r{i}": place for i, place in enumerate("abcab")}
    shared = plan_of(list(many), 0, 12, 2, (), many).leaves
    assert rows_spoilt(many, [shared], 12, 2) == {"a": 1, "b": 1, "c": 1}
