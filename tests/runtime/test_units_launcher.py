"""The launcher, in this process: what it makes of an agent that ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.config import resolve
from outlast.core import events as ev
from outlast.core.protocol import messages as m
from outlast.journal import Journal, LastLine, RunLock
from outlast.runtime.host import launcher as room
from outlast.runtime.host._children import start
from outlast.runtime.host._coordinator_ends import ended_code
from outlast.runtime.host._rank_blocks import RankBlocks
from outlast.runtime.host.launcher import Launcher
from outlast.runtime.host.silence import Watch
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.save_messages import COORDINATOR_RECORD


def with_agent(launcher: Launcher, command: list[str]) -> room._Agent:
    child, blocks = start(command, environ={"PATH": os.environ["PATH"]}), RankBlocks()
    blocks.passed.close()
    region = Region(Progress.SIZE, name="a0")
    launcher._agents.append(room._Agent("a0", child, Watch(child.pid, Progress(region), 0.5, 10.0), blocks))
    return launcher._agents[-1]


@pytest.mark.parametrize(("over", "started"), [(True, []), (False, ["a0.2"])])
def test_an_agent_that_ends_with_the_run_has_no_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool, started: list[str]
) -> None:
    """The coordinator writes the end down, tells the agents, and ends: an agent may be the first to be gone."""
    began: list[str] = []
    monkeypatch.setattr(Launcher, "_start_agent", lambda self, environ, name: began.append(name))
    launcher = Launcher(resolve(cli={}, environ={}), ["true"], tmp_path / "run")
    with Journal.create(tmp_path / "run") as journal:
        if over:
            journal.append(
                ev.RunFinished(at_s=time.time(), outcome="finished", steps=3, detail="", exit_code=0, seconds={})
            )
    agent = with_agent(launcher, [sys.executable, "-c", ""])
    while launcher._agents:
        launcher._agent_ended(agent, {})
    assert began == started


@pytest.mark.parametrize(("stuck", "code"), [(True, 143), (False, 0)])
def test_an_agent_that_is_stuck_after_a_good_end_is_ended_in_time_and_told_by_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool, code: int
) -> None:
    """The writer exports still as the notice comes, again and again: half an export is no success."""
    now, (wake_r, wake_w) = [100.0], os.pipe()
    launcher = Launcher(resolve(cli={}, environ={}), ["true"], tmp_path / "run")
    launcher._exit_code = 0
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN if stuck else signal.SIG_DFL)  # a child begins with it
    try:
        agent = with_agent(launcher, ["sleep", "600"])
    finally:
        signal.signal(signal.SIGTERM, previous)
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])

    def turn(at_s: float) -> None:
        now[0] = at_s
        launcher._signalled(signal.SIGTERM, None)
        os.write(wake_w, b"x")
        launcher._turn({}, None, None, wake_r)  # type: ignore[arg-type]  # for a coordinator's successor

    for at_s in (100.0, 106.0, 109.0):
        turn(at_s)
        assert launcher._stop_by_s == 110.0
    if stuck:
        assert launcher._code == 0
        turn(111.0)
    while launcher._agents:
        launcher._agent_ended(agent, {})
    assert launcher._code == code
    os.close(wake_r), os.close(wake_w)


def test_an_end_that_found_no_room_in_the_journal_is_in_the_record(tmp_path: Path) -> None:
    """On a full disk: of a coordinator that ended by itself, with the run's code. One that was killed is replaced."""
    with Journal.create(tmp_path / "run") as journal:
        epoch = journal.claim("coordinator")
        assert ended_code(tmp_path / "run", 0) is None
        journal.put(epoch, COORDINATOR_RECORD, msgspec.msgpack.encode(m.FleetRecord(outcome="failed", exit_code=6)))
    assert [ended_code(tmp_path / "run", code) for code in (6, 1, None)] == [6, None, None]


def test_the_end_is_told_with_what_a_slow_disk_takes_to_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was up to a second before the end that a stopwatch saw, where each wait for the disk took a fifth."""
    now = [100.0]

    class Slow(LastLine):
        def __init__(self, run_dir: Path) -> None:
            super().__init__(run_dir)
            now[0] += 0.4

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            now[0] += 0.4

    Journal.create(tmp_path / "run").close()
    launcher = Launcher(resolve(cli={}, environ={}), ["true"], tmp_path / "run")
    launcher._exit_code = 5
    monkeypatch.setattr(room, "LastLine", Slow)
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    launcher._end(RunLock.take(tmp_path / "run"))
    with Journal.open_reader(tmp_path / "run") as reader:
        (end,) = reader.events(kinds=[ev.RunEnded])
    assert end.event == ev.RunEnded(at_s=launcher._apart_s + now[0], exit_code=5)
