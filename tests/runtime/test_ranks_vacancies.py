"""Replicas of several ranks wait for those that were lost: the same bits, whichever rank dies or stops meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_ranks import SCRIPT, fault, undisturbed
from tests.runtime.test_vacancies import decided, formed, views

from outlast.cli import main
from outlast.core import events as ev
from outlast.prove._process_tree import of_run, processes

pytestmark = [pytest.mark.process, pytest.mark.campaign]
STEPS = 8
HANGS = fault("r1.2", "join_hello", "hang")  # the replacement, so that the others wait until it is killed


def rank(run: Any, replica: str, place: int) -> int:
    """Its process."""
    [found] = [each.pid for each in processes(run.driven.process.pid) if (each.name, each.place) == (replica, place)]
    return found


def gone(run: Any) -> dict[str, str]:
    """Replicas that did not train to the end, and why."""
    return {exit.replica: exit.detail for exit in run.exits() if exit.cause != "finished"}


def check(run: Any, survivors: set[str], whole: set[str]) -> None:
    """It ended well, nothing is left, and each rank of each survivor has the bits of the undisturbed run. `whole`:
    those of them that made every step."""
    assert run.finish() == 0, run.logs()
    assert of_run(run.driven.run_dir) == []
    want, results = undisturbed(SCRIPT, STEPS), run.results()
    assert set(results) == {f"{name}-{place}" for name in survivors for place in range(2)}, run.logs()
    for name, found in results.items():
        assert found["fingerprint"] == want["fingerprint"], f"{name}\n{run.logs()}"
        assert found["losses"].items() <= want["losses"].items()
        assert str(STEPS - 1) in found["losses"]
        assert found == want or name.partition("-")[0] not in whole
    assert all(recovery.lost_steps == 0 for recovery in run.driven.recoveries())


def test_the_others_wait_until_a_replacement_is_there(fleet: Callable[..., Any], capsys: Any) -> None:
    """A rank that is no lead dies in its backward, and a lead while its lanes are reduced. No step is made by fewer."""
    run = fleet(fault("r1/1.1", "backward", step=3), fault("r0.1", "gather", step=6, bucket=1),
                replicas=3, ranks=2, steps=STEPS, script=[SCRIPT], on_vacancy="wait")  # fmt: skip
    check(run, {"r0.2", "r1.2", "r2.1"}, {"r2.1"})
    assert [(e.action, e.running, e.wanted) for e in decided(run)] == [("wait", 2, 3), ("wait", 2, 3)]
    assert views(run) == [3, 2, 3, 2, 3]
    capsys.readouterr()
    assert main(["why", str(run.driven.run_dir)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 3 replicas are left and no spare; another is expected within" in said


@pytest.mark.parametrize("on_vacancy", ["shrink", "auto"])
def test_one_alone_waits_whichever_ranks_of_replacements_die(fleet: Callable[..., Any], on_vacancy: str) -> None:
    """The lead of the first as it loads the state, and a rank of the second as its lane forms, while the
    leads compute already: nobody waits for it in a microbatch."""
    run = fleet(fault("r1/1.1", "backward", step=3), fault("r1.2", "join_schema"), fault("r1/1.3", "connect"),
                replicas=2, ranks=2, steps=STEPS, script=[SCRIPT], on_vacancy=on_vacancy, min_replicas=2)  # fmt: skip
    check(run, {"r0.1", "r1.4"}, {"r0.1"})
    assert {(e.action, e.running, e.least) for e in decided(run)} == {("wait", 1, 2)}
    assert 1 in views(run)
    assert sorted(gone(run)) == ["r1.1", "r1.2", "r1.3"]


def test_auto_goes_on_where_no_replacement_can_come(fleet: Callable[..., Any]) -> None:
    run = fleet(fault("r1/1.1", "backward", step=3), replicas=2, ranks=2, steps=STEPS, script=[SCRIPT],
                on_vacancy="auto", max_restarts=0)  # fmt: skip
    check(run, {"r0.1"}, {"r0.1"})
    assert [(e.action, e.running) for e in decided(run)] == [("shrink", 1)]
    assert views(run) == [2, 1]


@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_is_killed_while_it_waits(fleet: Callable[..., Any], place: int) -> None:
    """The coordinator before it. Who is left waits alone, until both are replaced."""
    run = fleet(fault("r1/1.1", "backward", step=3), HANGS, replicas=3, ranks=2, steps=STEPS, script=[SCRIPT],
                on_vacancy="wait", stall_floor_s=60.0)  # fmt: skip
    run.until("two wait", lambda: run.served("r1.2") and formed(run) == 2)
    [first] = [e for e in run.driven.events if isinstance(e, ev.CoordinatorStarted)]
    run.strike(first.pid)
    run.until("they wait in another coordinator's view", lambda: formed(run) == 3)
    run.strike(rank(run, "r0.1", place))
    run.until("one waits", lambda: views(run)[3:4] == [1] and formed(run) >= 4)
    run.strike(run.pid("r1.2"))
    check(run, {"r0.2", "r1.3", "r2.1"}, {"r2.1"})
    assert views(run)[:4] == [3, 2, 2, 1]
    assert gone(run)["r0.1"] == ("SIGKILL of rank 1" if place else "SIGKILL")
    assert {e.action for e in decided(run)} == {"wait"}


def test_nobody_is_given_up_because_it_waits(fleet: Callable[..., Any]) -> None:
    """The replacement is stopped, and continued after seconds: those that wait, with all their ranks, are silent as
    long, and beyond what any of them may be in work of its own."""
    run = fleet(fault("r1/1.1", "backward", step=3), fault("r1.2", "join_hello", "SIGSTOP"), replicas=3, ranks=2,
                steps=STEPS, script=[SCRIPT], on_vacancy="wait", stall_floor_s=1.0)  # fmt: skip
    check(run, {"r0.1", "r1.2", "r2.1"}, {"r0.1", "r2.1"})
    assert any("r1.2 was stopped" in e.text for e in run.driven.events if isinstance(e, ev.Notice))
    assert not any(isinstance(e, ev.Suspected) for e in run.driven.events)
    assert views(run) == [3, 2, 3]


def test_who_comes_into_a_view_that_waits_waits_in_it(fleet: Callable[..., Any]) -> None:
    """Two replicas die in one step, and one replacement is there before the other."""
    run = fleet(fault("r2.1", "backward", step=3), fault("r2.2", "join_hello", "hang"), replicas=3, ranks=2,
                steps=STEPS, script=[SCRIPT], on_vacancy="wait", stall_floor_s=60.0)  # fmt: skip
    run.until("the others wait", lambda: views(run) == [3, 2] and formed(run) == 2)
    run.strike(rank(run, "r1.1", 1))
    run.until("two wait", lambda: run.placed("r1.2") and views(run)[-2:] == [1, 2])
    run.until("in a view that works", lambda: formed(run) == len(views(run)))
    run.strike(run.pid("r2.2"))
    check(run, {"r0.1", "r1.2", "r2.3"}, {"r0.1"})
    assert views(run)[-3:] == [1, 2, 3]


def test_a_rank_that_is_stopped_as_its_replica_waits(fleet: Callable[..., Any]) -> None:
    """The others miss it in the round before the replacement is served; or it is continued, where that takes longer to
    start than a rank for which nobody waits is left stopped."""
    run = fleet(fault("r1/1.1", "backward", step=3), HANGS, replicas=3, ranks=2, steps=STEPS, script=[SCRIPT],
                on_vacancy="wait", stall_floor_s=1.0)  # fmt: skip
    run.until("two wait", lambda: run.served("r1.2") and formed(run) == 2)
    run.strike(run.pid("r1.2"))
    started = lambda event: isinstance(event, ev.ReplicaStarted) and event.replica == "r1.3"  # noqa: E731
    run.until("another is started", lambda: any(map(started, run.driven.events)))
    run.strike(rank(run, "r0.1", 1), signal.SIGSTOP)
    assert run.finish() == 0, run.logs()
    continued = any("r0.1 was stopped" in e.text for e in run.driven.events if isinstance(e, ev.Notice))
    check(run, {"r0.1" if continued else "r0.2", "r1.3", "r2.1"}, {"r2.1"})
    assert continued != ("rank 1" in gone(run).get("r0.1", ""))


def test_too_few_save_and_stop_and_what_was_saved_goes_on(fleet: Callable[..., Any], tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    run = fleet(fault("r1/1.1", "backward", step=3), replicas=2, ranks=2, steps=4000, script=[SCRIPT], min_replicas=2,
                max_restarts=0, checkpoint_dir=kept, checkpoint_every=1000)  # fmt: skip
    assert run.finish() == 4, run.logs()
    [said] = decided(run)
    assert (said.action, said.running, said.least) == ("stop", 1, 2)
    assert run.saved()[-1].num_writers == 2
    again = fleet(replicas=1, ranks=2, steps=STEPS, script=[SCRIPT], checkpoint_dir=kept)
    assert again.finish() == 0, again.logs()
    assert {found["fingerprint"] for found in again.results().values()} == {undisturbed(SCRIPT, STEPS)["fingerprint"]}


@pytest.mark.parametrize("who", ["the run", "all that are left"])
def test_who_is_asked_to_stop_while_it_waits_saves_first(fleet: Callable[..., Any], tmp_path: Path, who: str) -> None:
    """A step is made by those that wait, on all their ranks, as it is what is saved. An engine sends SIGTERM to every
    process: ranks that are no leads stay."""
    kept = str(tmp_path / "kept")
    run = fleet(fault("r1/1.1", "backward", step=3), replicas=3, ranks=2, steps=4000, script=[SCRIPT],
                on_vacancy="wait", restart_backoff_s=60.0, checkpoint_dir=kept, checkpoint_every=10000,
                stop_save_s=300.0)  # fmt: skip
    run.until("two wait", lambda: views(run) == [3, 2] and formed(run) == 2)
    if who == "all that are left":
        for each in (rank(run, name, place) for name in ("r0.1", "r2.1") for place in range(2)):
            run.strike(each, signal.SIGTERM)
        run.until("it is saved", run.saved)
    run.strike(run.driven.process.pid, signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM, run.logs()
    [end] = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert (end.outcome, end.steps <= run.saved()[-1].step, run.saved()[0].step > 3) == ("stopped", True, True)
    assert run.saved()[-1].num_writers == 4
    assert [e.action for e in decided(run)] == ["wait"]
