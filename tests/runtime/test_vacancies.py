"""Replicas are lost and no spare is there: the others wait, or the run saves and stops; the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.runtime.settings.fault_points import Fault

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def kill(replica: str, phase: Phase, step: int, **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase.name.lower(), step=step, action="SIGKILL", **where)


def decided(run: Any) -> list[ev.VacancyDecided]:
    return [e for e in run.driven.events if isinstance(e, ev.VacancyDecided)]


def views(run: Any) -> list[int]:
    """Members of each view, from the first on."""
    return [len(e.members) for e in run.driven.events if isinstance(e, ev.ViewInstalled)]


def formed(run: Any) -> int:
    return sum(isinstance(e, ev.ViewFormed) for e in run.driven.events)


def test_the_others_wait_until_a_replacement_is_there(fleet: Callable[..., Any], capsys: Any) -> None:
    """No step is made by fewer: the step that a death interrupted is finished by as many as began it."""
    run = fleet(kill("r1.1", Phase.BACKWARD, 3), kill("r0.1", Phase.GATHER, 6, bucket=1),
                replicas=3, steps=10, on_vacancy="wait")  # fmt: skip
    run.assert_unchanged(survivors={"r0.2", "r1.2", "r2.1"}, recoveries=2)
    assert [(e.action, e.running, e.wanted) for e in decided(run)] == [("wait", 2, 3), ("wait", 2, 3)]
    assert views(run) == [3, 2, 3, 2, 3]
    capsys.readouterr()
    assert main(["why", str(run.driven.run_dir)]) == 0
    assert "2 of 3 replicas are left and no spare; another is expected within" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_wait_that_is_over_goes_on_with_fewer(fleet: Callable[..., Any]) -> None:
    """The replacement starts later than anybody waits for it."""
    run = fleet(kill("r1.1", Phase.BACKWARD, 3), replicas=2, steps=40, on_vacancy="wait", vacancy_wait_s=0.5,
                restart_backoff_s=60.0)  # fmt: skip
    run.assert_unchanged(survivors={"r0.1"}, recoveries=1)
    assert [e.action for e in decided(run)] == ["wait", "shrink"]


def test_too_few_save_and_stop_and_what_was_saved_goes_on(fleet: Callable[..., Any], tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    run = fleet(kill("r1.1", Phase.BACKWARD, 3), replicas=2, steps=4000, min_replicas=2, max_restarts=0,
                checkpoint_dir=kept, checkpoint_every=1000)  # fmt: skip
    assert run.finish() == 4, run.logs()
    [said] = decided(run)
    assert (said.action, said.running, said.least) == ("stop", 1, 2)
    assert "no other may be started any more" in said.reason
    assert run.saved(), "it saves first"
    [end] = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert (end.outcome, end.steps <= run.saved()[-1].step) == ("stopped", True)
    assert end.detail.startswith("too few replicas: 1 of 2 replicas are left")


@pytest.mark.parametrize("who", ["the run", "all that are left"])
def test_who_is_asked_to_stop_while_it_waits_saves_first(fleet: Callable[..., Any], tmp_path: Path, who: str) -> None:
    """The replacement would come in a minute. A step is made, as it is what is saved. The run stops with it; members
    that are asked to leave go on until the replacement has the state, and lose nothing should they be killed."""
    kept = str(tmp_path / "kept")
    run = fleet(kill("r1.1", Phase.BACKWARD, 3), replicas=3, steps=4000, on_vacancy="wait", restart_backoff_s=60.0,
                checkpoint_dir=kept, checkpoint_every=10000, stop_save_s=300.0)  # fmt: skip
    run.until("two wait", lambda: views(run) == [3, 2] and formed(run) == 2)
    if who == "all that are left":
        for name in ("r0.1", "r2.1"):
            run.strike(run.pid(name), signal.SIGTERM)
        run.until("it is saved", run.saved)
    run.strike(run.driven.process.pid, signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM, run.logs()
    [end] = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert (end.outcome, end.steps <= run.saved()[-1].step, run.saved()[0].step > 3) == ("stopped", True, True)
    assert [e.action for e in decided(run)] == ["wait"]
