"""What a coordinator writes down of steps, and what its successors make of that: on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.core.protocol import StepTime
from outlast.runtime.coordinator._bookkeeping import Bookkeeping
from outlast.runtime.coordinator._record_summary import JournalFold
from outlast.runtime.transport.frames import Heartbeat


class Told:
    """A journal as a coordinator finds it, and what the next ones write. `crash`: what was not written is lost."""

    def __init__(self) -> None:
        self.now_s, self.entries = 10.0, list[ev.AnyEvent]()
        self.books = self.taken_over()

    def write(self, kind: str, **fields: Any) -> None:
        self.entries.append(msgspec.convert({"kind": kind, "at_s": 40.0 + self.now_s, **fields}, ev.AnyEvent))

    def taken_over(self) -> Bookkeeping:
        fold = JournalFold(RunConfig(replicas=2))
        for entry in self.entries:
            fold.take(ev.decode(ev.encode(entry)))
        self.books = Bookkeeping(fold.copy().progress, self.write, 1.0, 40.0, lambda: self.now_s)
        return self.books

    def beat(self, now_s: float, **members: list[StepTime]) -> None:
        """What members tell, and a turn of the coordinator's."""
        self.now_s = now_s
        for member, steps in members.items():
            self.books.steps(member.replace("_", "."), steps)
        self.books.tell(0)

    @property
    def stalls(self) -> list[ev.Stall]:
        return [entry for entry in self.entries if isinstance(entry, ev.Stall)]


def held_up(phase: Phase, late_s: float = 0.0) -> list[StepTime]:
    """A step of 0.1 s, and one that took 2.2 s longer, ended 13.3 s after the start and was held up in this phase."""
    usual = StepTime(step=3, end_s=11.0 + late_s, took_s=0.1)
    return [usual, StepTime(step=4, end_s=13.3 + late_s, took_s=2.3, stalled_s=2.2, phase=phase)]


STALL = ev.Stall(
    at_s=pytest.approx(53.3),
    step=4,
    seconds=pytest.approx(2.2),
    usual_s=pytest.approx(0.1),
    replica="",
    phase="gathered",
)


def test_a_stall_is_told_once_however_many_coordinators_die_before_it_is() -> None:
    """A coordinator waits until all have told the step; its successors had it counted, and never told of it."""
    run = Told()
    run.beat(13.5, r0_1=held_up(Phase.GATHERED))
    assert run.stalls == []
    for now_s in (14.5, 15.5):
        run.taken_over()
        run.beat(now_s)
        assert run.stalls == []
    run.taken_over()
    run.beat(15.6, r0_1=held_up(Phase.GATHERED))  # which members do again to a new one
    run.beat(18.5)
    assert run.stalls == []
    run.beat(18.7)
    assert run.stalls == [STALL]
    run.taken_over()
    run.beat(19.0, r0_1=held_up(Phase.GATHERED))
    run.beat(30.0)
    assert run.stalls == [STALL]
    assert sum(e.seconds.get("stalled", 0.0) for e in run.entries if isinstance(e, ev.ProgressMade)) == pytest.approx(
        2.2
    )


def test_who_did_not_wait_is_known_of_a_stall_that_another_coordinator_heard_of() -> None:
    for heard_by_the_first in (True, False):
        run = Told()
        run.beat(13.5, r0_1=held_up(Phase.GATHERED))
        if heard_by_the_first:
            run.beat(13.6, r1_1=held_up(Phase.BODY, 0.01))
        run.taken_over()
        if not heard_by_the_first:
            run.beat(14.0, r1_1=held_up(Phase.BODY, 0.01))
        run.beat(14.5)
        run.taken_over()
        run.beat(20.0)
        assert [(stall.step, stall.replica, stall.phase) for stall in run.stalls] == [(4, "r1.1", "body")]


def changed(outage_s: float, end_s: float = 16.1) -> list[StepTime]:
    """Two steps of 0.1 s; the view changed before the second, which ended then."""
    usual = StepTime(step=3, end_s=end_s - 0.1 - outage_s, took_s=0.1)
    return [usual, StepTime(step=4, end_s=end_s, took_s=0.1 + outage_s, outage_s=outage_s, members=2, first=True)]


def test_a_change_of_view_that_took_long_and_mended_no_fault_is_told() -> None:
    """A member that was stopped as a new coordinator changed the view by plan: 4.4 s of recovery stood in the account,
    and no entry told of them."""
    run = Told()
    run.beat(16.2, r0_1=changed(4.4), r1_1=changed(4.38, 16.12))
    run.taken_over()
    run.beat(16.4, r0_1=changed(4.4), r1_1=changed(4.38, 16.12))
    run.beat(30.0)
    assert [(s.step, s.replica, s.phase, round(s.seconds, 3)) for s in run.stalls] == [(4, "", "connect", 4.4)]
    assert run.stalls[0].usual_s == pytest.approx(0.1)


def test_a_change_of_view_is_told_once_where_a_recovery_tells_of_it() -> None:
    """Also where the recovery was told by a coordinator that died before it had told of the step."""
    recovery = {
        "cause": "signal", "replica": "r1.1", "noticed_by": "agent", "detect_s": 0.0, "downtime_s": 4.5,
        "microbatches_recomputed": 0, "lost_steps": 0, "step": 4, "view": [1, 2], "detail": "",
    }  # fmt: skip
    for counted_by_the_first in (True, False):
        run = Told()
        if counted_by_the_first:
            run.beat(16.2, r0_1=changed(4.4))
        run.write("recovery", **recovery)
        run.books.wrote("recovery", recovery)
        run.taken_over()
        run.beat(16.4, r0_1=changed(4.4))
        run.beat(30.0)
        assert run.stalls == []


def test_a_short_change_of_view_is_no_news() -> None:
    run = Told()
    run.beat(16.2, r0_1=changed(0.3))
    run.beat(30.0)
    assert run.stalls == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_json_cannot_hold_leaves_the_journal_as_it_was(loss: float) -> None:
    """A member that tells of one is faulty; what it said made the run's whole record unreadable."""
    run = Told()
    run.books.heard(Heartbeat(sender="r0.1", sent_s=16.0, losses=((2, 0.5), (3, loss))))
    run.beat(16.2, r0_1=changed(0.0))
    entries = [ev.decode(ev.encode(entry)) for entry in run.entries]
    assert [entry.losses for entry in entries if isinstance(entry, ev.ProgressMade)] == [[(2, 0.5)]]
