"""What is told of coordinators that ended, and of a run whose last one did."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.runtime.virtual_host import Puppet, VirtualRun

from outlast.core import events as ev
from outlast.core.protocol import messages as m
from outlast.journal import Journal, RunLock
from outlast.observe import status, why
from outlast.runtime.host._coordinator_ends import CoordinatorEnds, ended_code
from outlast.runtime.transport.save_messages import COORDINATOR_RECORD

STARTED = ev.RunStarted(
    at_s=100.0, run_id="r", command=["true"], num_replicas=1, num_spares=0, signature={}, config={"heartbeat_s": 1.0}
)
PROGRESS = ev.ProgressMade(at_s=110.0, view=[1, 1], stable=4, losses=[], step_s=0.1, committed=5, committed_at_s=110.0)


def events_of(run_dir: Path) -> list[Any]:
    with Journal.open_reader(run_dir) as journal:
        return [entry.event for entry in journal.events()]


def decide(run_dir: Path, lock_fd: int, outcome: Any, code: int, detail: str) -> None:
    """What a coordinator puts into its record as it ends the run, before it writes the end."""
    with Journal.open_writer(run_dir, lock_fd=os.dup(lock_fd)) as journal:
        record = m.FleetRecord(outcome=outcome, exit_code=code, detail=detail)
        assert journal.put(journal.claim("coordinator"), COORDINATOR_RECORD, msgspec.msgpack.encode(record))


def test_a_coordinator_that_dies_as_it_starts_is_told_by_the_next(tmp_path: Path) -> None:
    """Of four that were struck one after the other, one was in the journal."""
    ends = CoordinatorEnds(tmp_path)
    with Journal.create(tmp_path) as journal:
        assert ends.untold() is None
        for number in range(3):
            ends.died(f"it ended by SIGKILL {number}", 0.5)
        rows = json.loads(ends.untold() or "")
        assert [row["detail"].partition(";")[0] for row in rows] == [f"it ended by SIGKILL {n}" for n in range(3)]
        journal.append(ev.Recovery(at_s=1.0, view=[1, 0], **rows[0]))
        assert journal.flush()
        assert json.loads(ends.untold() or "") == rows[1:]
        journal.append_many([ev.Recovery(at_s=1.0, view=[2, 0], **row) for row in rows[1:]])
        assert journal.flush()
        assert ends.untold() is None


@pytest.mark.parametrize(("stopping", "outcome", "code"), [("", "failed", 3), ("terminated", "stopped", 143)])
def test_a_run_whose_last_coordinator_died_has_an_end(tmp_path: Path, stopping: str, outcome: str, code: int) -> None:
    """Its exit code was 3 "without a word", and the journal had no end: nobody was left to write it."""

    def dies(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 1:
            with Journal.open_writer(tmp_path / "run", lock_fd=os.dup(child.passed("OUTLAST_LOCK_FD"))) as journal:
                journal.append(PROGRESS)
            (tmp_path / "run" / "logs" / "coordinator.log").write_text("its last words\n")
        if stopping:
            run.host.after(0.1, lambda: run.struck(signal.SIGTERM))
        run.host.after(0.2, lambda: child.end(by=signal.SIGSEGV))

    run, told = VirtualRun(tmp_path, dies), list[Any]()
    run.launcher.began_at_s, run.launcher.ended = STARTED.at_s, lambda _: told.extend(run.told())
    assert run.goes() == code
    *_, finished, ended = events_of(tmp_path / "run")
    assert told[-1] == finished, "it is there to be shown when the run ends"
    assert (finished.outcome, finished.steps, finished.exit_code, ended.exit_code) == (outcome, 5, code, code)
    assert finished.seconds["wall"] > 0
    recoveries = [event for event in told if isinstance(event, ev.Recovery)]
    assert len(recoveries) == len(run.coordinators) - 1, "the last one had no successor"
    assert why(events_of(tmp_path / "run")).gone_steps == 5
    if not stopping:
        assert "could not be kept alive: 9 ended, the last because it ended by SIGSEGV" in finished.detail
        assert finished.detail.endswith("its last words")
    assert status(events_of(tmp_path / "run")).state == outcome


def test_a_run_that_takes_too_long_to_stop_has_the_end_that_was_decided(tmp_path: Path) -> None:
    """Its replicas still loaded, so its coordinator was killed while it waited for them; `why` then said that the
    launcher had been killed, and its last line that the coordinator could not be kept alive."""

    def waits(run: VirtualRun, child: Puppet, _: int) -> None:
        decide(tmp_path / "run", child.passed("OUTLAST_LOCK_FD"), "stopped", 143, "terminated")
        run.host.after(0.1, lambda: run.struck(signal.SIGTERM))

    run = VirtualRun(tmp_path, waits)
    assert run.goes() == 143
    assert [child.sent for child in run.coordinators] == [[signal.SIGKILL]]
    *_, finished, _ = events_of(tmp_path / "run")
    assert (finished.outcome, finished.exit_code, finished.detail) == ("stopped", 143, "terminated")
    assert status(events_of(tmp_path / "run")).state == "stopped"


def test_an_end_is_written_once_and_as_it_was_decided(tmp_path: Path) -> None:
    """It was decided, and written by the coordinator; or on a full disk it was in its record alone."""
    for name, decided in (("written", False), ("decided", True)):
        with Journal.create(tmp_path / name) as journal:
            if not decided:
                end = ev.RunFinished(at_s=1.0, outcome="finished", steps=3, detail="", exit_code=0, seconds={})
                journal.append(end)
        lock = RunLock.take(tmp_path / name)
        if decided:
            decide(tmp_path / name, lock.fileno(), "finished", 0, "")
        assert ended_code(tmp_path / name, 0) == 0
        CoordinatorEnds(tmp_path / name).write_end(lock.fileno(), 9.0, 0, "")
        os.fstat(lock.fileno())  # still ours
        lock.release()
        [finished] = events_of(tmp_path / name)
        assert (finished.at_s, finished.outcome, finished.exit_code) == (9.0 if decided else 1.0, "finished", 0)


def test_an_end_that_was_decided_is_no_other_whatever_was_asked_for_meanwhile(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run"):
        pass
    lock = RunLock.take(tmp_path / "run")
    decide(tmp_path / "run", lock.fileno(), "finished", 0, "")
    CoordinatorEnds(tmp_path / "run").write_end(lock.fileno(), 9.0, 143, "terminated")
    lock.release()
    [finished] = events_of(tmp_path / "run")
    assert (finished.outcome, finished.exit_code, finished.detail) == ("finished", 0, "")
