"""The draw of audits, and what claims that differ come to: pure arithmetic, the same on every member."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.policy import audit_share
from outlast.core.protocol import (
    Audits,
    Certificate,
    Claim,
    Header,
    Member,
    RollEntry,
    Said,
    Stand,
    View,
    ViewId,
    draw,
    draw_key,
    plan_of,
    resolve,
    to_ask,
    truth_of,
)
from outlast.core.protocol import messages as m
from outlast.core.protocol.disputes import AuditFinding, claims_in, committed, disputed, findings_of, place, void
from outlast.errors import ConfigError, ViewAbandoned


def owners(num_members: int, num_leaves: int) -> dict[str, tuple[int, ...]]:
    return plan_of([f"r{i}.1" for i in range(num_members)], 0, num_leaves).leaves


def claims(leaf: int, *said: tuple[str, int]) -> list[Claim]:
    tries: Counter[str] = Counter()
    out = []
    for member, value in said:
        tries[member] += 1
        out.append(Claim(leaf=leaf, member=member, attempt=tries[member], print=value))
    return out


@given(st.integers(2, 9), st.integers(1, 60), st.floats(0.0, 1.0), st.integers(0, 2**64 - 1))
def test_nobody_audits_itself_and_nothing_is_audited_twice(n: int, extra: int, share: float, key: int) -> None:
    leaves = owners(n, n + extra)
    drawn = draw(leaves, {}, share, key)
    every = [leaf for mine in drawn.values() for leaf in mine]
    assert len(every) == len(set(every))
    assert all(not set(mine) & set(leaves[name]) for name, mine in drawn.items())
    assert drawn == draw(dict(leaves), {}, share, key)


@given(st.integers(2, 8), st.integers(0, 2**64 - 1))
def test_a_share_of_one_is_every_microbatch_and_all_owe_alike(n: int, key: int) -> None:
    drawn = draw(owners(n, 4 * n), {}, 1.0, key)
    assert sorted(leaf for mine in drawn.values() for leaf in mine) == list(range(4 * n))
    spread = max(map(len, drawn.values())) - min(map(len, drawn.values()))
    assert spread <= 2 + (n == 3)  # one draw of three members in two thousand


@pytest.mark.parametrize("share", [0.02, 0.3, 0.75])
def test_the_expected_share_is_exact_and_every_microbatch_as_likely(share: float) -> None:
    leaves, steps = owners(4, 16), 6000
    counts: Counter[int] = Counter()
    loads: Counter[str] = Counter()
    for step in range(steps):
        for name, mine in draw(leaves, {}, share, draw_key(5, step, [])).items():
            counts.update(mine)
            loads[name] += len(mine)
    expected = share * steps
    assert sum(counts.values()) == pytest.approx(16 * expected, rel=0.15)
    assert all(abs(counts[leaf] - expected) < 6 * (4 * expected) ** 0.5 + 1 for leaf in range(16))
    assert max(loads.values()) < 1.3 * min(loads.values())


def test_the_second_is_on_another_host_where_there_is_one() -> None:
    leaves = owners(4, 16)
    hosts = {"r0.1": "a", "r1.1": "a", "r2.1": "b", "r3.1": "b"}
    owner = {leaf: name for name, mine in leaves.items() for leaf in mine}
    for step in range(50):
        for name, mine in draw(leaves, hosts, 0.5, draw_key(0, step, [])).items():
            assert all(hosts[owner[leaf]] != hosts[name] for leaf in mine)


def test_no_commitment_no_draw() -> None:
    """One fingerprint among all that were committed to moves the key, and who computed what does not."""
    said = [committed((leaf, 1, leaf * 7919) for leaf in range(first, 9, 3)) for first in range(3)]
    moved = [*said[:2], committed([(2, 1, 2 * 7919), (5, 1, 5 * 7919), (8, 1, 1)])]
    others = [committed((leaf, 2, leaf * 7919) for leaf in reversed(range(9)))]
    assert draw_key(1, 2, said) != draw_key(1, 2, moved)
    assert draw_key(1, 2, said) == draw_key(1, 2, others)
    assert len({draw_key(1, 2, said), draw_key(1, 3, said), draw_key(2, 2, said)}) == 3


@pytest.mark.parametrize(
    ("said", "truth"),
    [
        ((("a", 1), ("b", 2)), None),  # one word against another
        ((("a", 1), ("b", 2), ("a", 2), ("b", 2)), 2),  # transient, between two
        ((("a", 1), ("b", 2), ("a", 1), ("b", 2)), None),  # both stay with it
        ((("a", 1), ("b", 2), ("a", 3), ("b", 2)), 2),  # one never says the same
        ((("a", 1), ("b", 2), ("a", 1), ("b", 2), ("c", 2)), 2),  # a third decides
        ((("a", 1), ("b", 2), ("c", 3)), None),
        ((("a", 1), ("b", 2), ("b", 2)), None),  # a is gone: nobody can say who was right
        ((("a", 1), ("b", 2), ("b", 2), ("c", 2)), 2),
        ((("a", 1), ("b", 1), ("c", 2), ("d", 2)), None),
    ],
)
def test_what_counts_is_a_majority_of_replicas(said: tuple[tuple[str, int], ...], truth: int | None) -> None:
    assert truth_of(claims(0, *said)) == truth


def test_who_is_asked_again() -> None:
    members, hosts = ("a", "b", "c", "d"), {"a": "x", "b": "x", "c": "x", "d": "y"}
    first = claims(0, ("a", 1), ("b", 2))
    assert to_ask(first, members, hosts) == ("a", "b", "d")
    assert to_ask(first, ("a", "b"), hosts) == ("a", "b")
    settled = claims(0, ("a", 1), ("b", 2), ("a", 1), ("b", 2), ("d", 2))
    assert to_ask(settled, members, hosts) == ()
    assert to_ask(claims(0, ("a", 1), ("b", 2), ("a", 1), ("b", 2)), members, hosts) == ("d",)
    assert to_ask(claims(0, ("a", 1), ("b", 2), ("a", 1), ("b", 2)), ("a", "b"), hosts) == ()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2)), min_size=2, max_size=12))
def test_asking_ends(said: list[tuple[str, int]]) -> None:
    """Whatever was said: either the truth is known, or somebody is asked, or everybody has been asked twice."""
    case = claims(0, *said)
    asked = to_ask(case, tuple("abcd"), {})
    tries = Counter(claim.member for claim in case)
    assert all(tries[name] < 2 for name in asked)
    if truth_of(case) is None and not asked:
        assert all(tries[name] >= 2 for name in "abcd")


def test_transient_persistent_and_gone_are_told_apart() -> None:
    case = claims(4, ("a", 1), ("b", 2), ("a", 1), ("b", 2), ("c", 2))
    assert [(f.culprit, f.kind, f.agreeing, f.asked) for f in findings_of(7, 4, case)] == [("a", "persistent", 2, 3)]
    case = claims(4, ("a", 1), ("b", 2), ("a", 2), ("b", 2), ("c", 2))
    assert [(f.culprit, f.kind, f.agreeing) for f in findings_of(7, 4, case)] == [("a", "transient", 3)]
    case = claims(4, ("a", 1), ("b", 2), ("b", 2), ("c", 2))
    assert [(f.culprit, f.kind) for f in findings_of(7, 4, case)] == [("a", "gone")]
    case = claims(4, ("a", 1), ("b", 2), ("a", 1), ("b", 2))
    assert [(f.culprit, f.kind) for f in findings_of(7, 4, case)] == [("a, b", "undecided")]


def entry(name: str, held: tuple[tuple[int, int], ...], said: list[Claim]) -> RollEntry:
    return RollEntry(
        member=name, view=ViewId(1, 2), committed=3, held=held, keeps_output=False, fingerprint=0, outcome=0,
        audit=Stand(claims=tuple(said)),
    )  # fmt: skip


def test_a_sum_with_a_disputed_microbatch_counts_for_nothing() -> None:
    said = claims(1, ("a", 1), ("b", 2))
    plan = resolve([entry("a", ((0, 4),), said), entry("b", ((4, 8),), []), entry("c", ((8, 12),), said)], 12)
    assert sorted(leaf for mine in plan.orphans.values() for leaf in mine) == [0, 1, 2, 3]
    assert 1 in plan.orphans["c"], "the third contributes it"
    assert sorted(leaf for mine in plan.leaves.values() for leaf in mine) == list(range(12))
    assert plan.claims == tuple(sorted(said))


def test_what_the_truth_vouches_for_is_kept() -> None:
    said = claims(1, ("a", 1), ("b", 2), ("a", 1), ("b", 2), ("c", 2))
    cases = disputed(said)
    assert void((0, 2), "a", cases)
    assert not void((1, 2), "c", cases)
    assert void((0, 2), "d", cases), "who has said nothing on it holds what nobody vouches for"
    assert not void((2, 4), "a", cases)


@given(st.integers(2, 6), st.integers(6, 20), st.data())
def test_placing_keeps_every_orphan_once(n: int, leaves: int, data: st.DataObject) -> None:
    orphans = owners(n, leaves)
    where = data.draw(st.lists(st.integers(0, leaves - 1), unique=True, max_size=4))
    cases = {leaf: claims(leaf, ("r0.1", 1), ("r1.1", 2)) for leaf in where}
    placed = place(orphans, cases)
    assert sorted(leaf for mine in placed.values() for leaf in mine) == list(range(leaves))
    if n > 2:
        assert all(leaf not in placed[name] for leaf in where for name in ("r0.1", "r1.1"))


NAMES = ("a", "b", "c")


def step_of(members: tuple[str, ...], told: dict[str, dict[str, int]]) -> dict[str, Audits]:
    """Every member of a view of six microbatches up to its verdict; `told[m][x]`: what x said to m of microbatch 0."""
    plan, view = plan_of(members, 4, 6), View(id=ViewId(1, 1), members=members)
    every = {name: Audits(name) for name in members}
    entries = [
        RollEntry(member=n, view=view.id, committed=4, held=(), keeps_output=False, fingerprint=0, outcome=0)
        for n in members
    ]
    for audits in every.values():
        audits.share = 1.0
        audits.called(entries)
        for leaf in plan.leaves[audits.me]:
            audits.computed(leaf, leaf * 31, beside=False)
    said: dict[str, Said] = {}
    for name, audits in every.items():
        said[name] = {other: each.commitment(plan) for other, each in every.items()}
        for other, value in told.get(name, {}).items():
            said[name][other] = committed((c.leaf, c.attempt, value) for c in claims_in({other: said[name][other]}))
        for leaf in audits.owed(plan, said[name]):
            audits.computed(leaf, leaf * 31, beside=True)
    headers = [Header(member=n, step=4, view=view.id, heard=0, audit=every[n].evidence()) for n in members]
    for name, audits in every.items():
        assert audits.certificate is None, "states are compared by what headers say"
        audits.compared(4)
        audits.judge(plan, view, said[name], headers)
    return every


def test_a_clean_step_passes_and_says_nothing() -> None:
    every = step_of(NAMES, {})
    assert all(not audits.reports() for audits in every.values())
    assert {audits.num_audited for audits in every.values()} == {6}
    assert {audits.certificate for audits in every.values()} == {Certificate(step=4, share=1.0, audited=0)}


def test_who_heard_something_else_is_named_by_everybody() -> None:
    """Equivocation: `a` tells `c` another fingerprint than it tells the others."""
    with pytest.raises(ViewAbandoned, match="c is at fault"):
        step_of(NAMES, {"c": {"a": 12345}})


def test_two_that_heard_different_things_cannot_go_on() -> None:
    with pytest.raises(ViewAbandoned, match="a is at fault; b is at fault"):
        step_of(("a", "b"), {"b": {"a": 12345}})


def test_claims_about_no_microbatch_of_the_step_and_halves_of_claims_hold_nothing() -> None:
    """Whoever sends them: those that heard them go on alike."""
    plan, view = plan_of(NAMES, 4, 6), View(id=ViewId(1, 1), members=NAMES)
    said = {name: committed((leaf, 1, leaf) for leaf in plan.leaves[name]) for name in NAMES}
    strange = (Claim(99, "c", 1, 1), Claim(99, "c", 2, 2))
    for wrong in (said | {"c": said["c"] + b"half"}, said | {"c": committed([(99, 1, 1)]) + committed([(99, 2, 2)])}):
        audits = Audits("a")
        audits.share = 1e-9
        assert audits.owed(plan, wrong) == ()
        mine = audits.evidence()
        headers = [Header(member=n, step=4, view=view.id, heard=0, audit=mine) for n in NAMES]
        audits.judge(plan, view, wrong, headers)
        headers[2] = msgspec.structs.replace(headers[2], audit=msgspec.structs.replace(mine, claims=strange))
        audits.judge(plan, view, wrong, headers)
    assert [c.leaf for c in claims_in({"c": said["c"] + b"half"})] == list(plan.leaves["c"])


def test_two_commitments_to_one_microbatch_are_a_dispute() -> None:
    plan, view = plan_of(NAMES, 4, 6), View(id=ViewId(1, 1), members=NAMES)
    said = {name: committed((leaf, 1, leaf) for leaf in plan.leaves[name]) for name in NAMES}
    said["b"] += committed([(plan.leaves["a"][0], 1, 12345)])
    audits = Audits("a")
    audits.share = 1e-9
    audits.owed(plan, said)
    headers = [Header(member=n, step=4, view=view.id, heard=0, audit=audits.evidence()) for n in NAMES]
    with pytest.raises(ViewAbandoned, match="microbatch 0 of step 4 differs between a, b"):
        audits.judge(plan, view, said, headers)


def installed(members: dict[str, Member], number: int) -> View:
    """A view of these, up to its plan."""
    view = View(id=ViewId(1, number), members=tuple(members), start=number == 1)
    for member in members.values():
        member.told(m.Install(view=view, epoch=1))
        member.next()
    entries = [member.roll(0, 0) for member in members.values()]
    for member in members.values():
        member.called(entries)
    return view


def all_computed(members: dict[str, Member], wrong: dict[str, int]) -> Said:
    """Everybody's share, with these members' fingerprints off by so much; what each commits to."""
    for member in members.values():
        member.audits.share = 1.0
        for leaf in member.plan.leaves[member.me]:  # type: ignore[union-attr]
            member.next()
            member.computed(leaf)
            member.audits.computed(leaf, leaf * 31 + wrong.get(member.me, 0), beside=False)
    return {name: member.audits.commitment(member.plan) for name, member in members.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard"])
def test_sums_found_changed_are_dropped_though_their_owner_left_before_it_heard(heard: bool) -> None:
    """Else it offers them again, and is evicted as one that is wrong repeatedly."""
    members = {name: Member(name, 4) for name in ("a", "b")}
    view = installed(members, 1)
    all_computed(members, {})
    headers = [Header(member=n, step=0, view=view.id, heard=0, audit=members[n].audits.evidence()) for n in members]
    headers[1] = msgspec.structs.replace(headers[1], audit=members["b"].audits.evidence(unlike=["a"]))
    for name in ("a", "b") if heard else ("b",):
        with pytest.raises(ViewAbandoned, match="sums of a changed after it made them"):
            members[name].audit(headers, {})
    installed(members, 2)
    assert (members["a"].held, members["b"].held) == (set(), {(2, 4)})
    assert members["a"].plan == members["b"].plan
    orphans = members["a"].plan.orphans.values()  # type: ignore[union-attr]
    assert sorted(leaf for mine in orphans for leaf in mine) == [0, 1]
    assert members["a"].audits.commitment(members["a"].plan) == b""  # type: ignore[arg-type]


def test_a_dispute_is_known_in_the_third_view_though_who_had_judged_it_is_gone() -> None:
    members = {name: Member(name, 6) for name in ("a", "b", "c")}
    view = installed(members, 1)
    said = all_computed(members, {"b": 1})
    for member in members.values():
        for leaf in member.audits.owed(member.plan, said):  # type: ignore[arg-type]
            member.audits.computed(leaf, leaf * 31, beside=True)
    headers = [Header(member=n, step=0, view=view.id, heard=0, audit=members[n].audits.evidence()) for n in members]
    with pytest.raises(ViewAbandoned, match="microbatch 2 of step 0 differs"):
        members["b"].audit(headers, said)
    installed(members, 2)
    del members["b"]
    installed(members, 3)
    for member in members.values():
        assert {claim.member for claim in member.plan.claims} > {"b"}  # type: ignore[union-attr]


def test_a_slow_member_tells_what_it_found_under_the_view_that_found_it() -> None:
    """Who is told of the next view before it comes to tell says nothing new: found once more in another view, a single
    wrong reduction would cost its replica."""
    members = {name: Member(name, 6) for name in ("a", "b", "c")}
    view = installed(members, 1)
    finding = AuditFinding(step=0, leaf=-1, culprit="b", kind="transient", agreeing=3, asked=3, bucket=1)
    for member in members.values():
        member.audits.hold(view.id, [finding])
    fast = members["a"].lost([], "audit", 1.0)
    installed(members, 2)
    slow = members["c"].lost([], "audit", 1.0)
    told = [message for message in (*fast, *slow) if isinstance(message, m.Audited)]
    assert [(message.member, message.view) for message in told] == [("a", view.id), ("c", view.id)]
    assert members["c"].audits.reports() == [], "once"


def test_a_certificate_needs_a_whole_round_of_fingerprints() -> None:
    audits = step_of(NAMES, {})["a"]
    for step in range(5, 12):
        audits.passed(step, finite=True, num_parts=3)
    assert audits.certificate == Certificate(step=7, share=1.0, audited=6)
    audits.passed(12, finite=False, num_parts=3)
    for step in (13, 14, 15):
        audits.passed(step, finite=True, num_parts=3)
    assert audits.certificate.step == 7, "a loss that is not finite starts the round again"
    audits.passed(16, finite=True, num_parts=3)
    assert audits.certificate.step == 13
    for step in range(17, 30):
        audits.passed(step, finite=True, num_parts=0)
    assert audits.certificate.step == 13, "without fingerprints of the state nothing is agreed"


def test_the_share_is_a_number_or_the_policys() -> None:
    assert audit_share(0.25, 4) == 0.25
    assert 0.0 < audit_share("auto", 4) < audit_share("auto", 100_000) <= 0.05
    for wrong in (-0.1, 1.5, True, "often", None):
        with pytest.raises(ConfigError, match="share"):
            audit_share(wrong, 4)  # type: ignore[arg-type]
