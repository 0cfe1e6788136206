"""Views as differences (protocol, rule 4)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.protocol import Coordinator, Member, Order, Settings, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.delta import apply, diff
from outlast.errors import ProtocolViolation

names = st.lists(st.sampled_from([f"r{i}.{k}" for i in range(8) for k in (1, 2)]), unique=True)


def view(n: int, members: list[str], attached: tuple[str, ...] = ()) -> View:
    return View(id=ViewId(1, n), members=tuple(members), attached=attached)


@given(names, names)
def test_applying_a_difference_gives_the_view(before: list[str], after: list[str]) -> None:
    base, new = view(1, before), view(2, after, ("r9.1",))
    assert apply(base, diff(base, new)) == new


def test_a_death_in_a_large_view_costs_a_few_bytes() -> None:
    members = [f"r{i}.1" for i in range(10_000)]
    base = view(1, members)
    new = view(2, [*members[:5_000], "r5000.2", *members[5_001:]])
    delta = diff(base, new)
    assert len(msgspec.msgpack.encode(delta)) < 200
    assert apply(base, delta) == new


def test_another_base_is_refused() -> None:
    base, new = view(1, ["a", "b"]), view(3, ["b", "c"])
    with pytest.raises(ProtocolViolation, match="cannot be applied"):
        apply(view(2, ["a", "b"]), diff(base, new))


def test_a_base_that_differs_under_the_same_number_is_noticed() -> None:
    base, new = view(1, ["a", "b"]), view(2, ["a", "b", "c"])
    with pytest.raises(ProtocolViolation, match="another digest"):
        apply(view(1, ["a", "x"]), diff(base, new))


# --- on the wire -----------------------------------------------------------------------------------------------------
def fleet(num: int) -> tuple[Coordinator, dict[str, Member]]:
    """A coordinator and its members, in their first view."""
    c = Coordinator(Settings(num_replicas=num), 1)
    members = {f"r{index}.1": Member(f"r{index}.1", num) for index in range(num)}
    c.handle(0.0, m.AgentHello(agent="a", pid=1))
    for member in members.values():
        deliver(c, members, c.handle(0.0, member.hello("a", {}, f"at {member.me}", "")))
    first = c.view
    assert first is not None
    for member in members.values():
        assert member.view == first
        c.handle(0.1, m.Formed(member=member.me, view=first.id, step=0))
    return c, members


def deliver(c: Coordinator, members: dict[str, Member], actions: list[m.Action]) -> list[str]:
    """Carry out what is told, answers included; the kinds of what was said."""
    said: list[str] = []
    for action in actions:
        if isinstance(action, m.Tell):
            for name in action.to:
                said.append(type(action.message).__name__)
                for answer in members[name].told(action.message) if name in members else ():
                    said.append(type(answer).__name__)
                    said += deliver(c, members, c.handle(1.0, answer))
    return said


def test_survivors_hear_the_difference_and_come_to_the_view_and_its_addresses() -> None:
    c, members = fleet(4)
    del members["r2.1"]
    said = deliver(c, members, c.handle(1.0, m.Exited(member="r2.1", cause="signal")))
    assert said.count("Amend") == 3
    assert {"Install", "Whole"}.isdisjoint(said)
    for member in members.values():
        assert member.view == c.view
        assert member.contacts == {name: f"at {name}" for name in members}


@pytest.mark.parametrize("spoilt", ["another base", "other members", "an address is missing", "no view"])
def test_who_cannot_apply_the_difference_asks_for_the_whole(spoilt: str) -> None:
    c, members = fleet(4)
    del members["r2.1"]
    actions = c.handle(1.0, m.Exited(member="r2.1", cause="signal"))
    odd = members["r1.1"]
    assert odd.view is not None
    if spoilt == "another base":
        odd.view = msgspec.structs.replace(odd.view, id=ViewId(1, 0))
    elif spoilt == "other members":
        odd.view = msgspec.structs.replace(odd.view, members=("r1.1", "r0.1", "r2.1", "r3.1"))
    elif spoilt == "no view":
        odd.view = None
    else:
        del odd.contacts["r3.1"]
    said = deliver(c, members, actions)
    assert (said.count("Whole"), said.count("Install")) == (1, 1)
    assert odd.view == members["r0.1"].view == c.view
    assert odd.contacts["r3.1"] == "at r3.1"


def test_a_planned_view_is_a_difference_to_members_and_whole_to_who_comes_in() -> None:
    c, members = fleet(3)
    gone = members.pop("r2.1")
    deliver(c, members, c.handle(1.0, m.Exited(member=gone.me, cause="signal")))
    assert c.view is not None
    for member in members.values():
        c.handle(1.1, m.Formed(member=member.me, view=c.view.id, step=3))
    joiner = members["r2.2"] = Member("r2.2", 3)
    deliver(c, members, c.handle(2.0, joiner.hello("a", {}, "at r2.2", "")))
    told = [a for a in c.handle(3.0, joiner.caught_up(9)[0]) if isinstance(a, m.Tell) and isinstance(a.message, m.Take)]
    assert [(a.to, a.message.delta is not None) for a in told] == [(("r0.1", "r1.1"), True), (("r2.2",), False)]
    deliver(c, members, list(told))
    assert joiner.view == c.planned
    assert members["r0.1"].heard == 2
    assert members["r0.1"].contacts["r2.2"] == "at r2.2"


def test_an_order_that_cannot_be_rebuilt_is_asked_for_and_comes_whole() -> None:
    c, members = fleet(2)
    assert c.view is not None
    c.planned = view(9, ["r0.1", "r1.1", "r2.1"])
    c.orders = 1
    brief = Order(view=c.view.id, number=1, kind="switch")
    delta = msgspec.structs.replace(diff(c.view, c.planned), digest=0)
    asked = members["r0.1"].told(m.Take(order=brief, delta=delta, epoch=1))
    assert asked == [m.Whole(member="r0.1", view=c.planned.id)]
    members["r2.1"] = Member("r2.1", 2)
    c.roster.add("r2.1", "a", "ready")
    (answer,) = [a for a in c.handle(1.0, asked[0]) if isinstance(a, m.Tell)]
    assert isinstance(answer.message, m.Take)
    assert answer.message.order == msgspec.structs.replace(brief, next=c.planned)
    members["r0.1"].told(answer.message)
    assert members["r0.1"].heard == 1
