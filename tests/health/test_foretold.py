"""Alarms become shares: what came true, what was false, what nobody can know; and what that is worth to a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.health import Diary, DiaryEntry, alarm_kinds, foretold_of, learn_run, worth_of


def begun(at_s: float = 0.0) -> list[ev.AnyEvent]:
    return [
        ev.RunStarted(at_s=at_s, run_id="run", num_replicas=2, num_spares=0, config={}, command=[], signature={}),
        ev.ReplicaStarted(at_s=at_s, replica="r0.1", agent="a0", pid=1),
        ev.ReplicaStarted(at_s=at_s, replica="r1.1", agent="a1", pid=2),
    ]


def finding(at_s: float, host: str, action: str = "fatal", source: Any = "readings", evidence: str = "xid.fatal: 79"):  # type: ignore[no-untyped-def]
    return ev.DeviceFinding(
        at_s=at_s, replica="", host=host, device="gpu", source=source, step=-1, microbatch=-1, evidence=evidence,
        action=action, remedy="",
    )  # fmt: skip


def died(at_s: float, replica: str, cause: Any = "signal") -> ev.AnyEvent:
    return ev.ReplicaExited(at_s=at_s, replica=replica, cause=cause, detail="", noticed_by="agent", step=3)


def moved(at_s: float, host: str) -> ev.AnyEvent:
    return ev.AlarmWeighed(
        at_s=at_s, host=host, alarm="fatal xid.fatal", evidence="", chance=0.8, delay_s=600.0, action="move", costs={},
        replicas=[], successors=[],
    )  # fmt: skip


def alarms(*events: ev.AnyEvent) -> list[tuple[str, bool | None, float]]:
    """(kind, whether it was false, hours) of the alarms that a run settled."""
    rows = list(enumerate([*begun(), *events, ev.RunEnded(at_s=99_999.0, exit_code=0)]))
    return [(e.text, e.passed, e.hours) for e in learn_run(rows, "h", []) if e.kind == "alarm"]


def test_a_failure_after_an_alarm_makes_it_true_and_time_makes_it_false() -> None:
    assert alarms(finding(10.0, "a1"), died(370.0, "r1.1")) == [("fatal xid.fatal", False, 0.1)]
    assert alarms(finding(10.0, "a1"), died(370.0, "r0.1")) == [("fatal xid.fatal", True, 0.0)]


def test_an_alarm_that_was_acted_on_proves_nothing_unless_a_test_does() -> None:
    assert alarms(finding(10.0, "a1"), moved(11.0, "a1")) == []
    tested = [finding(20.0, "a1", result, "test") for result in ("passed", "failed")]
    assert alarms(finding(10.0, "a1"), moved(11.0, "a1"), tested[0]) == [("fatal xid.fatal", True, 0.0)]
    ((_, false, hours),) = alarms(finding(10.0, "a1"), moved(11.0, "a1"), tested[1])
    assert not false
    assert hours == pytest.approx(10 / 3600)


def test_what_was_played_back_is_no_alarm_and_leaving_is_no_failure() -> None:
    assert alarms(finding(10.0, "a1", evidence="xid.fatal: 79 (recorded)"), died(20.0, "r1.1")) == []
    assert alarms(finding(10.0, "a1"), died(20.0, "r1.1", "left")) == [("fatal xid.fatal", True, 0.0)]


def entry(kind: Any, **more: Any) -> DiaryEntry:
    return DiaryEntry(at_s=1.0, device="h/a", kind=kind, **more)


def diary(tmp_path: Path) -> Path:
    book = Diary(tmp_path / "diary.jsonl")
    for number in range(10):
        book.add(entry("failure"))
        if number < 3:
            book.add(entry("alarm", text="fatal xid.fatal", passed=False, hours=0.5))
    book.add(entry("alarm", text="warning edac.ce", passed=True))
    return book.path


def test_shares_have_intervals_and_kinds_are_kept_apart(tmp_path: Path) -> None:
    found = foretold_of(Diary(diary(tmp_path)).entries())
    assert (found.failures, found.foretold, found.alarms, found.notice_s) == (10, 3, 4, 1800.0)
    assert found.share[0] == 0.3
    assert found.share[1] == pytest.approx(0.108, abs=0.001)
    assert found.share[2] == pytest.approx(0.603, abs=0.001)
    assert {kind.kind: (kind.true, kind.false) for kind in found.kinds} == {
        "fatal xid.fatal": (3, 0), "warning edac.ce": (0, 1),
    }  # fmt: skip
    kinds = alarm_kinds(Diary(diary(tmp_path / "again")).entries())
    assert kinds["fatal xid.fatal"].p > 0.8 > 0.1 > kinds["warning edac.ce"].p
    assert "30 % of" not in worth_of(found)
    assert "3 of 10 failures were foretold (30%" in worth_of(found)
    assert "no alarm and no failure" in worth_of(foretold_of([]))


def test_plan_says_what_it_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "prediction", "--diary", str(diary(tmp_path)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    measured, worst, best = told["rows"]
    assert (measured["share"], measured["precision"]) == (0.3, 0.75)
    assert worst["worth_h"] < measured["worth_h"] < best["worth_h"]
    assert measured["worth_h"] == pytest.approx(measured["saved_h"] - measured["false_alarms_h"])
    assert measured["ettr"] > told["ettr_without"]


def test_an_alarm_that_is_nearly_always_false_is_worth_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "prediction", "--share", "0.3", "--precision", "0.001", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["worth_h"] == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--share", "1.5"], "no share"), (["--precision", "0.5"], "--share"),
        (["--diary", "/nowhere/at/all.jsonl"], "nothing measured"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_told_with_what_can(
    options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "prediction", *options]) == 2
    assert word in capsys.readouterr().err


def test_health_says_in_a_sentence_what_is_suspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = diary(tmp_path)
    assert main(["health", "--diary", str(path)]) == 0
    assert "No device is suspected." in capsys.readouterr().out
    Diary(path).add(DiaryEntry(at_s=2.0, device="h/gpu3", kind="test", passed=False, text="1 wrong"))
    assert main(["health", "--diary", str(path)]) == 0
    said = capsys.readouterr().out
    assert "h/gpu3 is broken: 1 failed test" in said
    assert "3 of 10 failures were foretold" in said
    assert main(["health", "--diary", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"]["foretold"] == 3
    assert main(["health", "--diary", str(tmp_path / "none.jsonl")]) == 0
    assert "nothing is known" in capsys.readouterr().out
