"""What programs and pipes see of the command line: JSON for errors too, and no traceback when nobody reads any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.cli import _run, main
from outlast.cli._streams import let_go_of_the_broken, unheard, wants_json
from outlast.core import events as ev
from outlast.journal import Journal
from outlast.runtime.host import launcher as _launcher


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["status", "absent", "--json"], "CONFIG", "does not exist"),
        (["why", "--json", "absent"], "CONFIG", "does not exist"),
        (["run", "--replicas", "2", "--json", "absent.py", "--steps", "3"], "CONFIG", "no script absent.py"),
        (["run", "--json", "--replcas", "2", "absent.py"], "USAGE", "--replicas"),
        (["plan", "fleet", "--nodes", "-5", "--node-mtbf-hours", "1", "--json"], "CONFIG", "--nodes = -5"),
        (["ckpt", "ls", "absent", "--json"], "CONFIG", "is no directory"),
    ],
)
def test_an_error_is_json_too(args: list[str], code: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = main(args)
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert exit_code == document["exit_code"] != 0
    assert document["error"]["code"] == code
    assert told in document["error"]["message"]
    assert told in said.err


def test_a_script_s_own_json_is_not_ours() -> None:
    assert not wants_json(["run", "--replicas", "2", "train.py", "--json"])
    assert not wants_json(["run", "-m", "package.train", "--json"])
    assert not wants_json(["ckpt", "resume-check", "--steps", "4", "train.py", "--json"])
    assert wants_json(["ckpt", "resume-check", "--json", "train.py"])


END = ev.RunFinished(at_s=2.0, outcome="finished", exit_code=0, steps=1, seconds={}, detail="")


class Launched:
    """Stands where a run would be: it only watches, as the launcher does, while its script goes on speaking."""

    def __init__(self, resolved: Any, command: list[str], run_dir: Path, **_: Any) -> None:
        self.run_dir, self.watch, self.ready, self.ended, self.turns = run_dir, None, None, None, 0
        self.host, self.secret, self.awaits = "", b"", 0

    def run(self) -> Any:
        journal = Journal.create(self.run_dir)
        logs = self.run_dir / "logs"
        logs.mkdir()
        journal.append(ev.ReplicaStarted(at_s=1.0, replica="r0.1", agent="a0", pid=1))
        journal.flush()
        if self.ready is not None and self.watch is not None:  # not where all is told at the end, as JSON
            self.ready()
            for turn in range(3):
                with (logs / "r0.1.log").open("a") as file:
                    file.write(f"turn {turn}\n" * 2000)
                self.watch("")
        journal.append(END)
        journal.close()
        assert self.ended is not None
        self.ended(END.exit_code)
        return END.exit_code


@pytest.mark.parametrize("exit_code", [0, 5])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_run_outlasts_the_reader_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], exit_code: int
) -> None:
    """`outlast run train.py 2>&1 | head -1`: nobody reads the second line; the run comes to its end, and exits so."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(_launcher, "Launcher", Launched)
    monkeypatch.setattr(sys.modules[__name__], "END", msgspec.structs.replace(END, exit_code=exit_code))
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", output)
        assert main(["run", *options, "--run-dir", str(tmp_path / "run"), str(tmp_path / "train.py")]) == exit_code
        assert let_go_of_the_broken() is None, "what is written now goes nowhere"


def test_a_full_disk_under_the_output_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with unheard():
            print("lost", flush=True)
        assert let_go_of_the_broken() is None
    with open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["config", "show"]) == 3


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["status", "--help"], ["status", "--json"], ["status"], ["why", "--json"], ["why"]],
)
def test_a_full_disk_under_the_output_is_told_in_a_sentence(tmp_path: Path, args: list[str], unbuffered: bool) -> None:
    """As a shell has it: `outlast status RUN --json > FILE`, where FILE's disk is full."""
    with Journal.create(tmp_path / "run") as journal:
        journal.append(ev.RunStarted(
            at_s=1.0, run_id="x", command=[], num_replicas=1, num_spares=0, signature={}, config={}
        ))  # fmt: skip
    reads_run = args[0] in ("status", "why") and "--help" not in args
    command = [sys.executable, "-m", "outlast", *args, *([str(tmp_path / "run")] if reads_run else [])]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environ |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ)
    assert done.returncode == 3
    assert done.stderr.startswith("outlast: [ENVIRONMENT] standard output cannot be written: No space left on device")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("args", [["--help"], ["status"], ["status", "--json"], ["why"], ["watch"]])
def test_a_reader_that_wants_one_line_only_is_no_error_in_words(tmp_path: Path, args: list[str]) -> None:
    """`outlast status RUN | head -1`"""
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([
            ev.RunStarted(at_s=1.0, run_id="x", command=[], num_replicas=1, num_spares=0, signature={}, config={}),
            *(ev.ReplicaStarted(at_s=1.0, replica=f"r{slot}.0", agent="a0", pid=1) for slot in range(3000)),
            END,
        ])  # fmt: skip
    command = [sys.executable, "-m", "outlast", *args, *([] if args == ["--help"] else [str(tmp_path / "run")])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_off_is_not_run_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(_run, "launch", lambda *args, **more: pytest.fail("it was started"))
    monkeypatch.setenv("OUTLAST", "off")
    assert main(["run", str(tmp_path / "train.py")]) == 2
    assert "OUTLAST=off" in capsys.readouterr().err
