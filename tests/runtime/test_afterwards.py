"""After the last step: a script's exit status counts, and a writer that dies is followed by another."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.prove._drive import Driven
from outlast.prove._process_tree import of_run

from .conftest import PATIENCE_S

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).with_name("afterwards.py")
STEPS = 6


def undisturbed() -> str:
    """The fingerprint of a run to which nothing happens."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(SCRIPT), str(STEPS), out]
        subprocess.run(command, check=True, capture_output=True, timeout=100)
        return (Path(out) / "result").read_text().split()[1]


class Job:
    """One run of the script. The gate is held until `release`."""

    def __init__(
        self, base: Path, *deeds: str, replicas: int = 2, options: tuple[str, ...] = (), holds: tuple[int, ...] = ()
    ) -> None:  # fmt: skip
        self.out = base
        self._gate = (base / "gate").open("w")
        self._holds = {step: (base / f"loop{step}").open("w") for step in holds}
        for gate in (self._gate, *self._holds.values()):
            fcntl.flock(gate, fcntl.LOCK_EX)
        settings = base / "run.toml"
        settings.write_text("[run]\nrestart_backoff_s = 0.0\nheartbeat_s = 0.2\n")
        given = ["--config", str(settings), "--replicas", str(replicas), *options]
        self.driven = Driven(base / "run", given, [str(SCRIPT), str(STEPS), str(base), *deeds])

    def until(self, what: str, test: Any) -> None:
        self.driven.until(what, test, PATIENCE_S, lambda: None)

    def finish(self) -> int:
        return self.driven.finish(PATIENCE_S, lambda: None)

    def release(self) -> None:
        self._gate.close()

    def train_on(self, step: int, what: str, test: Any) -> None:
        """Training waits before this step until `test()` holds."""
        self.until(what, test)
        self._holds.pop(step).close()

    def saw(self, kind: type) -> bool:
        return any(isinstance(event, kind) for event in self.driven.events)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        pids = [e.pid for e in self.driven.events if isinstance(e, ev.ReplicaStarted) and e.replica == name]
        assert len(pids) == 1, name
        signal.pidfd_send_signal(_pidfd(pids[0]), number)

    def exited(self, name: str) -> bool:
        return any(isinstance(e, ev.ReplicaExited) and e.replica == name for e in self.driven.events)

    @property
    def writer(self) -> str:
        return next(e.writer for e in reversed(self.driven.events) if isinstance(e, ev.TrainingEnded))

    @property
    def end(self) -> ev.RunFinished:
        (found,) = [e for e in self.driven.events if isinstance(e, ev.RunFinished)]
        return found

    @property
    def result(self) -> list[str]:
        path = self.out / "result"
        return path.read_text().split() if path.exists() else []


def _pidfd(pid: int) -> int:
    import os

    return os.pidfd_open(pid)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    started: list[Job] = []

    def start(*deeds: str, **shape: Any) -> Job:
        base = tmp_path / str(len(started))
        base.mkdir()
        started.append(Job(base, *deeds, **shape))
        return started[-1]

    yield start
    for each in started:
        each.release()
        for hold in each._holds.values():
            hold.close()
        each.driven.__exit__()
        assert of_run(each.driven.run_dir) == []


@pytest.mark.parametrize("deed", ["raise", pytest.param("exit", marks=pytest.mark.campaign)])
def test_the_writers_error_after_the_loop_is_the_runs(job: Any, deed: str) -> None:
    run = job(f"r0:{deed}")
    assert run.finish() == 5
    assert run.end.outcome == "failed"
    assert run.end.steps == STEPS
    assert f"training ended after {STEPS} steps, but the script of r0.1" in run.end.detail
    assert ("KeyError: 'no such metric'" if deed == "raise" else "exit code 3") in run.end.detail


@pytest.mark.campaign
def test_another_ones_error_after_the_loop_is_told(job: Any) -> None:
    run = job("r1:raise")
    assert run.finish() == 0
    assert "r1.1" in run.end.detail
    assert run.result[0] == "r0.1"


def test_a_run_is_finished_when_its_scripts_are(job: Any) -> None:
    """And a writer that is killed is followed by the other replica, which waits for it."""
    run = job("writer:wait")
    run.until("the writer writes", lambda: (run.out / "r0.1.writes").exists())
    run.until("the other is past its loop", lambda: (run.out / "r1.1.after").exists())
    run.driven.poll()
    assert run.writer == "r0.1"
    assert not [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    run.kill("r0.1")
    run.until("the next one writes", lambda: (run.out / "r1.1.writes").exists())
    assert not [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    run.release()
    assert run.finish() == 0
    assert run.writer == "r1.1"
    assert run.result[0] == "r1.1"
    assert [r.replica for r in run.driven.recoveries()] == ["r0.1"]


@pytest.mark.campaign
def test_the_coordinator_dies_after_the_loop(job: Any) -> None:
    run = job("writer:wait")
    run.until("the writer writes", lambda: (run.out / "r0.1.writes").exists())
    run.driven.poll()
    old = run.driven.coordinator_pid
    signal.pidfd_send_signal(_pidfd(old), signal.SIGKILL)
    run.until("another took over", lambda: run.driven.coordinator_pid != old)
    run.kill("r0.1")
    run.until("the next one writes", lambda: (run.out / "r1.1.writes").exists())
    run.release()
    assert run.finish() == 0
    assert run.result[0] == "r1.1"
    assert run.end.steps == STEPS


@pytest.mark.campaign
def test_a_writer_that_dies_alone_takes_the_state_with_it(job: Any) -> None:
    run = job("writer:wait", replicas=1)
    run.until("the writer writes", lambda: (run.out / "r0.1.writes").exists())
    run.driven.poll()
    run.kill("r0.1", signal.SIGTERM)
    assert run.finish() == 6
    assert f"training ended after {STEPS} steps, but r0.1 died after the last step" in run.end.detail
    assert run.end.steps == STEPS


@pytest.mark.campaign
def test_a_writer_that_dies_alone_is_followed_by_a_spare(job: Any) -> None:
    """Which was no member, and has waited with the state since training ended."""
    run = job("writer:wait", replicas=1, options=("--spares", "1"), holds=(1, 4))
    run.train_on(1, "the spare was served", lambda: run.saw(ev.JoinerServed))
    run.train_on(4, "it had caught up", lambda: run.saw(ev.JoinerCaughtUp))
    run.until("the writer writes", lambda: (run.out / "r0.1.writes").exists())
    run.driven.poll()
    run.kill("r0.1")
    run.until("the spare writes", lambda: (run.out / "r1.1.writes").exists())
    run.release()
    assert run.finish() == 0
    assert run.result == ["r1.1", undisturbed()]
    assert run.end.steps == STEPS


@pytest.mark.campaign
def test_a_writer_that_dies_alone_is_followed_from_its_checkpoint(job: Any, tmp_path: Path) -> None:
    run = job("writer:wait", replicas=1, options=("--checkpoint-dir", str(tmp_path / "kept")))
    run.until("the writer writes", lambda: (run.out / "r0.1.writes").exists())
    run.driven.poll()
    run.kill("r0.1")
    run.until("another one writes", lambda: (run.out / "r0.2.writes").exists())
    run.release()
    assert run.finish() == 0
    assert run.result[0] == "r0.2"


@pytest.mark.campaign
def test_who_asked_too_early_cannot_follow(job: Any) -> None:
    """r1 had been told that it does not write, and has not asked again: nothing is written, and the run says so."""
    run = job("r0:wait", "r1:early")
    run.until("both are past their loops", lambda: all((run.out / f"r{i}.1.after").exists() for i in (0, 1)))
    run.driven.poll()
    run.kill("r0.1")
    assert run.finish() == 6
    assert "FLEET_LOST" in (run.driven.run_dir / "logs" / "r1.1.log").read_text()
    assert run.result == []
