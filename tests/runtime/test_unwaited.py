"""Somebody is stopped for whom nobody waits: it is continued, and nothing hangs. Each is stopped from outside."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.observe import accounting
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


def notices(run: Any, words: str) -> list[str]:
    return [e.text for e in run.driven.events if isinstance(e, ev.Notice) and words in e.text]


def continued(run: Any, name: str) -> bool:
    return any(text.startswith(f"{name} was stopped") for text in notices(run, "and was continued"))


def test_a_replica_that_is_stopped_as_it_starts_is_continued(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=2, steps=6, max_restarts=0, gates=(3,))
    run.until("r1 was started", lambda: run.started("r1.1"))
    run.strike(run.pid("r1.1"), signal.SIGSTOP)
    run.gate(3, "it was continued", lambda: continued(run, "r1.1"))  # the other one may have begun alone by then
    run.assert_unchanged(recoveries=0)


@pytest.mark.campaign
def test_one_that_is_stopped_again_is_replaced(fleet: Callable[..., Any]) -> None:
    """Whether the run has begun by then, with it or without, depends on the machine; so the other one may stand at the
    gate in a view that cannot form before it is opened."""
    run = fleet(replicas=2, steps=12, gates=(6,))
    run.until("r1 was started", lambda: run.started("r1.1"))
    run.strike(run.pid("r1.1"), signal.SIGSTOP)
    run.until("it was continued", lambda: continued(run, "r1.1"))
    run.strike(run.pid("r1.1"), signal.SIGSTOP)
    run.until("it was given up", lambda: run.exited("r1.1"))
    run.gate(6, "another one was started", lambda: run.started("r1.2"))
    run.assert_unchanged()


@pytest.mark.campaign
@pytest.mark.parametrize("action", ["hang", "spin"])
def test_a_joiner_that_hangs_is_given_up_and_replaced(fleet: Callable[..., Any], action: Any) -> None:
    """Those that are left compute nothing until another is there, and the account says so."""
    run = fleet(
        Fault(replica="r1.1", phase="backward", step=3, action="SIGKILL"),
        Fault(replica="r1.2", phase="join_hello", action=action),
        replicas=2, steps=8, on_vacancy="wait", outside_s=15.0,
    )  # fmt: skip
    run.assert_unchanged()
    assert {"r0.1", "r1.3"} <= set(run.results())
    told = [e.evidence for e in run.driven.events if isinstance(e, ev.Suspected) and e.replica == "r1.2"]
    assert [text.endswith("s in join_hello (outside_s)") for text in told] == [True], told
    [held, whole] = [e.at_s for e in run.driven.events if isinstance(e, ev.ViewFormed)][1:3]
    account = accounting(run.driven.events)
    assert account.recovery_s >= whole - held - 0.05, account


@pytest.mark.campaign
def test_a_sole_survivor_is_continued_whenever_it_is_stopped(fleet: Callable[..., Any]) -> None:
    """In its step, where its silence has a deadline, and in the loop's body; once by its agent, then as it is told."""
    run = fleet(replicas=2, steps=12, max_restarts=0, gates=(3, 6))
    run.until("steps were made", lambda: run.driven.step == 2)
    run.strike(run.pid("r1.1"), signal.SIGKILL)
    run.gate(3, "it was noticed", lambda: run.exited("r1.1"))
    run.until("it goes on alone", lambda: run.driven.step == 5)
    for _ in range(2):
        run.strike(run.pid("r0.1"), signal.SIGSTOP)
        run.until("it was stopped", lambda: run.state("r0.1") == "T")
        run.until("it was continued", lambda: run.state("r0.1") != "T")
    run.gate(6, "it was continued twice", lambda: run.state("r0.1") != "T")
    run.assert_unchanged(survivors={"r0.1"}, recoveries=1)


@pytest.mark.campaign
def test_a_survivor_that_was_stopped_before_the_death_is_continued(fleet: Callable[..., Any]) -> None:
    """It cannot acknowledge that the view is over, and nobody else holds the state."""
    run = fleet(replicas=2, steps=12, max_restarts=0, gates=(3,), stall_floor_s=60.0)
    run.until("steps were made", lambda: run.driven.step == 2)
    run.strike(run.pid("r0.1"), signal.SIGSTOP)
    run.strike(run.pid("r1.1"), signal.SIGKILL)
    run.gate(3, "it was noticed", lambda: run.exited("r1.1"))
    run.assert_unchanged(survivors={"r0.1"}, recoveries=1)


@pytest.mark.campaign
def test_a_spare_and_a_joiner_are_continued(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=1, spares=1, steps=40, gates=(3, 6, 9, 12))
    run.gate(3, "the spare was served", lambda: run.served("r1.1"))
    run.gate(6, "it follows", lambda: run.caught_up("r1.1"))
    run.strike(run.pid("r1.1"), signal.SIGSTOP)
    run.until("it was continued", lambda: continued(run, "r1.1"))
    run.strike(run.pid("r1.1"), signal.SIGKILL)
    run.until("another one starts", lambda: run.started("r1.2"))
    run.strike(run.pid("r1.2"), signal.SIGSTOP)
    run.gate(9, "it was continued", lambda: continued(run, "r1.2"))
    run.gate(12, "it joins", lambda: run.served("r1.2"))
    run.assert_unchanged(recoveries=1)


@pytest.mark.campaign
def test_what_replicas_are_forked_from_is_continued_as_it_loads(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=2, steps=6, max_restarts=0)
    run.until("the agent runs", lambda: any(isinstance(e, ev.AgentStarted) for e in run.driven.events))
    agent = run.pid("a0")
    children = Path(f"/proc/{agent}/task/{agent}/children")
    run.until("it loads", lambda: bool(children.read_text().split()))
    run.strike(int(children.read_text().split()[0]), signal.SIGSTOP)
    run.assert_unchanged(recoveries=0)


@pytest.mark.campaign
def test_the_last_that_holds_the_state_hands_it_over_before_it_leaves(fleet: Callable[..., Any]) -> None:
    """SIGTERM, while the replica that will take over is being started."""
    run = fleet(replicas=2, steps=60, gates=(3, 6, 20))
    run.until("steps were made", lambda: run.driven.step == 2)
    run.strike(run.pid("r1.1"), signal.SIGKILL)
    run.gate(3, "another one starts", lambda: run.started("r1.2"))
    run.strike(run.pid("r0.1"), signal.SIGTERM)
    run.gate(6, "it was served", lambda: run.served("r1.2"))
    run.gate(20, "it had caught up, and takes over", lambda: run.driven.members == ["r1.2"])
    run.assert_unchanged()
    assert "r1.2" in run.results()
    assert "r0.1" not in run.results()
