"""When a fault is told, and with what downtime."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.core.protocol import ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.reports import Reports

VIEW = ViewId(1, 2)


def mended(told: list[dict[str, Any]], *, of_view: bool = True) -> Reports:
    """r1.1 was alive at 10.0 and noticed at 10.5; r0.1 left its view then, and computes again at 10.7."""
    reports = Reports(lambda kind, **fields: told.append({"kind": kind, **fields}))
    reports.committed(9.9, 10.0)
    gone = m.Exited(member="r1.1", cause="signal", last_alive_s=10.0, noticed_at_s=10.5)
    reports.exited(gone, 40, True, of_view)
    reports.formed["r0.1"] = m.Formed(member="r0.1", view=VIEW, step=40, left_at_s=10.5, formed_at_s=10.7)
    told.clear()
    reports.recoveries(VIEW)
    return reports


def test_a_recovery_is_told_at_the_first_commit_with_the_time_since_the_last_one() -> None:
    told: list[dict[str, Any]] = []
    reports = mended(told)
    assert told == []
    assert reports.committed(10.0, 10.8)
    reports.resumed()
    (recovery,) = told
    assert recovery["downtime_s"] == pytest.approx(0.8)
    assert recovery["detect_s"] == pytest.approx(0.5)
    assert not reports.committed(10.8, 10.9)


def test_the_commit_may_be_known_before_the_last_member_said_that_it_had_formed() -> None:
    told: list[dict[str, Any]] = []
    reports = Reports(lambda kind, **fields: told.append({"kind": kind, **fields}))
    gone = m.Exited(member="r1.1", cause="signal", last_alive_s=10.0, noticed_at_s=10.5)
    reports.exited(gone, 40, True, True)
    assert not reports.committed(10.0, 10.8)
    assert not reports.committed(10.8, 10.9)
    reports.formed["r0.1"] = m.Formed(member="r0.1", view=VIEW, step=40, left_at_s=10.5, formed_at_s=10.7)
    reports.recoveries(VIEW)
    assert told[-1]["kind"] == "recovery"
    assert told[-1]["downtime_s"] == pytest.approx(0.8)


def test_a_fault_that_interrupted_nobody_is_told_at_once_without_downtime() -> None:
    told: list[dict[str, Any]] = []
    mended(told, of_view=False)
    assert [(event["kind"], event["downtime_s"]) for event in told] == [("recovery", 0.0)]


def test_a_run_that_ends_before_the_next_commit_tells_what_it_knows() -> None:
    told: list[dict[str, Any]] = []
    reports = mended(told)
    reports.end()
    reports.end()
    assert [event["downtime_s"] for event in told] == [pytest.approx(0.2)]


@pytest.mark.parametrize(("step", "lost"), [(40, 0), (23, 17)])
def test_a_spare_that_was_behind_and_takes_the_last_members_place_costs_the_steps_between(step: int, lost: int) -> None:
    told: list[dict[str, Any]] = []
    reports = Reports(lambda kind, **fields: told.append({"kind": kind, **fields}))
    reports.committed(9.9, 10.0)
    reports.exited(m.Exited(member="r1.1", cause="signal", last_alive_s=10.0, noticed_at_s=10.5), 40, True, True)
    reports.fleet_lost(reports.steps)
    reports.formed["r0.1"] = m.Formed(member="r0.1", view=VIEW, step=step, left_at_s=10.5, formed_at_s=10.7)
    reports.recoveries(VIEW)
    reports.end()
    assert [event["lost_steps"] for event in told if event["kind"] == "recovery"] == [lost]


def test_nothing_waited_for_who_came_back_after_the_last_step() -> None:
    for steps, downtime_s in ((40, 0.0), (41, 0.2)):
        told: list[dict[str, Any]] = []
        mended(told).end(steps)
        assert [event["downtime_s"] for event in told] == [pytest.approx(downtime_s)]


def test_a_death_after_the_view_had_worked_is_not_told_with_what_that_view_had_cost() -> None:
    told: list[dict[str, Any]] = []
    reports = mended(told)
    reports.committed(10.0, 10.8)
    reports.resumed()
    told.clear()
    reports.exited(m.Exited(member="r2.1", cause="signal", last_alive_s=20.0, noticed_at_s=20.1), 400, True, True)
    reports.recoveries(VIEW)  # training was over: no view had to follow
    reports.end(400)
    (recovery,) = [event for event in told if event["kind"] == "recovery"]
    assert (recovery["replica"], recovery["step"], recovery["downtime_s"]) == ("r2.1", 400, 0.0)
    assert recovery["microbatches_recomputed"] == 0


def test_steps_of_a_fleet_that_is_lost_again_before_it_had_formed_a_view_are_counted_once() -> None:
    told: list[dict[str, Any]] = []
    reports = Reports(lambda kind, **fields: told.append({"kind": kind, **fields}))
    for step in (40, 0):
        reports.exited(m.Exited(member=f"r0.{step}", cause="signal", noticed_at_s=10.5), step, True, True)
        reports.fleet_lost(step)
    reports.formed["r0.3"] = m.Formed(member="r0.3", view=VIEW, step=25, left_at_s=0.0, formed_at_s=10.7)
    reports.recoveries(VIEW)
    reports.end()
    assert [event["lost_steps"] for event in told if event["kind"] == "recovery"] == [15, 15]
