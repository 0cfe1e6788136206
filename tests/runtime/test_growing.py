"""Spares take over, the dead are replaced and join again: membership shrinks and grows, the bits stay."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


def fault(replica: str, phase: str, action: Any = "SIGKILL", **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase, action=action, **where)


@pytest.mark.campaign
def test_a_spare_takes_over_and_the_dead_come_back(fleet: Callable[..., Any]) -> None:
    """r1 dies in an exchange: the spare is in its place at once. Its successor dies while it receives its snapshot; the
    next one joins and becomes the spare. Then a member is asked to leave, and the spare takes its place too."""
    run = fleet(
        fault("r1.1", "gather", step=5),
        fault("r1.2", "join_snapshot"),
        replicas=2, spares=1, steps=160, gates=(1, 4, *range(10, 150, 5)),
    )  # fmt: skip
    run.gate(1, "the spare was served", lambda: run.served("r2.1"))
    run.gate(4, "it had caught up", lambda: run.caught_up("r2.1"))
    # Who waits at a gate takes no place in a view, and nobody is served in one that has not formed: that takes steps.
    run.step_on("one was served, another had caught up", lambda: run.served("r1.2") and run.caught_up("r1.3"))
    assert set(run.driven.members) == {"r0.1", "r2.1"}
    run.strike(run.pid("r0.1"), signal.SIGTERM)
    run.step_on("it had left", lambda: run.exited("r0.1"))
    run.open_gates()
    run.assert_unchanged(survivors={"r2.1", "r1.3"}, recoveries=2)
    assert [e.cause for e in run.exits() if e.replica == "r0.1"] == ["left"]
    planned = [e.planned for e in run.driven.events if isinstance(e, ev.ViewInstalled)]
    # The spare may have lacked the half of an outcome that died with r1.1: then it goes, and comes by a planned view.
    assert planned in ([False, False, True], [False, False, False, True, True])
    joiner = run.driven.recoveries()[1]
    assert (joiner.replica, joiner.downtime_s, joiner.microbatches_recomputed) == ("r1.2", 0.0, 0)


@pytest.mark.campaign
def test_donors_die_while_they_serve(fleet: Callable[..., Any]) -> None:
    """The snapshot of one donor never comes, then the stream of another ends: the joiner asks to be served again."""
    run = fleet(
        fault("r2.1", "serve_snapshot"),
        fault("r1.1", "serve_stream"),
        replicas=3, spares=1, steps=16, max_restarts=0, gates=(1, 8, 13), dtype="bfloat16",
    )  # fmt: skip
    run.gate(1, "the spare was served", lambda: run.served("r3.1"))
    run.gate(8, "both donors had died", lambda: run.exited("r2.1") and run.exited("r1.1"))
    run.gate(13, "the spare was a member", lambda: "r3.1" in run.driven.members)
    run.assert_unchanged(survivors={"r0.1", "r3.1"}, recoveries=2)


@pytest.mark.campaign
def test_deaths_of_a_leaver_and_of_a_joiner_that_replays(fleet: Callable[..., Any]) -> None:
    """r0 leaves gracefully and dies at the door; the spare that has its place follows one that died replaying."""
    run = fleet(
        fault("r2.1", "join_replay", count=2),
        fault("r0.1", "depart"),
        replicas=2, spares=1, steps=60, gates=(1, 4, 8, 11, *range(15, 60, 5)),
    )  # fmt: skip
    run.gate(1, "the spare was served", lambda: run.served("r2.1"))
    run.gate(4, "it had died", lambda: run.exited("r2.1"))
    run.gate(8, "its successor was served", lambda: run.served("r2.2"))
    run.gate(11, "it had caught up", lambda: run.caught_up("r2.2"))
    run.strike(run.pid("r0.1"), signal.SIGTERM)
    run.step_on("the leaver was gone", lambda: run.exited("r0.1"))
    run.open_gates()
    run.assert_unchanged()
    assert {"r1.1", "r2.2"} <= set(run.results())


@pytest.mark.campaign
def test_a_joiner_that_is_admitted_after_the_last_step(fleet: Callable[..., Any]) -> None:
    """No step follows in which it could catch up: it does so before the roll, in which states are compared then."""
    run = fleet(fault("r1.1", "gather", step=3), replicas=2, steps=8, gates=(6, 7))
    run.gate(6, "its successor was served", lambda: run.served("r1.2"))
    run.gate(7, "it had caught up, and members are told", lambda: run.placed("r1.2"))
    run.assert_unchanged(survivors={"r0.1", "r1.2"})
    assert [e.planned for e in run.driven.events if isinstance(e, ev.ViewInstalled)][-1], "it was admitted"
