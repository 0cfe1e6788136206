"""A run begins with what the diary knows: of alarms, and of agents that are out of service. It never waits for it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.runtime.virtual_host import VirtualHost

from outlast.config import RunConfig
from outlast.core.protocol import messages as m
from outlast.health import Diary, DiaryEntry, own_note
from outlast.runtime.coordinator._alarm_memory import agents_of_note, taught
from outlast.runtime.host.agent import Agent, host_of
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


def test_a_host_says_what_its_own_diary_says_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "diary.jsonl"
    environ, book = {"OUTLAST_DIARY": str(file)}, Diary(file)
    assert own_note({}, "h") == own_note(environ, "h") == ""
    book.add(
        DiaryEntry(at_s=1.0, device="h2/a0", kind="retired"), DiaryEntry(at_s=1.0, device="h/a0/r0", kind="repair")
    )
    assert own_note(environ, "h") == "probation"
    book.add(DiaryEntry(at_s=2.0, device="h/a0/r0", kind="hours", hours=200.0))
    assert own_note(environ, "h") == "", "it has worked since"
    book.add(DiaryEntry(at_s=3.0, device="h/a0", kind="retired"))
    assert own_note(environ, "h") == "retired"
    with file.open("ab") as diary:
        diary.write(b'{"version": 99}\n{"at_s": 4.0, "dev')  # of a later version, and cut short
    assert own_note(environ, "h") == "retired"
    assert own_note({"OUTLAST_DIARY": str(tmp_path)}, "h") == ""
    assert "this host's diary says nothing" in capsys.readouterr().err


def test_an_agent_of_another_host_offers_itself_with_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Diary(tmp_path / "diary.jsonl").add(DiaryEntry(at_s=1.0, device="h/a0", kind="repair"))
    environ = {"OUTLAST_ADDRESS": "127.0.0.1", "OUTLAST_HOST": "h", "OUTLAST_HOST_SLOTS": "2"}
    monkeypatch.setenv("OUTLAST_DIARY", str(tmp_path / "diary.jsonl"))
    offer = host_of("h:4fa0", environ)
    assert offer is not None
    assert (offer.slots, offer.noted) == (2, "probation")


def test_a_replica_on_probation_is_told_to_ask_its_device_first(tmp_path: Path) -> None:
    environ = {
        "OUTLAST_COORDINATOR": "127.0.0.1:1", "OUTLAST_SECRET": "00", "OUTLAST_RUN_DIR": str(tmp_path),
        "OUTLAST_CONFIG": msgspec.json.encode(RunConfig(replicas=2, preload=False)).decode(),
    }  # fmt: skip
    host = VirtualHost()
    agent = Agent("a0", environ, [], system=host)
    for member, tested in (("r0.1", True), ("r1.1", False)):
        agent._order(m.Spawn(member=member, after_s=0.0, tested=tested))
    agent.agenda.turn()
    told = [child.environ for child in host.children]
    assert [row["OUTLAST_PROBATION"] for row in told] == ["true", ""]
    here = {**environ, **told[0], "OUTLAST_RUN": "x", "OUTLAST_PARENT": str(os.getppid())}
    for wanted in ("true", ""):
        file = os.memfd_create("progress")  # whoever reads the environment takes it
        os.ftruncate(file, Progress.SIZE)
        read = Environment.read({**here, "OUTLAST_PROBATION": wanted, "OUTLAST_PROGRESS_FD": str(file)})
        assert read.probation is bool(wanted)
        read.progress.region.close()
