"""A small fleet's costs from the accounts of others, and the job that is held against measured fleets."""

from __future__ import annotations

import random

import pytest

from outlast.core import events as ev
from outlast.errors import ConfigError
from outlast.plan import FailureClass, Job, Tier, simulate
from outlast.plan._compiled import replace_job
from outlast.plan.fleet_costs import FleetCosts, fleet_costs, fleet_job, struck_fleet

COSTS = FleetCosts(
    stall_s=0.4, empty_s=4.0, usual_empty_s=3.5, restart_s=3.0, regrow_s=0.5, write_s=0.03, lag_s=0.2, step_s=0.3,
    outlasted=90, lost=9,
)  # fmt: skip


def view(at_s: float, n: int, *members: str) -> list[ev.AnyEvent]:
    return [
        ev.ViewInstalled(at_s=at_s, epoch=1, n=n, members=list(members), cause="", planned=False),
        ev.ViewFormed(at_s=at_s, epoch=1, n=n, step=0, roll_call_s=0.0),
    ]


def died(at_s: float, who: str) -> ev.AnyEvent:
    return ev.ReplicaExited(at_s=at_s, replica=who, cause="signal", detail="", noticed_by="agent a0", step=1)


def progress(at_s: float, **seconds: float) -> ev.AnyEvent:
    return ev.ProgressMade(at_s=at_s, view=[1, 1], stable=1, losses=[], step_s=0.3, committed=2, seconds=seconds)


def test_costs_are_put_down_to_the_fault_that_they_follow() -> None:
    run = ev.RunStarted(at_s=0.0, run_id="", command=[], num_replicas=2, num_spares=0, signature={}, config={})
    events = [
        run, died(0.5, "r1.0"), *view(1.0, 1, "r0.1", "r1.1"),
        died(10.0, "r1.1"), *view(10.2, 2, "r0.1"), progress(11.0, recovery=0.2, lost=0.1, degraded=0.4),
        *view(14.0, 3, "r0.1", "r1.2"), progress(14.5, recovery=0.1),
        died(20.0, "r0.1"), died(20.1, "r1.2"), ev.FleetGone(at_s=20.2, step=9, detail=""),
        *view(22.0, 4, "r0.2"), progress(24.0, recovery=3.0, degraded=0.7), *view(25.0, 5, "r0.2", "r1.3"),
        progress(26.0, recovery=0.2, degraded=9.0),
    ]  # fmt: skip
    found = fleet_costs([events])
    assert (found.outlasted, found.lost) == (1, 1), "who dies before the start, or with all others, is none"
    assert found.stall_s == pytest.approx(0.2 + 0.1 + 0.1 + 0.2)
    assert (found.restart_s, found.regrow_s, found.empty_s) == (3.0, 0.7, 4.0)
    with pytest.raises(ConfigError, match="struck by nothing"):
        fleet_costs([events[:4]])


def one_run(rng: random.Random, wall_s: float, gap_s: float, interval_s: float) -> tuple[float, int]:
    """By hand: three replicas, one struck at a time, each empty for `empty_s`; with nobody left all goes back."""
    now = work = kept = down = 0.0
    back: list[float] = []
    losses, waiting = 0, False
    dt = 0.02
    while now < wall_s:
        now += dt
        back = [at for at in back if at > now]
        if waiting:
            if len(back) < 3:
                waiting, down = False, COSTS.restart_s + COSTS.regrow_s
            continue
        running = 3 - len(back)
        if down > 0:
            down -= dt
        else:
            work += dt * running / 3
            if work - kept >= interval_s * 1.0:
                kept, down = work, COSTS.write_s
        if rng.random() < dt / gap_s * running / 3:
            if running == 1:
                losses, waiting, work = losses + 1, True, kept
            down = max(down, COSTS.stall_s) if running > 1 else 0.0
            back.append(now + COSTS.empty_s)
    return work / wall_s, losses


def test_the_last_one_that_holds_the_state_is_masked_by_nobody() -> None:
    """Against a run by hand that knows nothing of the simulator; without the rule no work is ever lost."""
    rng, runs, wall_s, gap_s = random.Random(4), 40, 240.0, 4.0
    mine = [one_run(rng, wall_s, gap_s, 6.0) for _ in range(runs)]
    costs = FleetCosts(
        **{name: getattr(COSTS, name) for name in COSTS.__slots__} | {"usual_empty_s": 4.0, "lag_s": 0.0}
    )
    job = fleet_job(costs, {"one": wall_s / gap_s}, replicas=3, wall_s=wall_s, min_s=0.5)
    found = simulate(replace_job(job, interval="fixed", interval_s=6.0), 400, seed=2)
    assert found.rollbacks.mean() == pytest.approx(sum(m[1] for m in mine) / runs, rel=0.25)
    assert found.ettr().mean == pytest.approx(sum(m[0] for m in mine) / runs, abs=0.03)
    assert found.rollbacks.mean() > 1


def test_one_replication_by_itself_goes_by_the_same_rule() -> None:
    job = replace_job(
        fleet_job(COSTS, {"one": 90.0}, replicas=3, wall_s=240.0, min_s=0.5), interval="fixed", interval_s=6.0
    )
    alone = [int(simulate(job, 1, seed=seed).rollbacks[0]) for seed in range(60)]
    assert sum(alone) / 60 == pytest.approx(float(simulate(job, 400, seed=3).rollbacks.mean()), rel=0.35)
    assert sum(alone) > 30


def test_a_fleet_is_predicted_from_costs_and_strikes() -> None:
    struck, calm = (
        simulate(fleet_job(COSTS, {"one": 20.0, "all": a}, replicas=3, wall_s=1800.0, min_s=0.5), 32)
        for a in (20.0, 1.0)
    )
    assert struck.ettr().mean < calm.ettr().mean < 1
    assert struck.rollbacks.mean() == pytest.approx(20.0, rel=0.2)


def test_a_fleet_that_is_struck_at_known_moments_differs_by_its_costs_alone() -> None:
    """One of three dies at 10 s and all do at 21.3 s: by hand, with a save each 2 s of training and no cost of one."""
    costs = FleetCosts(
        stall_s=0.5, empty_s=3.0, usual_empty_s=3.0, restart_s=4.0, regrow_s=1.0, write_s=0.0, lag_s=0.0, step_s=0.1,
        outlasted=9, lost=9,
    )  # fmt: skip
    strikes = [(10.0, "one"), (21.3, "all")]
    job = fleet_job(costs, {"one": 1.0, "all": 1.0}, replicas=3, wall_s=60.0, min_s=0.5)
    found = struck_fleet(replace_job(job, interval="fixed", interval_s=2.0), strikes, 50, seed=1)
    assert set(found.rollbacks.tolist()) == {1}
    work, recovery, degraded = (found.breakdown()[name] * 60.0 for name in ("productive", "recovery", "degraded"))
    assert recovery == pytest.approx(0.5 + 5.0)
    assert degraded == pytest.approx(2.5 / 3, abs=0.01)
    assert found.breakdown()["lost"] * 60.0 == pytest.approx(0.8, abs=0.01), "saves at 20 s of training"
    assert work == pytest.approx(60.0 - recovery - degraded - 0.8, abs=0.02)
    with pytest.raises(ValueError, match="not in"):
        struck_fleet(job, [(1.0, "none of these")], 5, seed=1)


def test_a_rule_that_must_withstand_a_liar_waits_and_is_short_of_nobody() -> None:
    strikes = {"one": 20.0, "all": 2.0}
    mean = fleet_job(COSTS, strikes, replicas=3, wall_s=240.0, min_s=0.5)
    robust = fleet_job(COSTS, strikes, replicas=3, wall_s=240.0, min_s=0.5, lying=1)
    assert [c.repair for c in mean.classes] == [1.0, 0.0]
    assert [c.repair for c in robust.classes] == [0.0, 0.0]
    assert simulate(mean, 60, seed=1).breakdown()["degraded"] > 0.03
    assert simulate(robust, 60, seed=1).breakdown()["degraded"] == 0.0
    alone = fleet_job(COSTS, strikes, replicas=1, wall_s=240.0, min_s=0.5)
    assert [c.masked for c in alone.classes] == [0.0, 0.0]
    with pytest.raises(ConfigError, match="nothing struck"):
        fleet_job(COSTS, {"one": 0.0}, replicas=3, wall_s=240.0, min_s=0.5)


def test_saves_are_as_dense_as_the_runs_setting_allows_and_count_on_an_end_only_where_there_is_one() -> None:
    item = FailureClass(name="all", node_mtbf_h=30 / 3600)
    job = Job(
        classes=(item,), accelerators=1, accelerators_per_node=1, days=240 / 86_400, interval="adaptive",
        tiers=(Tier(name="disk", write_s=0.05, recovery_s=3.0),), checkpoint_min_s=0.5,
    )  # fmt: skip
    dense, sparse = (simulate(replace_job(job, checkpoint_min_s=s), 80, seed=1).breakdown() for s in (0.5, 60.0))
    assert dense["checkpoint"] > 2 * sparse["checkpoint"]
    assert dense["lost"] < sparse["lost"]
    ended, endless = (simulate(replace_job(job, endless=flag), 80, seed=1).breakdown() for flag in (False, True))
    assert ended["checkpoint"] != endless["checkpoint"], "a whole number of saves fits what is left"
