"""What is done about machines that are lost while no spare is there: one policy, of one run and of many."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core import events as ev
from outlast.core.policy import Replacements, RunRecord, VacancyDecision, VacancyPolicy, VacancyState
from outlast.errors import ConfigError
from outlast.plan import FailureClass, Job, Tier, _simulate, analyse, simulate
from outlast.plan._compiled import replace_job
from outlast.plan._kernel import Kernel
from outlast.plan._machines import Machines

SECONDS = st.floats(0, 1e5)
KINDS = st.sampled_from(["auto", "shrink", "wait", "stop"])


def decided(running: float, expected_s: float, **more: Any) -> str:
    policy = VacancyPolicy(**{name: more.pop(name) for name in ("kind", "patience_s", "price") if name in more})
    belief = Replacements(expected_s=expected_s, reshape_s=60.0, restart_s=300.0)
    return policy.decide(belief, VacancyState(running=running, wanted=100.0, **more)).action


def test_what_is_worth_most_is_done() -> None:
    assert decided(99, 3600) == "shrink"
    assert decided(99, 30) == "wait", "another is there sooner than there and back would take"
    assert decided(99, 30, some_come=False) == "shrink"
    assert decided(80, 3600, least=90) == "wait", "fewer than may go on"
    assert decided(80, 3600, least=90, some_come=False) == "stop"
    assert decided(99, 3600, price=0.9) == "shrink"
    assert decided(50, 3600, price=0.9) == "stop", "each second costs more than it is worth, for long"
    assert decided(50, 200, price=0.9) == "wait", "not for long: to stop and start would cost more"
    assert decided(10, 1e9, price=0.0) == "shrink", "what costs nothing is never stopped"


def test_a_wait_ends() -> None:
    assert decided(99, 30, waited_s=122) == "shrink", "it has cost as much as there and back would have"
    assert decided(80, 30, least=90, waited_s=1e9) == "wait"
    assert decided(80, 30, least=90, waited_s=10, patience_s=10) == "stop"
    assert decided(99, 3600, kind="wait", patience_s=10) == "wait"
    assert decided(99, 30, kind="wait", patience_s=10, waited_s=10) == "shrink"


def test_explicit_settings_are_kept() -> None:
    assert decided(99, 1, kind="shrink") == "shrink"
    assert decided(80, 1, kind="shrink", least=90) == "wait"
    assert decided(99, 1, kind="stop") == "stop"
    assert decided(99, 1, kind="wait", some_come=False) == "shrink"
    with pytest.raises(ConfigError, match="vacancies"):
        VacancyPolicy(kind="pray")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="price"):
        VacancyPolicy(price=math.nan)


@given(KINDS, st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, st.integers(1, 9), st.booleans()), min_size=1),
       st.one_of(st.just(math.inf), SECONDS), st.floats(0, 3), st.integers(1, 9))  # fmt: skip
def test_many_are_decided_as_each_alone(
    kind: Any, rows: list[tuple[float, float, float, float, int, bool]], patience_s: float, price: float, least: int
) -> None:
    policy = VacancyPolicy(kind=kind, patience_s=patience_s, price=price)
    expected, reshape, restart, waited, running, come = (np.array(column) for column in zip(*rows, strict=True))
    belief = Replacements(expected_s=expected, reshape_s=reshape, restart_s=restart)
    state = VacancyState(running=running, wanted=9.0, least=least, waited_s=waited, some_come=come)
    many = policy.decide(belief, state)
    for i, row in enumerate(rows):
        alone = policy.decide(
            Replacements(expected_s=row[0], reshape_s=row[1], restart_s=row[2]),
            VacancyState(running=row[4], wanted=9.0, least=least, waited_s=row[3], some_come=row[5]),
        )
        assert (bool(many.shrink[i]), bool(many.stop[i])) == (alone.shrink, alone.stop)
        assert np.broadcast_to(many.wait_s, len(rows))[i] == alone.wait_s
        assert not (alone.shrink and (alone.stop or row[4] < least)), "fewer than the least never go on"
        assert (alone.action == "wait") == (alone.wait_s > 0), "who waits waits for a while"


def test_the_record_believes_what_it_saw_of_replacements() -> None:
    record = RunRecord()
    assert record.replacements() == Replacements()
    exits = {"cause": "signal", "detail": "", "noticed_by": "agent"}
    for event in (
        ev.RunStarted(at_s=0.0, run_id="r", command=[], num_replicas=2, num_spares=0, signature={}, config={}),
        ev.ViewFormed(at_s=12.0, epoch=1, n=1, step=0, roll_call_s=0.0),
        ev.ReplicaExited(at_s=20.0, replica="r1.1", **exits),
        ev.ViewFormed(at_s=21.0, epoch=1, n=2, step=3, roll_call_s=1.5),
        ev.JoinerCaughtUp(at_s=30.0, replica="r1.2", step=3, seconds=1.0),
    ):
        record.take(event)
    assert record.replacements() == Replacements(expected_s=20.0, reshape_s=1.0, restart_s=12.0)


JOB = Job(
    classes=(FailureClass(name="hard", node_mtbf_h=60.0, repair=1.0, repair_median_h=0.2, repair_mean_h=0.3),),
    accelerators=64, days=1.0, interval="exact", min_share=0.5, reshape_s=60.0, planned_stop_s=200.0,
    tiers=(Tier(name="store", write_s=2.0, recovery_s=60.0),),
)  # fmt: skip


def simulated(size: int = 16, **changes: Any) -> dict[str, float]:
    return simulate(replace_job(JOB, **changes), size, seed=4).breakdown()


def test_a_simulated_job_waits_goes_on_or_stops_as_it_is_told() -> None:
    free, waits, bounded = simulated(), simulated(on_vacancy="wait"), simulated(on_vacancy="wait", vacancy_wait_s=300.0)
    assert free["idle"] < bounded["idle"] < waits["idle"]
    assert waits["degraded"] < bounded["degraded"] < free["degraded"]
    stops = simulated(on_vacancy="stop")
    assert stops["idle"] == pytest.approx(waits["idle"]), "it is started again when all are there"
    assert stops["recovery"] > 2 * waits["recovery"], "which takes longer than to be woken"
    assert simulated(price=5.0) == simulated(on_vacancy="stop"), "what costs more than it is worth"
    assert simulated(price=0.01) == free


@pytest.mark.parametrize("on_vacancy", ["auto", "wait", "stop"])
def test_the_chain_has_a_job_idle_that_waits_for_all(on_vacancy: str) -> None:
    simulation, found = simulated(64, on_vacancy=on_vacancy), analyse(replace_job(JOB, on_vacancy=on_vacancy))
    assert found.chain == pytest.approx(simulation["productive"], abs=0.01)


def test_the_chain_says_where_it_has_not_what_a_job_does() -> None:
    def outside(**changes: Any) -> str:
        return " ".join(analyse(replace_job(JOB, **changes)).outside)

    assert "price" not in outside(price=0.5, on_vacancy="shrink")
    assert "a price may stop the job" in outside(price=0.5)
    assert "waits end" not in outside(on_vacancy="wait") + outside(on_vacancy="stop", vacancy_wait_s=60.0)
    assert "waits end" in outside(on_vacancy="wait", vacancy_wait_s=60.0)
    assert "waits end" not in outside(on_vacancy="wait", vacancy_wait_s=60.0, spares=6), "there is always a spare"


def lose_one(machines: Machines, now_s: float, repair_s: float) -> None:
    machines.take(np.array([0]), np.ones(1), np.array([now_s]), np.array([repair_s]), np.zeros(1))


def test_who_waits_for_all_is_not_woken_by_one_that_comes_back() -> None:
    machines = Machines(JOB, VacancyPolicy(kind="wait", patience_s=300.0), 1)
    lose_one(machines, 0.0, 100.0)
    lose_one(machines, 50.0, 450.0)
    assert machines.patience_ends.tolist() == [300.0], "since the first was lost"
    assert [list(rows) for rows in machines.come_back(np.array([100.0]))] == [[], [], []]
    assert (machines.waiting.tolist(), machines.patience_ends.tolist()) == ([True], [300.0])
    assert [list(rows) for rows in machines.come_back(np.array([500.0]))] == [[0], [], []]
    assert machines.waits.tolist() == [1]


def test_who_waits_decides_anew_when_a_machine_is_lost_or_comes_back() -> None:
    """It waits as the first is back soon; the second is not, so it goes on with seven of eight once that is, or stops
    where they cost more than they are worth."""
    for price, after in ((0.0, [[0], [], []]), (2.0, [[], [], [0]])):
        machines = Machines(JOB, VacancyPolicy(price=price), 1)
        lose_one(machines, 0.0, 50.0)
        assert machines.patience_ends[0] == pytest.approx(2 * 60.0 * 8 / 7)
        lose_one(machines, 10.0, 5000.0)
        assert machines.patience_ends[0] == pytest.approx(2 * 60.0 * 8 / 6)
        assert [list(rows) for rows in machines.come_back(np.array([50.0]))] == after
        assert (bool(machines.waiting[0]), bool(machines.stopped[0])) == (price > 0, price > 0)


def test_one_alone_is_simulated_as_in_a_batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"on_vacancy": "wait", "vacancy_wait_s": 300.0}, {"price": 2.0}, {"min_share": 1.0}):
        alone = simulated(1, **changes)
        with monkeypatch.context() as patched:
            patched.setattr(_simulate, "Single", Kernel)
            assert simulated(1, **changes) == alone


def test_the_policy_replaced_changes_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    before, own = simulated(), VacancyPolicy.decide

    def waits(self: Any, belief: Any, state: Any) -> Any:
        found = own(self, belief, state)
        never = np.zeros(np.shape(found.shrink), dtype=np.bool_)
        return VacancyDecision(shrink=never, stop=never, wait_s=never + math.inf)

    monkeypatch.setattr(VacancyPolicy, "decide", waits)
    assert simulated()["idle"] > 2 * before["idle"]
