"""A run begins with what the diary knows: of alarms, and of agents that are out of service. It never waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.health import Diary, DiaryEntry
from outlast.runtime.coordinator._alarm_memory import retired_agents, taught


def test_a_run_knows_what_the_diary_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"OUTLAST_DIARY": str(tmp_path / "diary.jsonl")}
    assert taught(environ) == {}
    assert retired_agents(environ, "h") == frozenset()
    assert capsys.readouterr().err == ""
    book = Diary(tmp_path / "diary.jsonl")
    book.add(DiaryEntry(at_s=1.0, device="h/a1", kind="alarm", text="fatal xid.fatal", passed=True))
    for device in ("h/a1", "other/a0", "h/a0/r1", "h/gpu/3/4", "GPU-77"):
        book.add(DiaryEntry(at_s=2.0, device=device, kind="retired"))
    assert taught(environ)["fatal xid.fatal"].num_false == 1
    assert retired_agents(environ, "h") == {"a1"}
    assert "without replicas: a1" in capsys.readouterr().err
    book.add(DiaryEntry(at_s=3.0, device="h/a1", kind="returned"))
    assert retired_agents(environ, "h") == frozenset()


def test_no_diary_and_a_diary_that_cannot_be_read_hold_up_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taught({}) == {}
    assert retired_agents({}, "h") == frozenset()
    environ = {"OUTLAST_DIARY": str(tmp_path)}
    assert taught(environ) == {}
    assert retired_agents(environ, "h") == frozenset()
    assert capsys.readouterr().err.count("teaches nothing") == 1
