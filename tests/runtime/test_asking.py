"""A run is asked to save now, and to stop: by its own user, through its launcher, told in its journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main
from outlast.cli._asking import ask_run
from outlast.core import events as ev
from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal import Journal
from outlast.runtime.transport.save_messages import SAVE_EPOCHS


@pytest.mark.process
def test_a_run_saves_and_stops_when_it_is_asked(fleet: Callable[..., Any], tmp_path: Path) -> None:
    run = fleet(replicas=2, steps=60, gates=[6, 12], checkpoint={"dir": str(tmp_path / "ck"), "every": 1000})
    run_dir = run.driven.run_dir
    asked: list[int] = []

    def saved() -> bool:
        return any("a save was asked for" in event.reason for event in run.saved())

    def ready() -> bool:
        """Both train, and the coordinator has a place to save to."""
        if not any(isinstance(event, ev.ViewFormed) for event in run.driven.events):
            return False
        with Journal.open_reader(run_dir) as journal:
            return journal.get(SAVE_EPOCHS) is not None

    def told(what: str) -> bool:
        return any(isinstance(event, ev.CheckpointInterval) and what in event.reason for event in run.driven.events)

    run.until("a view and a place to save to", ready)
    asked.append(main(["save", str(run_dir)]))
    run.gate(6, "the coordinator was told", lambda: told("now: a save was asked for"))
    run.until("a save that was asked for", saved)
    asked.append(main(["stop", str(run_dir), "--yes"]))
    run.gate(12, "the coordinator was told to stop", lambda: told("now: the run was asked to stop"))
    assert asked == [0, 0]
    assert run.finish() == 128 + signal.SIGTERM, run.logs()
    (end,) = [event for event in run.driven.events if isinstance(event, ev.RunFinished)]
    assert end.outcome == "stopped"
    with pytest.raises(ConfigError, match="the run is over"):
        ask_run(run_dir, "stop")


@pytest.mark.process
def test_a_stop_whose_coordinator_dies_has_its_save_all_the_same(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Its launcher was asked, and the coordinator killed before the save was there: 72 steps were lost at once."""
    run = fleet(
        replicas=2, steps=60, gates=[6], checkpoint={"dir": str(tmp_path / "ck"), "every": 1000}, stop_save_s=60
    )

    def ready() -> bool:
        with Journal.open_reader(run.driven.run_dir) as journal:
            return journal.get(SAVE_EPOCHS) is not None

    def asked() -> int:
        told = [event for event in run.driven.events if isinstance(event, ev.CheckpointInterval)]
        return sum("now: the run was asked to stop" in event.reason for event in told)

    run.until("both wait before step 6", lambda: run.driven.step >= 5 and ready())
    run.strike(run.driven.process.pid, signal.SIGTERM)
    run.until("the coordinator was told", lambda: asked() == 1)
    run.strike(run.driven.coordinator_pid)
    run.gate(6, "its successor was told as well", lambda: asked() == 2)
    assert run.finish() == 128 + signal.SIGTERM, run.logs()
    (end,) = [event for event in run.driven.events if isinstance(event, ev.RunFinished)]
    assert (end.outcome, [event.step for event in run.saved()]) == ("stopped", [end.steps])


@pytest.fixture
def stranger(tmp_path: Path) -> Any:
    """A process that has nothing to do with the run, and would end at the first signal."""
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) is not None
    child.stdout.close()


@pytest.mark.process
def test_nobody_is_signalled_but_the_holder(tmp_path: Path, stranger: Any) -> None:
    """A lock file that names a process which came later under the same number."""
    Journal.create(tmp_path / "run").close()
    for text in (str(stranger.pid), "", "0", "1", "-1", "junk", str(2**22 + 1)):
        (tmp_path / "run" / "run.lock").write_text(text)
        for wish in ("save", "stop"):
            with pytest.raises(ConfigError, match="the run is over"):
                ask_run(tmp_path / "run", wish)  # type: ignore[arg-type]
    assert stranger.poll() is None


def test_a_holder_that_does_not_hear_yet_is_left_alone(tmp_path: Path) -> None:
    """This process holds the lock and has no handler: a signal would end it."""
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    with Journal.create(tmp_path / "run"), pytest.raises(EnvironmentFault, match="only starting"):
        ask_run(tmp_path / "run", "save")


def test_a_holder_that_hears_is_asked(tmp_path: Path) -> None:
    heard: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with Journal.create(tmp_path / "run"):
            assert "outlast status" in ask_run(tmp_path / "run", "save")
            os.getpid()  # handlers run between two instructions
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, old)
