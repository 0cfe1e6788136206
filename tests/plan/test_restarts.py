"""Restarts: the roster of a run and the simulator ask one policy, with the same counts, and carry out the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.policy import RestartPolicy
from outlast.core.protocol.fleet.roster import Roster, Settings
from outlast.errors import ConfigError
from outlast.plan import FailureClass, Job, Tier, analyse, simulate
from outlast.plan._compiled import compile_job, default_policies, replace_job
from outlast.plan._kernel import Kernel
from outlast.plan._restarts import Restarts
from outlast.plan._single import Single
from outlast.plan._source import Renewals

ROW = np.zeros(1, dtype=np.intp)
JOB = Job(
    classes=(FailureClass(name="death", node_mtbf_h=40.0, masked=1.0),),
    accelerators=64, days=5.0, interval="fixed", min_share=0.01, tiers=(Tier(name="store", write_s=2.0),),
)  # fmt: skip


def roster(**settings: Any) -> Roster:
    made = Roster(Settings(**settings))
    made.agent_here("a0", 1, 1)
    list(made.vacancies())
    return made


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(0, 12))
def test_as_many_places_are_filled_again_as_in_a_run(groups: list[int], most: int) -> None:
    """Each number of a group's deaths at once, one replica after the other: how many live then."""
    run, here = roster(num_replicas=6, max_restarts=most), Restarts(RestartPolicy(most=most), 1)
    alone, gone = Restarts(RestartPolicy(most=most), 1), 0.0
    for number in groups:
        live = [name for slot in range(6) if (name := run.living(f"r{slot}"))]
        for name in live[:number]:
            run.drop(name, 1.0)
        list(run.vacancies())
        ended = float(min(number, len(live)))
        unfilled = here.unfilled(ROW, np.array([ended])).item()
        assert unfilled == alone.unfilled_one(ended)
        gone += unfilled
        assert sum(bool(run.living(f"r{slot}")) for slot in range(6)) == 6 - gone
        assert run.restarts == here.used.item() == alone.used.item()


@given(st.lists(st.floats(0.5, 90.0), min_size=1, max_size=12))
def test_a_delay_follows_the_deaths_of_the_last_minute_as_in_a_run(gaps_s: list[float]) -> None:
    run, here = roster(num_replicas=1, backoff_s=2.0, max_restarts=99), Restarts(RestartPolicy(backoff_s=2.0), 1)
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        run.drop(run.living("r0"), now_s)
        ((_, _, delay_s),) = run.vacancies()
        assert here.delay_s(ROW, np.array([now_s])).item() == delay_s


@pytest.mark.parametrize("engine", [Kernel, Single])
@pytest.mark.parametrize("most", [0, 7, 40, 1000])
def test_a_job_loses_the_machines_that_nobody_starts_again(engine: type[Kernel], most: int) -> None:
    job = replace_job(JOB, max_restarts=most)
    compiled, rng = compile_job(job), np.random.default_rng(most)
    policies = default_policies(job, compiled.loses_work, (0.0,))
    made = engine(compiled, policies, Renewals(compiled.classes, compiled.mean_s, 1, rng), rng, 1)
    found, machines = made.run(0), made.machines
    failures = found.failures.sum()
    assert made.restarts.used.item() == min(failures, most)
    assert machines.gone.item() == max(0, failures - most)
    assert (machines.running + machines.spare + machines.gone).item() == job.num_nodes
    assert (found.accounts_s[4].item() > 0) == (failures > most), "it goes on with fewer"


def test_the_last_one_that_is_not_started_again_ends_the_job() -> None:
    job = replace_job(JOB, accelerators=8, max_restarts=0, days=30.0)
    found = simulate(job, 64, seed=1)
    assert (found.failures.sum(axis=0) == 1).all()
    assert (found.rollbacks == 1).all(), "nobody is left that holds the state"
    assert found.breakdown()["idle"] > 0.9


def test_spares_take_the_places_first_and_who_must_be_complete_stops_then() -> None:
    job = replace_job(JOB, spares=3, max_restarts=2, min_share=1.0, days=30.0)
    found = simulate(job, 64, seed=1)
    assert (found.waits == 1).all()
    assert found.breakdown()["idle"] > 0.8
    assert found.breakdown()["degraded"] == 0


def test_who_is_asked_to_go_costs_no_restart_and_nobody_who_is_only_slow_or_wrong_does() -> None:
    classes = (
        FailureClass(name="told", node_mtbf_h=100.0, predicted=1.0),
        FailureClass(name="slow", node_mtbf_h=100.0, slow_factor=0.5, slow_s=60.0),
        FailureClass(name="wrong", node_mtbf_h=100.0, silent=True),
    )
    job = replace_job(JOB, classes=classes)
    none = replace_job(job, max_restarts=0)
    assert (simulate(none, 16, seed=2).accounts_s == simulate(job, 16, seed=2).accounts_s).all()
    assert analyse(none).outside == analyse(job).outside


def test_more_restarts_never_hurt_and_the_chain_says_where_it_has_none() -> None:
    ettrs = [simulate(replace_job(JOB, max_restarts=most), 64, seed=3).ettr().mean for most in (0, 8, 16, 1e6)]
    assert ettrs == sorted(ettrs)
    assert ettrs[0] < ettrs[-1] - 0.2

    def told(most: float) -> bool:
        return any("restarts are expected" in reason for reason in analyse(replace_job(JOB, max_restarts=most)).outside)

    assert (told(16), told(100), told(np.inf)) == (True, False, False)
    with pytest.raises(ConfigError, match="max_restarts"):
        replace_job(JOB, max_restarts=-1)


def test_the_policy_replaced_empties_places_in_the_run_and_in_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def living() -> int:
        run = roster(num_replicas=3)
        run.drop("r1.1", 10.0)
        list(run.vacancies())
        return sum(bool(run.living(f"r{slot}")) for slot in range(3))

    def degraded() -> list[float]:
        return [simulate(JOB, number, seed=2).breakdown()["degraded"] for number in (1, 12)]

    assert (living(), degraded()) == (3, [0.0, 0.0])
    own = RestartPolicy.decide

    def never(self: Any, *, again: Any = True, **counts: Any) -> Any:
        found = own(self, again=again, **counts)
        return type(found)(start=(found.start & False) | np.logical_not(again), delay_s=found.delay_s)

    monkeypatch.setattr(RestartPolicy, "decide", never)
    assert living() == 2
    assert min(degraded()) > 0.1
