"""A robust rule in the exchange: the bits of a fleet of one, whoever dies, and wherever in the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.runtime.faults.liars import Lie
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process

TRIMMED = {"aggregation": "trimmed_mean", "f": 1, "rows": 4}


def kill(replica: str, phase: Phase, step: int, **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase.name.lower(), step=step, action="SIGKILL", **where)


def admissions(run: Any) -> list[ev.RowsAdmitted]:
    return [e for e in run.driven.events if isinstance(e, ev.RowsAdmitted)]


@pytest.mark.campaign
def test_deaths_in_the_exchange_leave_the_bits(fleet: Callable[..., Any]) -> None:
    """Four rows, one a replica; then three replicas, then two own all of them. Nobody is asked to be tolerated."""
    run = fleet(
        kill("r1", Phase.SCATTER, 2, bucket=0),
        kill("r3", Phase.REDUCE, 4, bucket=1),
        replicas=4, steps=7, max_restarts=0, rule=TRIMMED, tolerated=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=2)
    assert [a.most_rows for a in admissions(run)] == [1, 2, 2]
    assert all(a.action == "go" for a in admissions(run))


@pytest.mark.campaign
def test_more_replicas_than_rows_own_part_of_one_each(fleet: Callable[..., Any]) -> None:
    """Dealt by microbatch, one of them owned parts of two rows, and the run waited from its first view on."""
    run = fleet(replicas=4, steps=3, rule=TRIMMED | {"rows": 3})
    run.assert_unchanged()
    assert [(a.action, a.most_rows) for a in admissions(run)] == [("go", 1)]


@pytest.mark.campaign
def test_a_view_that_is_not_good_enough_waits_for_a_replacement(fleet: Callable[..., Any]) -> None:
    """After the death two rows would be one replica's, and f = 1: nothing is computed until a joiner is there."""
    run = fleet(kill("r1.1", Phase.GATHER, 3, bucket=0), replicas=4, steps=6, rule=TRIMMED)
    run.assert_unchanged(survivors={"r0.1", "r1.2", "r2.1", "r3.1"}, recoveries=1)
    assert [(a.action, a.most_rows) for a in admissions(run)] == [("go", 1), ("wait", 2), ("go", 1)]


@pytest.mark.campaign
@pytest.mark.parametrize("exchange", ["shm", "c10d"])
def test_a_joiner_comes_while_the_others_go_on(fleet: Callable[..., Any], exchange: str) -> None:
    """It is fed the outcome of the very step after which it is a member: with rows that is after the commit."""
    run = fleet(
        kill("r1.1", Phase.GATHER, 3, bucket=0),
        replicas=4, steps=24, gates=(5, 8), rule=TRIMMED, on_shortfall="lower", exchange=exchange,
    )  # fmt: skip
    run.gate(5, "the successor was served", lambda: run.served("r1.2"))
    run.gate(8, "it had caught up, and members are told", lambda: run.placed("r1.2"))
    run.assert_unchanged(survivors={"r0.1", "r1.2", "r2.1", "r3.1"}, recoveries=1)


@pytest.mark.campaign
def test_a_view_is_lowered_to_nobody_where_that_was_asked_for(fleet: Callable[..., Any]) -> None:
    """Nobody comes back, one replica owns two rows for good: the run goes on with its bits and says what it lost."""
    run = fleet(
        kill("r1.1", Phase.GATHER, 3, bucket=0),
        replicas=4, steps=6, rule=TRIMMED, max_restarts=0, on_shortfall="lower",
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r2.1", "r3.1"}, recoveries=1)
    assert [(a.action, a.tolerated, a.lowered) for a in admissions(run)] == [("go", 1, False), ("go", 0, True)]
    assert "lowered from 1 to none" in admissions(run)[-1].reason


MOVED = {"aggregation": {"up.*": "centered_clipping", "*": {"rule": "trimmed_mean", "pre": "nnm"}}, "f": 1, "rows": 3,
         "row_momentum": 0.9}  # fmt: skip


@pytest.mark.campaign
def test_what_rules_remember_is_handed_to_joiners(fleet: Callable[..., Any]) -> None:
    """Distance rules, momentum of each row and the last result; the second death takes the survivors of the first."""
    run = fleet(
        kill("r1.1", Phase.REDUCE, 2, bucket=0),
        kill("r0.1", Phase.HEADER, 70),
        replicas=3, steps=84, rule=MOVED, gates=(30, 40, 76, 80),
    )  # fmt: skip
    run.gate(30, "the first replacement was served", lambda: run.served("r1.2"))
    run.gate(40, "the first replacement", lambda: run.caught_up("r1.2"))
    run.gate(76, "the second replacement was served", lambda: run.served("r0.2"))
    run.gate(80, "the second replacement, and members are told", lambda: run.placed("r0.2"))
    run.assert_unchanged(survivors={"r0.2", "r1.2", "r2.1"}, recoveries=2)


@pytest.mark.campaign
def test_over_torch_distributed(fleet: Callable[..., Any]) -> None:
    run = fleet(
        kill("r1.1", Phase.SCATTER, 2, bucket=1),
        replicas=3, steps=5, max_restarts=0, rule=MOVED, tolerated=0, exchange="c10d",
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=1)


@pytest.mark.parametrize(("exchange", "liar"), [("shm", "r2"), pytest.param("c10d", "r0", marks=pytest.mark.campaign)])
def test_a_lying_reducer_is_caught_before_anything_is_applied(
    fleet: Callable[..., Any], exchange: str, liar: str
) -> None:
    """Every slice is computed again by somebody else; the step is held, the liar is replaced, the bits are true."""
    run = fleet(
        replicas=4, steps=5, rule=TRIMMED | {"check_reducers": 1.0}, exchange=exchange,
        lies=[Lie(replicas=(f"{liar}.1",), attack="lying_reducer", first_step=2)],
    )  # fmt: skip
    run.assert_unchanged(survivors={f"r{i}.{1 + (liar == f'r{i}')}" for i in range(4)})
    (accused,) = [e for e in run.driven.events if isinstance(e, ev.ReducerAccused)]
    assert (accused.replica, accused.reducer, accused.step, accused.decision) == (f"{liar}.1", f"{liar}.1", 2, "evict")
    assert len(accused.votes) > 2
    assert (accused.host, accused.device) == ("a0", "cpu")
    assert next(e.cause for e in run.exits() if e.replica == f"{liar}.1") != "finished"


@pytest.mark.campaign
def test_more_bad_rows_than_the_rule_tolerates_are_refused_by_name(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=4, steps=4, rule=TRIMMED, lies=[Lie(replicas=("r1", "r3"), attack="nan", first_step=2)])
    assert run.finish() == 5, run.logs()
    end = next(e for e in run.driven.events if isinstance(e, ev.RunFinished))
    assert "rows 1, 3, computed by r1.1, r3.1" in end.detail


@pytest.mark.campaign
def test_who_is_ahead_hands_over_what_rules_remember(fleet: Callable[..., Any]) -> None:
    """r0 alone hears r2's header, commits, and hands the outcome and the rows' momentum to r1 when r2 is dead."""
    run = fleet(
        Fault(replica="r2", phase="header", step=2, action="mute", peer="r1.1"),
        Fault(replica="r2", phase="verdict", step=2, action="hang"),
        replicas=3, steps=5, max_restarts=0, rule=MOVED, tolerated=0, stall_floor_s=60.0,
    )  # fmt: skip
    run.until("r0 was ahead", lambda: run.driven.step == 2)
    run.strike(run.pid("r2.1"))
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=1)


@pytest.mark.campaign
def test_replicas_of_one_host_lie_together(fleet: Callable[..., Any]) -> None:
    """Two agents with two replicas each: f = 1 tolerates no host, and a larger f than the rule has is refused."""
    run = fleet(replicas=4, steps=3, rule=TRIMMED, agents=2, fault_domain="host")
    run.assert_unchanged()
    assert [(a.action, a.tolerated, a.most_rows) for a in admissions(run)] == [("go", 0, 2)]


@pytest.mark.campaign
def test_rows_go_by_host_wherever_replicas_are(fleet: Callable[..., Any]) -> None:
    """Four replicas on three agents, in turn: dealt by replica, the first agent had two rows, and all waited."""
    rule = TRIMMED | {"rows": 3}
    run = fleet(kill("r1.1", Phase.GATHER, 3, bucket=0), replicas=4, steps=6, rule=rule, agents=3, fault_domain="host")
    run.assert_unchanged(survivors={"r0.1", "r1.2", "r2.1", "r3.1"}, recoveries=1)
    found = [(a.action, a.tolerated, a.most_rows) for a in admissions(run)]
    assert found == [("go", 1, 1), ("wait", 0, 2), ("go", 1, 1)]


@pytest.mark.campaign
def test_who_waits_for_nobody_is_told_and_helped_by_one_more(fleet: Callable[..., Any]) -> None:
    run = fleet(kill("r1.1", Phase.GATHER, 3, bucket=0), replicas=4, steps=6, rule=TRIMMED, max_restarts=0)

    def told() -> bool:
        return any("outlast scale" in e.text for e in run.driven.events if isinstance(e, ev.Notice))

    run.until("it is told", told)
    assert main(["scale", str(run.driven.run_dir), "--replicas", "5"]) == 0
    run.assert_unchanged(survivors={"r0.1", "r2.1", "r3.1", "r4.1"}, recoveries=1)
    assert [a.action for a in admissions(run)] == ["go", "wait", "go"]


@pytest.mark.campaign
def test_a_run_that_is_to_stop_stops(fleet: Callable[..., Any]) -> None:
    run = fleet(kill("r1.1", Phase.GATHER, 2, bucket=0), replicas=4, steps=5, rule=TRIMMED, on_shortfall="stop")
    assert run.finish() == 5, run.logs()
    assert [a.action for a in admissions(run)] == ["go", *["stop"] * (len(admissions(run)) - 1)]
    assert len(admissions(run)) > 1
