"""Members that wait in a view that is held back: what they compare before somebody is fed there, or let in."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from outlast.core.policy import Guards, fresh_state
from outlast.core.protocol import Member, Order, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.effects import Act, AskAll, Seat, TellFleet
from outlast.core.protocol.step.forming import take_orders
from outlast.core.protocol.step.verdict import StateDifference, StepEvidence
from outlast.errors import Evicted, OutlastError, StateDiverged, ViewAbandoned

WATCHED = Guards(nonfinite="off", agreement=1)


def diverged(view: View, found: StateDifference) -> OutlastError:
    return StateDiverged(f"{found.differing}, {'untrained' if found.untrained else 'trained'}")


class Waiting:
    """One member of a held view, who has heard of one order; `start`: it is the run's first."""

    def __init__(self, me: str, members: str = "abc", *, start: bool = False) -> None:
        self.view = View(id=ViewId(1, 2), members=tuple(members), held=True, start=start)
        member = Member(me, 4, until=9)
        member.state = "member"
        member.told(m.Install(view=self.view))
        member.next()
        entry = member.roll(0, 0)
        self.entries = [msgspec.structs.replace(entry, member=name) for name in members]
        member.called(self.entries)
        self.seat = Seat(me=me, host="h", device="", member=member, lock=nullcontext(), now_s=lambda: 0.0)
        self.carried: list[Order] = []
        assert member.next().why == "held back"  # type: ignore[union-attr]

    def hear(self, kind: Any, members: str = "") -> None:
        after = View(id=ViewId(1, 3), members=tuple(members)) if members else None
        order = Order(view=self.view.id, number=1, kind=kind, next=after, joiner="" if members else "j")
        self.seat.member.told(m.Take(epoch=1, order=order))

    def carry_out(self, order: Order, view: View) -> None:
        self.carried.append(order)

    def turn(self, states: dict[str, int], guards: Any = None) -> list[Any]:
        """What is said and done in the turn, in order, where all have heard and say these of their states."""
        guards = SimpleNamespace(policy=guards, state=fresh_state(WATCHED))
        found = StepEvidence(view=self.view, parts=lambda: (("w", 1),), diverged=diverged, entries=self.entries)
        self.said: list[Any] = []
        course: Any = take_orders(self.seat, guards, found, lambda: states[self.seat.me], self.carry_out)
        reply: Any = None
        while True:
            try:
                effect = course.send(reply)
            except StopIteration:
                return self.said
            reply = None
            if isinstance(effect, Act):
                self.said.append(effect.what)
            elif isinstance(effect, TellFleet):
                self.said.append([type(message).__name__ for message in effect.messages])
            elif isinstance(effect, AskAll):
                ((name, mine),) = effect.words.items()
                self.said.append(name)
                reply = {name: dict.fromkeys(self.view.members, mine)}
                if name == "states":
                    assert mine == states[self.seat.me]
                    reply = {name: states}


ALIKE = {"a": 7, "b": 7, "c": 7}


def test_states_are_compared_before_somebody_is_fed_and_before_it_is_let_in() -> None:
    fed, let_in = Waiting("a"), Waiting("a")
    assert fed.turn(ALIKE) == ["rest"]
    fed.hear("serve")
    let_in.hear("switch", "abcj")
    for waiting in (fed, let_in):
        assert waiting.turn(ALIKE) == ["orders", "states"]
        assert len(waiting.carried) == 1


def test_nothing_is_compared_where_nobody_comes_or_nobody_could_differ() -> None:
    over, alone = Waiting("a"), Waiting("a", "a")
    over.hear("switch", "ab")
    alone.hear("serve")
    for waiting in (over, alone):
        assert waiting.turn(ALIKE) == ["orders"]
        assert len(waiting.carried) == 1


def test_who_differs_from_most_goes_and_feeds_nobody() -> None:
    wrong = {"a": 7, "b": 8, "c": 7}
    for me, end in (("a", ViewAbandoned), ("b", Evicted), ("c", ViewAbandoned)):
        waiting = Waiting(me)
        waiting.hear("serve")
        with pytest.raises(end):
            waiting.turn(wrong, WATCHED)
        assert waiting.said[:4] == ["orders", "states", "parts", ["Judged"]]
        assert waiting.carried == []


@pytest.mark.parametrize("start", [False, True])
def test_where_it_cannot_be_told_who_is_right_nobody_is_fed_and_the_run_ends(start: bool) -> None:
    """Also in the run's first view, which a robust rule may hold back: its members were alike when it began."""
    waiting = Waiting("a", "ab", start=start)
    waiting.hear("serve")
    with pytest.raises(StateDiverged, match=", trained"):
        waiting.turn({"a": 7, "b": 8}, WATCHED)
    assert waiting.carried == []


def test_who_cannot_tell_is_not_compared() -> None:
    waiting = Waiting("a")
    waiting.hear("serve")
    assert waiting.turn({"a": 7, "b": 0, "c": 7}, WATCHED) == ["orders", "states"]
    assert [order.joiner for order in waiting.carried] == ["j"]


def test_a_view_that_ends_meanwhile_carries_nothing_out() -> None:
    waiting = Waiting("a")
    waiting.hear("serve")
    waiting.seat.member.told(m.Notify(view=waiting.view.id, cause="a death", epoch=1))
    with pytest.raises(ViewAbandoned):
        waiting.turn(ALIKE)
    assert waiting.carried == []


@pytest.mark.parametrize(("committed", "goes"), [(8, True), (9, False)])
def test_who_is_asked_to_go_and_has_made_the_last_step_says_nothing_of_it(committed: int, goes: bool) -> None:
    """It ends anyway, as soon as the closing barrier is passed; a coordinator would take it for a stop before that."""
    member = Waiting("a").seat.member
    member.committed = committed
    assert (member.leave() == [m.Leaving(member="a")]) == goes
    assert member.leaving
    assert member.hello("a0", {}, "", "").leaving == goes
