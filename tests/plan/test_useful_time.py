"""What is predicted of useful time: against the planner's chain and simulator, and what it makes of a journal."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest

from outlast.core import events as ev
from outlast.core import reliability as rel
from outlast.core.policy import RunRecord
from outlast.plan._analytic import analyse
from outlast.plan._model import FailureClass, Job, Tier
from outlast.plan._simulate import simulate
from outlast.plan.beliefs_beside import fold, predicted_beside_observed, predicted_counts
from outlast.plan.run_beside import run_beside, worth_telling
from outlast.plan.useful_time import UsefulBeside, UsefulCosts, planned_useful, useful_beside, useful_note, useful_table

DAY_S = 86_400.0
COSTS = UsefulCosts(
    save_s=5.0, interval_s=600.0, durable_s=20.0, restart_s=120.0, stall_s=8.0, join_s=2.0, replaced_s=900.0,
    num_replicas=16,
)  # fmt: skip


class Seen(NamedTuple):
    """As the accounts have it."""

    ettr: float = 0.9
    ettr_95: tuple[float, float] | None = None
    failures: int = 0


def _job(costs: UsefulCosts, days: float, deaths: float, losses: float) -> Job:
    """The same fleet for the planner: replicas die and are outlasted, and now and then all are lost."""
    hours, many = days * 24, costs.num_replicas
    dies = FailureClass(
        name="dies", node_mtbf_h=many * hours / deaths, masked=1.0, detection_s=0.0, repair=1.0,
        repair_mean_h=costs.replaced_s / 3600, repair_median_h=costs.replaced_s / 3600 / 2, source="here",
    )  # fmt: skip
    lost = FailureClass(name="lost", node_mtbf_h=many * hours / losses, detection_s=0.0, source="here")
    near = Tier(name="disk", write_s=costs.save_s, lag_s=costs.durable_s, recovery_s=costs.restart_s)
    return Job(
        name="this run", classes=(dies, lost), parameters=1.0, accelerators=many, accelerators_per_node=1, days=days,
        endless=True, tiers=(near,), interval="fixed", interval_s=costs.interval_s, mask_stall_s=costs.stall_s,
        reshape_s=costs.join_s, swap_s=0.0, spares=0, min_share=1 / many, on_vacancy="shrink",
    )  # fmt: skip


@pytest.mark.parametrize(("deaths", "losses"), [(40.0, 10.0), (200.0, 60.0), (4.0, 200.0)])
def test_it_is_the_planner_s_number_for_the_same_fleet(deaths: float, losses: float) -> None:
    days = 30.0
    planned = planned_useful(COSTS, days * DAY_S, deaths, losses)
    job = _job(COSTS, days, deaths, losses)
    assert planned == pytest.approx(analyse(job).chain, abs=0.0005)
    assert planned == pytest.approx(simulate(job, 200, seed=1).ettr().mean, abs=0.0005)


def test_of_losses_alone_it_is_daly_s_exact_segment() -> None:
    alone = replace(COSTS, durable_s=0.0)
    month_s = 30 * DAY_S
    exact = float(rel.ettr(alone.interval_s, alone.save_s, month_s / 50, alone.restart_s))
    assert planned_useful(alone, month_s, 0.0, 50.0) == pytest.approx(exact, rel=1e-12)
    assert planned_useful(alone, month_s, 0.0, 0.0) == pytest.approx(600 / 605)


def test_a_fleet_of_one_outlasts_no_death_and_extremes_stay_shares() -> None:
    one = replace(COSTS, num_replicas=1)
    assert planned_useful(one, DAY_S, 5.0, 0.0) == planned_useful(one, DAY_S, 0.0, 0.0)
    endless = replace(COSTS, interval_s=math.inf)
    assert planned_useful(endless, DAY_S, 0.0, 0.0) == 1.0
    assert planned_useful(endless, DAY_S, 0.0, 1.0) == pytest.approx(1 / math.expm1(1), abs=0.01)
    for costs in (COSTS, endless):
        for count in (1e3, 1e6, 1e12):
            assert 0 <= planned_useful(costs, DAY_S, count, count) < 0.01
    assert planned_useful(COSTS, 0.0, 1.0, 1.0) == 0.0


def _events(days: float, deaths: int) -> list[ev.AnyEvent]:
    """Four replicas that train so long; a save of 2 s, and deaths that each hold training up for 3 s."""
    end_s = 100.0 + days * DAY_S
    events: list[ev.AnyEvent] = [
        ev.RunStarted(at_s=0.0, run_id="r", command=[], num_replicas=4, num_spares=0, signature={}, config={}),
        ev.ViewInstalled(at_s=99.0, epoch=1, n=1, members=[f"r{k}.0" for k in range(4)], cause="start", planned=False),
        ev.ViewFormed(at_s=100.0, epoch=1, n=1, step=0, roll_call_s=0.1),
        ev.CheckpointBegan(at_s=400.0, step=3, view=[1, 1], reason="first"),
        ev.CheckpointSaved(
            at_s=410.0, step=3, generation=1, view=[1, 1], num_writers=4, state_bytes=1, written_bytes=1, blocked_s=2.0,
            copied_s=1.0, durable_s=9.0, reason="first", url="file:///c",
        ),
    ]  # fmt: skip
    for number in range(deaths):
        at_s = 1000.0 + number * (end_s - 2000.0) / deaths
        name = f"r1.{number}"
        events += [
            ev.ReplicaExited(at_s=at_s, replica=name, cause="signal", detail="", noticed_by="a0"),
            ev.Recovery(
                at_s=at_s + 3, cause="signal", replica=name, noticed_by="a0", detect_s=0.5, downtime_s=3.0,
                microbatches_recomputed=0, lost_steps=0, step=9, view=[1, 2 + number],
            ),
            ev.JoinerCaughtUp(at_s=at_s + 60, replica=f"r1.{number + 1}", step=10, seconds=1.0),
        ]  # fmt: skip
    return [*events, ev.ProgressMade(at_s=end_s, view=[1, 1], stable=9, losses=[], step_s=1.0)]


def _beside(events: list[ev.AnyEvent], seen: Seen) -> tuple[UsefulBeside, RunRecord]:
    record = fold(events)
    return useful_beside(record, record.believed(events[-1].at_s), events, seen), record


def test_costs_are_what_the_run_has_measured() -> None:
    row, _ = _beside(_events(20.0, 6), Seen())
    assert (row.costs.save_s, row.costs.durable_s, row.costs.restart_s, row.costs.stall_s) == (2.0, 9.0, 100.0, 3.0)
    assert row.costs.interval_s == pytest.approx(20 * DAY_S - 2.0)  # one save in all, whatever is chosen now
    unsaved = [event for event in _events(20.0, 6) if not isinstance(event, ev.CheckpointSaved)]
    bare, record = _beside(unsaved, Seen())
    assert bare.costs.interval_s == record.believed(unsaved[-1].at_s).interval_s
    assert row.costs.replaced_s == pytest.approx((30.0 + 6 * 60.0) / 7)
    calm, record = _beside(_events(20.0, 0), Seen())
    assert calm.costs.stall_s == record.replacements().reshape_s  # as the run's own policies have it before any death
    # The prior alone decides how many failures there are; what was seen decides what each of them costs.
    assert calm.predicted == pytest.approx(row.predicted, abs=0.01)


def test_the_band_is_what_so_many_failures_would_cost() -> None:
    events = _events(20.0, 6)
    row, record = _beside(events, Seen())
    believed = record.believed(events[-1].at_s)
    assert row.low < row.predicted < row.high < 1
    begun = 20 * DAY_S / (20 * DAY_S + 100)
    many = predicted_counts(believed, 0.9875)
    assert row.low == pytest.approx(begun * planned_useful(row.costs, 20 * DAY_S, *many))
    deaths, losses = predicted_beside_observed(believed)
    assert (many[0] >= deaths.high, many[1] >= losses.high) == (True, True)


def test_a_surprise_is_an_interval_that_lies_wholly_outside() -> None:
    events = _events(20.0, 6)
    band = _beside(events, Seen())[0]
    below, across = (band.low - 0.2, band.low - 0.1), (band.low - 0.2, band.low + 0.001)
    for interval, surprise in ((None, False), (below, True), (across, False), ((band.high + 1e-4, 1.0), True)):
        row = _beside(events, Seen(ettr=0.5, ettr_95=interval, failures=6))[0]
        assert row.surprise is surprise
        assert ("SURPRISE" in useful_table(row).text()) is surprise
    assert "no interval yet" in useful_table(band).text()
    assert "takes two failures that were outlasted; so far there are 0" in useful_note(band)


def test_it_is_told_where_there_is_something_to_hold_against_it() -> None:
    titles = {table.title for table, _ in worth_telling(run_beside(_events(20.0, 6), Seen()))}
    assert "Useful time, predicted beside observed" in titles
    short = _events(0.05, 0)
    assert worth_telling(run_beside(short, Seen())) == []
    told = worth_telling(run_beside(short, Seen(ettr_95=(0.8, 0.95), failures=2)))
    assert [table.title for table, _ in told] == ["Useful time, predicted beside observed"]
    assert run_beside([], Seen()).useful is None
    assert worth_telling(run_beside([], Seen())) == []
