"""The processes beside the replicas are stopped, not dead: a coordinator is replaced, an agent continued."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.runtime.host.silence import Watch, kernel_state
from outlast.runtime.settings.fault_points import Fault
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

pytestmark = pytest.mark.process
SILENT_S = 6.0  # longer than a busy machine keeps an agent from a look at its children
UNKILLABLE = str(Path(__file__).with_name("unkillable.py"))


def coordinators(run: Any) -> list[int]:
    return [e.pid for e in run.driven.events if isinstance(e, ev.CoordinatorStarted)]


@pytest.mark.campaign
def test_a_stopped_coordinator_is_replaced_and_a_death_does_not_wait_for_it(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=3, steps=8, max_restarts=0, gates=(3, 5))
    run.until("steps were made", lambda: run.driven.step == 2)
    (old,) = coordinators(run)
    run.strike(old, signal.SIGSTOP)
    run.strike(run.pid("r1.1"))
    run.gate(3, "another had taken over", lambda: len(coordinators(run)) == 2)
    run.gate(5, "the death was noticed", lambda: run.exited("r1.1"))
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=2)
    assert kernel_state(old)[0] == "X"
    (taken_over,) = [r for r in run.driven.recoveries() if r.cause == "coordinator"]
    assert "it was stopped" in taken_over.detail


def test_a_death_is_no_older_than_the_last_look_at_the_living(fleet: Callable[..., Any]) -> None:
    """Its script had said nothing for long, waiting at a gate: that was no time in which nobody noticed its death."""
    run = fleet(replicas=2, steps=8, max_restarts=0, gates=(3, 5))
    run.until("both wait", lambda: len(run.driven.members) == 2 and run.at_gates({run.pid("r0.1"), run.pid("r1.1")}))
    until_s = time.monotonic() + SILENT_S
    run.until("they have been silent for long", lambda: time.monotonic() > until_s)
    run.strike(run.pid("r1.1"))
    run.gate(3, "the death was noticed", lambda: run.exited("r1.1"))
    run.gate(5, "the other went on", lambda: run.driven.members == ["r0.1"])
    run.assert_unchanged(survivors={"r0.1"}, recoveries=1)
    (recovery,) = run.driven.recoveries()
    assert recovery.detect_s < SILENT_S


@pytest.mark.campaign
def test_an_agent_that_dies_while_the_coordinator_is_stopped(fleet: Callable[..., Any]) -> None:
    """The launcher tells of the agent again and again; that must not count as its own absence from the coordinator."""
    run = fleet(replicas=2, agents=2, steps=8, max_restarts=0, gates=(3, 5))
    run.until("steps were made", lambda: run.driven.step == 2)
    (old,) = coordinators(run)
    run.strike(old, signal.SIGSTOP)
    run.strike(run.pid("a1"))
    run.gate(3, "another had taken over", lambda: len(coordinators(run)) == 2)
    run.gate(5, "the death was noticed", lambda: run.exited("r1.1"))
    run.assert_unchanged(survivors={"r0.1"})


@pytest.mark.campaign
def test_one_that_cannot_be_killed_is_fenced_when_it_wakes(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=3, steps=12, max_restarts=0, gates=(3, 6, 9), program=[UNKILLABLE])
    run.until("steps were made", lambda: run.driven.step == 2)
    (old,) = coordinators(run)
    run.strike(old, signal.SIGSTOP)
    run.strike(run.pid("r1.1"))
    run.gate(3, "another had taken over", lambda: len(coordinators(run)) == 2)
    run.gate(6, "the death was noticed", lambda: run.exited("r1.1"))
    assert kernel_state(old)[0] == "T"
    run.strike(old, signal.SIGCONT)
    run.gate(9, "the old one had ended", lambda: kernel_state(old)[0] in "XZ")
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=2)
    assert len(coordinators(run)) == 2


@pytest.mark.campaign
def test_a_stopped_agent_is_continued_and_its_replicas_live(fleet: Callable[..., Any]) -> None:
    """It stops in the act of killing a stopped replica."""
    run = fleet(
        Fault(replica="r1", phase="backward", step=3, action="SIGSTOP"),
        Fault(replica="a0.1", phase="kill", action="SIGSTOP"),
        replicas=3, steps=8, max_restarts=0,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=1)
    assert not [e for e in run.driven.events if isinstance(e, ev.AgentLost)]


def test_who_is_stopped_before_its_first_sign_of_life_is_seen_and_who_only_loads_is_not() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        progress = Progress(Region(Progress.SIZE))
        progress.alive()
        watch, now = Watch(child, progress, 0.5, 30.0), progress.read()[3]
        while kernel_state(child)[0] != "S":
            os.sched_yield()
        assert {watch.look(now + 0.5 * turn)[0] for turn in range(80)} == {""}
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert watch.look(now + 40.0)[0] == "stopped"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_silence_is_learned_and_the_watcher_s_own_is_no_one_s_fault() -> None:
    progress = Progress(Region(Progress.SIZE))
    watch = Watch(os.getpid(), progress, 0.5, 30.0)
    progress.alive()
    now = progress.read()[3]
    assert watch.look(now) == ("", 0.0)
    assert watch.look(now + 100.0) == ("", 0.0), "the watcher slept"
    assert watch.look(now + 100.2)[1] == pytest.approx(0.2)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        watch = Watch(child, progress, 0.5, 30.0)
        for beat in range(5):
            progress.alive(ahead_s=0.1 * beat)
            assert watch.look(progress.read()[3])[0] == ""
        now = progress.read()[3]
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert watch.look(now + 0.2)[0] == ""
        assert watch.look(now + 0.9)[0] == "stopped"
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, os.WCONTINUED)
        while kernel_state(child)[0] != "S":  # runnable, until the machine has a moment for it
            os.sched_yield()
        seen = [watch.look(now + 0.9 + 0.5 * turn)[0] for turn in range(70)]
        assert "stopped" not in seen
        assert seen[-1] == "hung", "silent for half a minute, and it uses no processor"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
