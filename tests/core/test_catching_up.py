"""What a joiner makes of what has arrived, in every order in which that can be."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from outlast.core.protocol import Member, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.catching_up import SILENT_S, CatchingUp, counts, tiled, unsaid_s
from outlast.core.protocol.step.loop_copies import LoopCopies
from outlast.errors import ViewAbandoned

GRACE_S = 2.0
SERVED = (1, 4)


@dataclass
class Donor:
    member: str
    flushed: ViewId | None = None
    ended: bool = False
    coming: bool = False


@dataclass
class Arrived:
    """A port that is told what it holds."""

    serving: tuple[int, int] = (0, 0)
    loaded: bool = False
    steps: list[int] = field(default_factory=list)
    streams: list[Donor] = field(default_factory=list)
    found: Literal["incomplete", "unfit", "whole"] = "incomplete"
    last: set[int] = field(default_factory=set)  # the steps of which senders say so
    said: list[Any] = field(default_factory=list)
    replayed: list[tuple[int, bool]] = field(default_factory=list)
    forgotten: int = 0

    def serve(self, serving: tuple[int, int]) -> None:
        self.serving, self.loaded, self.found = serving, False, "incomplete"

    def snapshot(self) -> Literal["incomplete", "unfit", "whole"]:
        return self.found

    def load(self) -> int:
        self.loaded = True
        return 5

    def outcome(self, step: int) -> Literal["incomplete", "whole", "last"]:
        return "incomplete" if step not in self.steps else "last" if step in self.last else "whole"

    def replay(self, step: int, *, late: bool) -> None:
        self.steps.remove(step)
        self.replayed.append((step, late))

    def keep_live(self) -> None:
        self.streams = [stream for stream in self.streams if not stream.ended]

    def over(self) -> None:
        self.forgotten += 1

    def ready(self) -> None: ...

    def say(self, messages: Any) -> None:
        self.said += messages


@pytest.fixture
def port() -> Arrived:
    return Arrived()


@pytest.fixture
def course(port: Arrived) -> CatchingUp:
    made = CatchingUp(Member("r3.1", 4), nullcontext(), port, GRACE_S)
    made.member.told(m.BeginServe(epoch=1, donors=("r0.1", "r1.1"), serve=SERVED))
    made.begin_turn()
    assert port.serving == SERVED
    return made


def test_it_loads_and_replays_in_order_and_stops_at_a_gap(course: CatchingUp, port: Arrived) -> None:
    port.steps = [5, 6, 8]
    course.advance()
    assert (port.replayed, port.said) == ([], [])
    port.found = "whole"
    course.advance()
    assert port.replayed == [(5, False), (6, False)]
    assert course.member.committed == 7
    assert port.said == [m.Ready(member="r3.1", step=7, serve=SERVED)], "at most a step behind"


def test_shares_of_different_steps_are_asked_for_again(course: CatchingUp, port: Arrived) -> None:
    port.found = "unfit"
    course.advance()
    assert port.said == [m.Rejoin(member="r3.1")]
    assert (port.serving, port.loaded) == ((0, 0), False)


def test_a_gap_that_no_new_view_fills_is_waited_out_once(course: CatchingUp, port: Arrived) -> None:
    port.found, port.steps = "whole", [8]
    port.streams = [Donor("r0.1", ended=True), Donor("r1.1")]
    course.advance()
    port.said.clear()
    for now_s in (10.0, 10.0 + GRACE_S):
        course.give_up_if_orphaned(now_s)
        assert port.said == []
    course.give_up_if_orphaned(10.1 + GRACE_S)
    assert port.said == [m.Rejoin(member="r3.1")]


def test_a_stream_that_ended_without_a_gap_is_forgotten(course: CatchingUp, port: Arrived) -> None:
    port.found = "whole"
    port.streams = [Donor("r0.1", ended=True), Donor("r1.1")]
    course.advance()
    port.said.clear()
    course.give_up_if_orphaned(10.0)
    course.give_up_if_orphaned(11.0 + GRACE_S)
    assert (port.said, [stream.member for stream in port.streams]) == ([], ["r1.1"])


@pytest.fixture
def entering(course: CatchingUp, port: Arrived) -> CatchingUp:
    """Caught up at step 5, and in view 2 of two members."""
    port.found = "whole"
    course.advance()
    course.member.told(m.Install(view=VIEW))
    course.member.next()
    return course


VIEW = View(id=ViewId(1, 2), members=("r0.1", "r3.1"))


def test_members_of_the_view_are_waited_for_and_others_for_a_while(entering: CatchingUp, port: Arrived) -> None:
    inside, outside = Donor("r0.1"), Donor("r1.1", flushed=ViewId(1, 1))
    port.streams = [inside, outside]
    entering.begin_drain(100.0)
    assert entering.drain_s(VIEW, 100.0 + 10 * SILENT_S) == 1.0
    inside.flushed = VIEW.id
    assert entering.drain_s(VIEW, 100.0) == pytest.approx(SILENT_S)
    assert entering.drain_s(VIEW, 100.0 + SILENT_S) == 0.0
    outside.ended = True
    assert entering.drain_s(VIEW, 100.0) == 0.0


def test_a_view_that_is_over_is_not_drained_for(entering: CatchingUp, port: Arrived) -> None:
    port.streams = [Donor("r0.1")]
    entering.begin_drain(0.0)
    entering.member.told(m.Notify(epoch=1, view=VIEW.id, cause="a death"))
    assert entering.drain_s(VIEW, 0.0) == 0.0
    with pytest.raises(ViewAbandoned):
        entering.drained(VIEW, late=False)
    assert port.forgotten == 1


def test_the_view_s_last_outcome_is_kept_and_said_to_be_late(entering: CatchingUp, port: Arrived) -> None:
    port.steps, port.last = [5, 6], {6}
    entering.drained(VIEW, late=True)
    assert port.replayed == [(5, False), (6, True)]
    assert (entering.late, entering.member.committed, entering.member.keeps_output) == (True, 7, False)
    entering.live()
    assert (entering.late, entering.member.keeps_output) == (False, True)


def test_a_last_outcome_that_was_not_the_last_after_all_is_applied(entering: CatchingUp, port: Arrived) -> None:
    """The view that was to follow it never came to be, and an older member went on."""
    port.steps, port.last = [5], {5}
    entering.replay(late=True)
    assert entering.late
    port.steps, port.last = [6], set()
    entering.drained(VIEW, late=True)
    assert port.replayed == [(5, True), (6, False)]
    assert (entering.late, entering.member.keeps_output) == (False, True)


def test_of_two_last_outcomes_the_newer_is_kept_and_the_older_applied(entering: CatchingUp, port: Arrived) -> None:
    """A view ended in a planned change that a death undid, and so did the next one before this member looked."""
    port.steps, port.last = [5, 6], {5, 6}
    entering.drained(VIEW, late=True)
    assert port.replayed == [(5, True), (6, True)]
    assert (port.steps, entering.member.committed, entering.late) == ([], 7, True)


@pytest.mark.parametrize(
    ("spans", "whole"),
    [
        ([(0, 4), (4, 8)], True),
        ([(4, 8), (0, 4), (0, 2), (3, 5)], True),
        ([(0, 2), (2, 4), (0, 4)], False),  # eight elements, and half of them twice: two of four slices, one of two
        ([(1, 8)], False),
        ([], False),
    ],
)
def test_slices_of_two_views_are_whole_where_they_leave_no_gap(spans: list[tuple[int, int]], whole: bool) -> None:
    assert tiled(spans, 8) is whole
    assert tiled([], 0)


def test_what_is_sent_before_its_serving_is_told_outlives_the_one_that_is_called_off() -> None:
    newer, gone = (1, 5), (1, 4)
    assert counts(newer, (0, 0), gone)
    assert counts(newer, newer, gone)
    assert not counts(gone, (0, 0), gone)
    assert not counts((0, 0), newer, gone)


def test_nobody_s_stream_is_waited_for() -> None:
    assert unsaid_s([], VIEW, 10.0, 0.0) == 0.0


def test_of_which_steps_a_member_keeps_what_the_loops_made_of_their_state() -> None:
    copies = LoopCopies()
    copies.flushed()
    assert copies.decided(3, feeding=False, last=False), "who was still catching up may lack its first step"
    assert copies.step == 3
    assert not copies.decided(4, feeding=False, last=False), "and two would be too many"
    assert copies.step is None
    assert copies.decided(5, feeding=True, last=False)
    copies.flushed()
    copies.flushed()  # a view in which nothing was committed
    assert copies.decided(6, feeding=False, last=False)
    assert not copies.decided(7, feeding=False, last=False)
    assert copies.decided(8, feeding=False, last=True), "whom the next view lets in may have read all but this one"
