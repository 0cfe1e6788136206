"""The order of a step and of its exchange, and the barrier after the last one, without anything that computes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import msgspec
import pytest

from outlast.core.protocol import Exchange, Header, Member, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.deciding import decide_step, leave
from outlast.core.protocol.step.effects import Act, AskAll, Seat, TellFleet
from outlast.core.protocol.step.exchange_order import ExchangeOrder
from outlast.core.protocol.step.host_order import HostOrder
from outlast.errors import ViewAbandoned

MEMBERS = ("r0.1", "r1.1")
VIEW = View(id=ViewId(1, 1), members=MEMBERS, start=True)


@pytest.fixture
def seat() -> Seat:
    """A member of two, who has computed what is its own of step 0."""
    member = Member("r0.1", 4, until=1)
    member.told(m.Install(view=VIEW))
    member.next()
    entry = member.roll(7, 0)
    member.called([entry, msgspec.structs.replace(entry, member="r1.1")])
    for leaf in (0, 1):
        member.computed(leaf)
        member.audits.computed(leaf, 10 + leaf, beside=False)
    return Seat(me="r0.1", host="h", device="", member=member, lock=nullcontext(), now_s=lambda: 0.0)


class Port:
    """Says one header, and takes what all said for the headers."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.commitments: Any = None

    def header(self) -> Any:
        return self.seat.member.header()

    def heard(self, said: Any, commitments: Any) -> Any:
        self.commitments = commitments
        return list(said.values()), None


def no_checks(*_: Any) -> Any:
    return None
    yield


def gone_through(course: Any) -> tuple[list[Any], Any]:
    """What was said and done, in order, and what it came to; r1.1 says an empty commitment, and a header."""
    done, reply = list[Any](), None
    while True:
        try:
            effect = course.send(reply)
        except StopIteration as end:
            return done, end.value
        reply = None
        if isinstance(effect, Act):
            done.append((effect.what, effect.leaves) if effect.leaves else effect.what)
        elif isinstance(effect, AskAll):
            ((name, mine),) = effect.words.items()
            done.append((effect.half, name))
            theirs: Any = Header(member="r1.1", step=0, view=VIEW.id, heard=0) if name == "header" else b""
            reply = {name: {"r0.1": mine, "r1.1": theirs}}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_what_an_audit_may_ask_for_is_said_before_the_exchange_and_drawn_after_it(seat: Seat, share: float) -> None:
    todo = seat.member.next()
    assert isinstance(todo, Exchange)
    seat.member.audits.share = share
    seat.member.audits.hosts = {"r0.1": "h", "r1.1": "other"}
    port = Port(seat)
    course: Any = decide_step(seat, cast(Any, None), todo, port, no_checks)
    done, (headers, ruling) = gone_through(course)
    audits = [("say", "prints"), "exchange", ("hear", "prints"), ("audit", (2, 3)), ("both", "header")]
    assert done == (audits if share else ["exchange", ("both", "header")])
    assert (port.commitments is not None) == bool(share)
    assert ([header.member for header in headers], ruling) == (list(MEMBERS), None)
    assert seat.member.decided


def test_who_is_done_says_so_once_all_have_passed_the_barrier_and_the_end_is_saved(seat: Seat) -> None:
    seat.member.committed = 1
    seat.member.next()
    course = leave(seat)
    assert next(course) == Act(what="save the end")
    assert course.send(None) == AskAll(1, {"final": 1})
    assert not seat.member.done
    assert course.send({"final": {"r0.1": 1, "r1.1": 1}}) == Act(what="settle the end")
    assert not seat.member.done
    assert course.send(None) == Act(what="say how far")
    assert (seat.member.done, seat.member.stable) == (True, 1), "what a heartbeat then says"
    told = course.send(None)
    assert isinstance(told, TellFleet)
    assert [type(message) for message in told.messages] == [m.Done]
    assert (seat.member.done, seat.member.stable) == (True, 1)


class Stages:
    """Writes down what is done; `breaks`: what ends the view."""

    def __init__(self) -> None:
        self.done, self.breaks = list[Any](), -1

    def scattered(self) -> None:
        self.done.append("scattered")

    def reduce(self, bucket: int) -> None:
        if self.breaks == bucket:
            raise ViewAbandoned("a peer has left")
        self.done.append(("reduce", bucket))

    def choose(self) -> None:
        self.done.append("choose")

    def gather(self, bucket: int) -> None:
        self.done.append(("gather", bucket))

    def check(self) -> None:
        self.done.append("check")


def test_buckets_are_reduced_in_order_then_gathered_and_then_checked() -> None:
    stages = Stages()
    order = ExchangeOrder(2, stages)
    awaited = []
    assert [order.reduces_before(bucket) for bucket in (0, 1)] == [False, True]
    while order.awaits is not None:
        awaited.append((order.awaits, order.bucket))
        order.arrived()
    assert awaited == [("sums", 0), ("sums", 1), ("slices", 0), ("slices", 1)]
    assert stages.done == [
        "scattered", ("reduce", 0), ("reduce", 1), "choose", ("gather", 0), ("gather", 1), "check",
    ]  # fmt: skip
    assert not order.reduces_before(9)


def test_a_bucket_whose_reduction_ends_the_view_is_still_awaited() -> None:
    """Under a backward that is only noted: whoever goes on afterwards must not take the bucket for reduced."""
    stages = Stages()
    order = ExchangeOrder(2, stages)
    order.arrived()
    stages.breaks = 1
    with pytest.raises(ViewAbandoned):
        order.arrived()
    assert (order.awaits, order.bucket) == ("sums", 1)


class HostStages:
    """Writes down what is done in two levels; `late`: what has not come yet."""

    def __init__(self, *late: Any) -> None:
        self.done, self.late, self.breaks = list[Any](), set(late), -1

    def near_offered(self, bucket: int) -> bool:
        return ("near", bucket) not in self.late

    def all_offered(self) -> bool:
        return "all" not in self.late

    def sums_here(self, bucket: int) -> bool:
        return ("sums", bucket) not in self.late

    def lane_here(self, bucket: int) -> bool:
        return ("lane", bucket) not in self.late

    def scattered(self) -> None:
        self.done.append("scattered")

    def send(self, bucket: int) -> None:
        self.done.append(("send", bucket))

    def reduce(self, bucket: int) -> None:
        if self.breaks == bucket:
            raise ViewAbandoned("a peer has left")
        self.done.append(("reduce", bucket))

    def bring(self, bucket: int) -> None:
        self.done.append(("bring", bucket))

    def gather(self, bucket: int) -> None:
        self.done.append(("gather", bucket))


def test_in_two_levels_all_is_done_that_can_be_and_gathered_at_the_end() -> None:
    stages = HostStages(("near", 1), ("lane", 0))
    order = HostOrder(2, stages)
    order.offer()
    assert stages.done == [("send", 0), "scattered", ("reduce", 0)]
    order.offer()
    stages.late.clear()
    rest, awaited = order.rest(), []
    for what, bucket in rest:
        awaited.append((what, bucket))
        assert order.ready() == (what == "near")
    assert awaited == [("near", 0), ("all", 0), ("brought", 0), ("brought", 1)]
    assert stages.done[3:] == [
        ("send", 1), ("reduce", 1), ("bring", 0), ("bring", 1), ("gather", 0), ("gather", 1),
    ]  # fmt: skip


def test_in_two_levels_nothing_is_reduced_before_all_have_offered_the_first_bucket() -> None:
    """Who brings me no sums may be a step behind, and would be handed what is overwritten from there on."""
    stages = HostStages("all", ("lane", 1))
    order = HostOrder(2, stages)
    order.offer()
    order.offer()
    assert stages.done == [("send", 0), ("send", 1)]
    rest = order.rest()
    assert [next(rest), next(rest)] == [("near", 0), ("all", 0)]
    stages.late.remove("all")
    assert next(rest) == ("lane", 1)
    assert stages.done[2:] == ["scattered", ("reduce", 0), ("reduce", 1), ("bring", 0)]


def test_in_two_levels_what_waits_is_named_by_the_first_bucket_that_does() -> None:
    stages = HostStages(("sums", 1))
    order = HostOrder(2, stages)
    order.offer()
    order.offer()
    rest = order.rest()
    assert [next(rest), next(rest), next(rest)] == [("near", 0), ("all", 0), ("sums", 1)]
    assert not order.ready(), "bucket 0 is brought already"


def test_in_two_levels_a_bucket_whose_reduction_ends_the_view_is_not_done() -> None:
    stages = HostStages()
    stages.breaks = 0
    order = HostOrder(1, stages)
    with pytest.raises(ViewAbandoned):
        order.offer()
    assert (order.sent, order.reduced, order.brought) == (1, 0, 0)
