"""`outlast status` and `outlast why` on real run directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.journal import Journal

EVENTS: list[ev.AnyEvent] = [
    ev.RunStarted(
        at_s=100.0, run_id="quiet-heron", command=["t.py"], num_replicas=2, num_spares=0, signature={}, config={}
    ),
    ev.CoordinatorStarted(at_s=100.1, epoch=1, pid=11, takeover=False),
    ev.AgentStarted(at_s=100.2, agent="a0", pid=12),
    ev.ReplicaStarted(at_s=100.3, replica="r0.0", agent="a0", pid=13),
    ev.ReplicaStarted(at_s=100.3, replica="r1.0", agent="a0", pid=14),
    ev.ViewInstalled(at_s=101.0, epoch=1, n=1, members=["r0.0", "r1.0"], cause="start", planned=True),
    ev.ViewFormed(at_s=101.0, epoch=1, n=1, step=0, roll_call_s=0.01),
    ev.ProgressMade(at_s=102.0, view=[1, 1], stable=9, losses=[(8, 2.0), (9, 1.5)], step_s=0.1),
    ev.ReplicaExited(at_s=103.0, replica="r1.0", cause="signal", detail="SIGKILL", noticed_by="agent a0", step=10),
]  # fmt: skip


def outlast(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    since_s = time.time() - EVENTS[-1].at_s  # a step of long ago would be one of a run that is stalled
    with Journal.create(tmp_path / "runs" / "one") as journal:
        journal.append_many([msgspec.structs.replace(event, at_s=event.at_s + since_s) for event in EVENTS])
    return tmp_path / "runs" / "one"


def test_status_json_holds_process_state_view_and_step_of_everyone(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.open_writer(run_dir):  # somebody holds the run: it is alive
        code, out, err = outlast(capsys, "status", str(run_dir), "--json")
    document: dict[str, Any] = json.loads(out)
    assert (code, err) == (0, "")
    assert document["state"] == "training"
    assert document["run_dir"] == str(run_dir)
    expected = {"pid": 11, "state": "running", "view": [1, 1], "step": 9}
    assert {key: document["coordinator"][key] for key in expected} == expected
    assert [(agent["pid"], agent["state"]) for agent in document["agents"]] == [(12, "running")]
    rows = [(r["replica"], r["pid"], r["state"], r["view"], r["step"]) for r in document["replicas"]]
    assert rows == [("r0.0", 13, "training", [1, 1], 9), ("r1.0", 14, "exited", [1, 1], 10)]


def test_status_of_a_run_that_nobody_holds(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outlast(capsys, "status", str(run_dir))
    assert code == 0
    assert "run quiet-heron: lost" in out
    assert "signal: SIGKILL" in out


def test_a_parent_directory_means_its_newest_run_and_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal.create(run_dir.with_name("older")).close()
    os.utime(run_dir.with_name("older") / "run.lock", (1, 1))
    code, out, err = outlast(capsys, "status", str(run_dir.parent), "--json")
    assert code == 0
    assert json.loads(out)["run_id"] == "quiet-heron"
    assert "the newest of 2" in err


def test_why_tells_what_it_was_and_what_to_do(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outlast(capsys, "why", str(run_dir))
    assert code == 0
    for word in ("ended without a word at step 9", "r1.0 ended in step 10", "dmesg", "wall", "Loss"):
        assert word in out
    assert "r0.0 started" not in out
    assert "r0.0 started" in outlast(capsys, "why", str(run_dir), "--all")[1]


def test_why_prints_its_paragraph_before_it_lists_what_happened(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["why", str(run_dir)]) == 0
    paragraph = capsys.readouterr().out.partition("\n")[0]
    said: list[str] = []

    def lists(*_: object, **__: object) -> None:
        said.append(capsys.readouterr().out)
        raise RuntimeError("as far as is asked here")

    monkeypatch.setattr("outlast.observe._why.timeline", lists)
    with pytest.raises(RuntimeError, match="as far as"):
        main(["why", str(run_dir)])
    assert said == [f"{paragraph}\n"]


def test_why_begins_with_a_paragraph_and_its_price(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outlast(capsys, "why", str(run_dir), "--price", "2.50 EUR", "--accelerators", "16")
    first = out.partition("\n\n")[0]
    assert code == 0
    assert first.startswith("outlast run quiet-heron (2 replicas): The run ended without a word at step 9")
    assert "accelerator-hours on 16" in first
    assert " EUR at 2.5 EUR an hour." in first
    told = json.loads(outlast(capsys, "why", str(run_dir), "--json", "--price", "2.5")[1])["incident"]
    assert told["money"] == pytest.approx(2.5 * told["wasted_hours"])
    code, _, err = outlast(capsys, "why", str(run_dir), "--price", "cheap")
    assert (code, "is no price" in err) == (2, True)


def test_why_json_accounts_for_all_the_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(outlast(capsys, "why", str(run_dir), "--json")[1])
    cost = document["cost"]
    assert sum(value for name, value in cost.items() if name != "wall_s") == pytest.approx(cost["wall_s"])
    assert cost["wall_s"] == pytest.approx(3.0)
    assert all(advice["remedy"] for advice in document["advice"])


@pytest.mark.parametrize("command", ["status", "why"])
def test_no_run_is_a_usage_error_with_a_remedy(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = outlast(capsys, command, str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert "does not exist" in err
    assert "remedy" in err


@pytest.mark.parametrize("command", ["status", "why"])
def test_a_damaged_journal_is_an_environment_fault(
    command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "journal.db").write_bytes(b"noise" * 1000)
    code, _, err = outlast(capsys, command, str(run_dir))
    assert code == 3
    assert "damaged" in err


@pytest.mark.parametrize(
    "args", [["status", "--bogus"], ["why", "a", "b"], ["config", "shew"], ["config", "show", "x"]]
)
def test_a_wrong_command_line_is_told_without_a_traceback(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outlast(capsys, *args)
    assert code == 2
    assert "Error" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["status", "why"])
def test_help_says_what_each_argument_and_option_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outlast(capsys, command, "--help")
    assert code == 0
    assert "A run directory, or one that holds runs" in out
    assert "--json" in out


HEAVY = {"torch", "numpy", "scipy", "pandas", "sklearn", "pydantic", "rich"}
MODULES = """
import json, sys
from outlast.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules}), len(sys.modules)]), file=sys.stderr)
"""


def test_why_shows_predicted_beside_observed_and_plan_agrees(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(outlast(capsys, "why", str(run_dir), "--json")[1])["predicted"]
    assert [(row["seen"], row["surprise"]) for row in rows] == [(1, False), (0, False)]
    assert 0 < rows[0]["predicted"] < 1e-5
    useful = json.loads(outlast(capsys, "why", str(run_dir), "--json")[1])["useful_time"]
    assert (useful["seen_low"], useful["seen_high"], useful["surprise"]) == (None, None, False)  # one failure says none
    for where in (run_dir, run_dir.parent):
        planned = json.loads(outlast(capsys, "plan", "--from-run", str(where), "--json")[1])
        assert (planned["predicted"], planned["useful_time"]) == (rows, useful)
    told, planned = outlast(capsys, "why", str(run_dir))[1], outlast(capsys, "plan", "--from-run", str(run_dir))[1]
    assert "predicted" not in told  # of three seconds of training no number says anything
    assert "SURPRISE" not in told + planned
    assert "too short" in planned


def test_why_marks_what_a_long_run_should_not_have_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    often = [
        ev.ReplicaExited(at_s=200.0 + n, replica=f"r1.{n}", cause="signal", detail="", noticed_by="a0")
        for n in range(9)
    ]
    later = ev.ProgressMade(at_s=100.0 + 500 * 3600, view=[1, 1], stable=99, losses=[(99, 1.0)], step_s=0.1)
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([*EVENTS[:-1], *often, later])
    told, planned = (outlast(capsys, *words)[1] for words in (
        ("why", str(tmp_path / "run")), ("plan", "--from-run", str(tmp_path / "run"))
    ))  # fmt: skip
    line = next(line for line in told.splitlines() if line.startswith("a replica dies"))
    assert "SURPRISE" in line
    assert line in planned.splitlines()
    useful = next(line for line in told.splitlines() if line.startswith("useful time (ETTR)"))
    assert "no interval yet" in useful
    assert useful in planned.splitlines()


def test_why_of_a_run_without_failures_has_nothing_surprising(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hours_later = ev.ProgressMade(at_s=100.0 + 500 * 3600, view=[1, 1], stable=99, losses=[(99, 1.0)], step_s=0.1)
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([*EVENTS[:-1], hours_later])
    row = json.loads(outlast(capsys, "why", str(tmp_path / "run"), "--json")[1])["predicted"][0]
    assert (row["class"], row["seen"], row["low"], row["surprise"]) == ("a replica dies", 0, 0.0, False)
    assert row["predicted"] == pytest.approx(6.5 / 1000 / 24 * 1000, rel=0.01)
    assert row["high"] == 3.0  # negative binomial: a fiftieth of a failure is weak evidence, and the interval wide
    assert "SURPRISE" not in outlast(capsys, "why", str(tmp_path / "run"))[1]


@pytest.mark.parametrize("num_events", [0, 1])
def test_why_of_a_run_that_has_hardly_begun_predicts_nothing(
    num_events: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(EVENTS[:num_events])
    code, out, _ = outlast(capsys, "why", str(tmp_path / "run"))
    assert code == 0
    assert "predicted beside observed" not in out
    assert json.loads(outlast(capsys, "why", str(tmp_path / "run"), "--json")[1])["predicted"] == []
    assert json.loads(outlast(capsys, "why", str(tmp_path / "run"), "--json")[1])["useful_time"] is None


@pytest.mark.process
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_why_of_a_run_with_failures_loads_nothing_heavy(option: list[str], run_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MODULES, "why", str(run_dir), *option],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    code, packages, count = json.loads(done.stderr.splitlines()[-1])
    assert code == 0
    assert not set(packages) & HEAVY
    assert count <= 280


@pytest.mark.parametrize("args", [["fleet", "--bogus", "3"], ["fleet", "--nodes", "many"], ["fleet", "--nodes"]])
def test_plan_s_wrong_options_are_told_without_a_traceback(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outlast(capsys, "plan", *args)
    assert (code, out) == (2, "")
    assert "Error" in err
    assert "Traceback" not in err


def test_why_says_how_much_was_foretold_where_there_was_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {"command": [], "num_replicas": 2, "num_spares": 0, "signature": {}, "config": {}}
    finding = {"replica": "", "source": "readings", "step": -1, "microbatch": -1, "remedy": ""}
    story: list[ev.AnyEvent] = [
        ev.RunStarted(at_s=0, run_id="abc", **started),
        ev.ReplicaStarted(at_s=0, replica="r0.1", agent="a0", pid=1),
        ev.ReplicaStarted(at_s=0, replica="r1.1", agent="a1", pid=2),
        ev.DeviceFinding(at_s=5, host="a1", device="gpu", evidence="xid.fatal: 79", action="fatal", **finding),
        ev.AlarmWeighed(
            at_s=5, host="a1", alarm="fatal xid.fatal", evidence="xid.fatal: 79", chance=0.8, delay_s=600.0,
            action="wait", costs={"wait": 4.0}, replicas=[], successors=[], told_only=False,
        ),
        ev.ReplicaExited(at_s=65, replica="r1.1", cause="signal", detail="SIGKILL", noticed_by="agent"),
        ev.ReplicaExited(at_s=90, replica="r0.1", cause="signal", detail="SIGKILL", noticed_by="agent"),
    ]  # fmt: skip
    for name, events in (("alarmed", story), ("calm", story[:3])):
        with Journal.create(tmp_path / name) as journal:
            journal.append_many(events)
    assert main(["why", str(tmp_path / "alarmed")]) == 0
    assert "1 of 2 failures were foretold (50%, 95 % 9% to 91%), 1.0 min ahead" in capsys.readouterr().out
    assert main(["why", "--json", str(tmp_path / "alarmed")]) == 0
    assert json.loads(capsys.readouterr().out)["foretold"]["precision"][0] == 1.0
    assert main(["why", str(tmp_path / "calm")]) == 0
    assert "foretold" not in capsys.readouterr().out
