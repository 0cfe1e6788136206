"""A run begins with what the diary knows: of alarms, and of agents that are out of service. It never waits for it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from outlast.config import RunConfig
from outlast.core.protocol import messages as m
from outlast.health import Diary, DiaryEntry
from outlast.runtime.coordinator._alarm_memory import agents_of_note, taught
from outlast.runtime.host.agent import Agent
from outlast.runtime.host.environment import Environment
from outlast.runtime.transport.progress_block import Progress


def test_a_run_knows_what_the_diary_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"OUTLAST_DIARY": str(tmp_path / "diary.jsonl")}
    assert taught(environ) == {}
    assert agents_of_note(environ, "h")["retired"] == frozenset()
    assert capsys.readouterr().err == ""
    book = Diary(tmp_path / "diary.jsonl")
    book.add(DiaryEntry(at_s=1.0, device="h/a1", kind="alarm", text="fatal xid.fatal", passed=True))
    for device in ("h/a1", "other/a0", "h/a0/r1", "h/gpu/3/4", "GPU-77"):
        book.add(DiaryEntry(at_s=2.0, device=device, kind="retired"))
    assert taught(environ)["fatal xid.fatal"].num_false == 1
    assert agents_of_note(environ, "h")["retired"] == {"a1", "other:"}
    assert "without replicas: a1, other" in capsys.readouterr().err
    book.add(DiaryEntry(at_s=3.0, device="h/a1", kind="returned"))
    assert agents_of_note(environ, "h")["retired"] == {"other:"}


def test_no_diary_and_a_diary_that_cannot_be_read_hold_up_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taught({}) == {}
    assert agents_of_note({}, "h")["retired"] == frozenset()
    environ = {"OUTLAST_DIARY": str(tmp_path)}
    assert taught(environ) == {}
    assert agents_of_note(environ, "h")["retired"] == frozenset()
    assert capsys.readouterr().err.count("teaches nothing") == 1


def test_who_is_back_is_on_probation_until_it_has_worked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"OUTLAST_DIARY": str(tmp_path / "diary.jsonl")}
    book = Diary(tmp_path / "diary.jsonl")
    book.add(
        DiaryEntry(at_s=1.0, device="h/a1", kind="retired"),
        DiaryEntry(at_s=2.0, device="h/a1", kind="returned"),
        DiaryEntry(at_s=2.0, device="h/a2/r3", kind="repair"),
        DiaryEntry(at_s=2.0, device="other/a0/r7", kind="repair"),
        DiaryEntry(at_s=2.0, device="other/a3", kind="repair"),  # of a run that it started itself
    )
    assert agents_of_note(environ, "h") == {"retired": frozenset(), "probation": {"a1", "a2", "other:"}}
    assert "tested before they train, and the last to be given work: a1, a2, other" in capsys.readouterr().err
    for slot, hours in (("r0", 60.0), ("r1", 60.0)):
        book.add(DiaryEntry(at_s=3.0, device=f"h/a1/{slot}", kind="hours", hours=hours))
    assert agents_of_note(environ, "h")["probation"] == {"a2", "other:"}, "a host works in its slots"


def test_a_replica_on_probation_is_told_to_ask_its_device_first(tmp_path: Path) -> None:
    environ = {
        "OUTLAST_COORDINATOR": "127.0.0.1:1", "OUTLAST_SECRET": "00", "OUTLAST_RUN_DIR": str(tmp_path),
        "OUTLAST_CONFIG": msgspec.json.encode(RunConfig(replicas=2, preload=False)).decode(),
    }  # fmt: skip
    agent, told = Agent("a0", environ, []), []
    agent.nursery.start = lambda environ, *_: told.append(environ) or object()  # type: ignore[assignment, func-returns-value]
    for member, tested in (("r0.1", True), ("r1.1", False)):
        agent._order(m.Spawn(member=member, after_s=0.0, tested=tested))
        agent._start(member, 0, 0).progress.region.close()
    assert [row["OUTLAST_PROBATION"] for row in told] == ["true", ""]
    here = {**environ, **told[0], "OUTLAST_RUN": "x", "OUTLAST_PARENT": str(os.getppid())}
    for wanted in ("true", ""):
        file = os.memfd_create("progress")  # whoever reads the environment takes it
        os.ftruncate(file, Progress.SIZE)
        read = Environment.read({**here, "OUTLAST_PROBATION": wanted, "OUTLAST_PROGRESS_FD": str(file)})
        assert read.probation is bool(wanted)
        read.progress.region.close()
