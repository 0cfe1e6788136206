"""The launcher, in this process: what it makes of an agent that ends."""

from __future__ import annotations

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
    child, blocks = start([sys.executable, "-c", ""], environ={}), RankBlocks()
    blocks.passed.close()
    region = Region(Progress.SIZE, name="a0")
    agent = room._Agent("a0", child, Watch(child.pid, Progress(region), 0.5, 10.0), blocks)
    launcher._agents.append(agent)
    while launcher._agents:
        launcher._agent_ended(agent, {})
    assert began == started


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
