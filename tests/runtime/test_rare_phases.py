"""Faults where few pass: forming a group, receiving a hand-over, waiting for slices, joining, starting and killing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import pytest

from outlast.core import events as ev
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process
Action = Literal["SIGKILL", "SIGSTOP", "raise"]
RAISES = pytest.param("raise", marks=pytest.mark.soak)  # to its peers, one that is killed


def fault(replica: str, phase: str, action: Any = "SIGKILL", **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase, action=action, **where)


@pytest.mark.campaign
@pytest.mark.parametrize("action", ["SIGKILL", "SIGSTOP", RAISES])
def test_waiting_for_slices_forming_a_group_receiving_a_hand_over(fleet: Callable[..., Any], action: Action) -> None:
    """r1 waits for slices; the group without it forms, and loses r2. Of r4's header of step 4 only r0 hears, commits,
    and hands the outcome over when r4 has died: to r5, and to r3, who does not live to apply it. Until r0 has
    committed r4 only hangs, which has to be no deadline's by then."""
    run = fleet(
        fault("r1", "scattered", action, step=2),
        fault("r2", "connect", action, step=2),
        *(fault("r4", "header", "mute", step=4, peer=f"{peer}.1") for peer in ("r3", "r5")),
        fault("r4", "verdict", "hang", step=4),
        fault("r3", "hand_over_receive", action, step=4),
        replicas=6, microbatches=12, steps=7, max_restarts=0, formation_s=3.0, stall_floor_s=5.0,
    )  # fmt: skip
    run.until("r0 was ahead", lambda: run.driven.step >= 4)
    with contextlib.suppress(ProcessLookupError):  # by its deadline, if nobody looked for so long
        run.strike(run.pid("r4.1"))
    run.assert_unchanged(survivors={"r0.1", "r5.1"}, recoveries=4)


@pytest.mark.campaign
@pytest.mark.parametrize("action", ["SIGKILL", RAISES])
def test_joiners_that_fail_at_every_door(fleet: Callable[..., Any], action: Action) -> None:
    """Three processes of one slot fail before, with and after their snapshot; the fourth becomes a member."""
    doors = ("join_hello", "join_schema", "join_ready")
    faults = [fault(f"r2.{number}", door, action) for number, door in enumerate(doors, 1)]
    run = fleet(
        *faults, fault("r1.1", "reduce", step=160),
        replicas=2, spares=1, steps=164, gates=(1, 40, 80, 120, 160), formation_s=2.0,
    )  # fmt: skip
    for number, step in ((1, 1), (2, 40), (3, 80), (4, 120)):
        run.gate(step, f"process {number} was served", lambda name=f"r2.{number}": run.served(name))
    run.gate(160, "it had caught up", lambda: run.caught_up("r2.4"))
    run.assert_unchanged(recoveries=4)
    assert {"r0.1", "r2.4"} <= set(run.results())


@pytest.mark.campaign
def test_joiners_that_are_stopped_at_every_door(fleet: Callable[..., Any]) -> None:
    """Nobody waits for a joiner: who is stopped is continued once, and replaced when it is stopped again."""
    run = fleet(
        fault("r2.1", "join_hello", "SIGSTOP"), fault("r2.1", "join_schema", "SIGSTOP"),
        fault("r2.2", "join_ready", "SIGSTOP"), fault("r1.1", "reduce", step=48),
        replicas=2, spares=1, steps=52, gates=(1, 2, 40, 41, 42, 48),
    )  # fmt: skip

    def told() -> list[str]:
        notices = [e.text for e in run.driven.events if isinstance(e, ev.Notice)]
        return [text.split(" for ")[0] for text in notices if "nobody waited for it" in text]

    run.gate(1, "the first was served", lambda: run.served("r2.1"))
    run.gate(2, "it was continued", lambda: len(told()) == 1)
    run.gate(40, "it was stopped again", lambda: run.exited("r2.1"))
    run.gate(41, "the second was served", lambda: run.served("r2.2"))
    run.gate(42, "it was continued too", lambda: len(told()) == 2)
    run.gate(48, "it had caught up", lambda: run.caught_up("r2.2"))
    run.assert_unchanged(recoveries=2)
    assert {"r0.1", "r2.2"} <= set(run.results())
    assert told() == ["r2.1 was stopped", "r2.2 was stopped"]


@pytest.mark.campaign
@pytest.mark.parametrize("action", ["SIGKILL", "SIGSTOP", RAISES])
def test_an_agent_fails_as_it_starts_a_rank(fleet: Callable[..., Any], action: Action) -> None:
    """r1 and r3 are the second agent's, which fails as it starts a successor of r1. Stopped, it is continued."""
    run = fleet(
        fault("r1.1", "backward", step=2),
        fault("a1.1", "spawn", action, count=3),
        replicas=4, agents=2, steps=8, gates=(4,),
    )  # fmt: skip
    again = "r1.2" if action == "SIGSTOP" else "r1.3"
    run.gate(4, "a successor was there", lambda: run.started(again))
    run.assert_unchanged()
    assert {"r0.1", "r2.1"} <= set(run.results())
    lost = {e.agent for e in run.driven.events if isinstance(e, ev.AgentLost)}
    assert lost == (set() if action == "SIGSTOP" else {"a1"})


@pytest.mark.campaign
@pytest.mark.parametrize("action", ["SIGKILL", RAISES])
def test_an_agent_fails_as_it_kills_a_rank(fleet: Callable[..., Any], action: Action) -> None:
    """The stopped r1 dies with its agent, and r3 too. (An agent that is stopped there: test_stopped.)"""
    run = fleet(
        fault("r1.1", "backward", "SIGSTOP", step=3),
        fault("a1.1", "kill", action),
        replicas=4, agents=2, steps=8, max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=2)
    assert [e.agent for e in run.driven.events if isinstance(e, ev.AgentLost)] == ["a1"]


@pytest.mark.campaign
def test_a_hang_in_the_first_view_change(fleet: Callable[..., Any]) -> None:
    """No deadline was learned yet for its roll call, and its link to the coordinator goes on answering."""
    run = fleet(
        fault("r1", "backward", step=2),
        fault("r2", "roll_call", "hang", step=2),
        replicas=4, steps=5, max_restarts=0, formation_s=3.0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r3.1"}, recoveries=2)
