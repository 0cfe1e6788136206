"""Help that ends with examples which work, hints for who comes from elsewhere, completion, following a status."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from outlast.cli import COMMANDS, command_of, main
from outlast.cli import _show_status as status_module
from outlast.cli._examples import EXAMPLES
from outlast.core import events as ev
from outlast.journal import Journal


def outlast(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_every_command_has_examples_and_its_help_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Also every command of a group; `plan trace` is a group of its own."""
    inner = {f"{name} {one}" for name in COMMANDS for one in getattr(command_of(name), "commands", {})}
    assert set(EXAMPLES) == {*COMMANDS, *inner} - {"plan trace"}
    for name, examples in EXAMPLES.items():
        code, out, _ = outlast(capsys, *name.split(), "--help")
        assert code == 0
        for line, _said in examples:
            assert line in " ".join(out.split()), name


LINES = [(name, line) for name, examples in EXAMPLES.items() for line, _ in examples if line.startswith("outlast")]


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line for _, line in LINES])
def test_examples_name_what_exists(name: str, line: str) -> None:
    words = shlex.split(re.split(r" [|>] ", line)[0])[1:]
    assert words[: len(name.split())] == name.split()
    parent = command = command_of(name.split()[0])
    at = 1
    inner = getattr(command, "commands", {})
    if at < len(words) and words[at] in inner:
        command, at = inner[words[at]], at + 1
    known = {o for c in (command, parent) for p in c.params if isinstance(p, click.Option) for o in p.opts}
    own = words[at : words.index("train.py")] if "train.py" in words else words[at:]
    default = {o for c in inner.values() for p in c.params if isinstance(p, click.Option) for o in p.opts}
    assert {word for word in own if word.startswith("--")} <= known | (default if command is parent else set())


@pytest.mark.parametrize(
    ("option", "words"),
    [("--nproc-per-node", "--replicas"), ("--nproc_per_node", "--replicas"), ("--rdzv-endpoint", "--endpoint"),
     ("--rdzv-backend", "leave it out"), ("--max-restarts", "max_restarts"), ("--log-dir", "--run-dir"),
     ("--num_processes", "--replicas"), ("--standalone", "leave it out"), ("--module", "-m MODULE"),
     ("--network-check", "outlast doctor"), ("--exclude-straggler", "outlast drain"), ("--hostfile", "outlast agent"),
     ("--save_at_breakpoint", "leave it out"), ("--ft-cfg-path", "limits are learned"),
     ("--ft-rank-heartbeat-timeout", "limits are learned"), ("--num_nodes", "--nnodes"),
     ("--include", "CUDA_VISIBLE_DEVICES"), ("--deepspeed_config", "protect()"), ("--local-ranks-filter", "--run-dir"),
     ("--min_elastic_nodes", "MIN_REPLICAS")],
)  # fmt: skip
def test_flags_of_other_launchers_are_answered_with_ours(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = outlast(capsys, "run", option, "4", "train.py")
    assert code == 2
    assert f"{option} is another launcher's" in err
    assert words in err


def test_what_no_launcher_has_is_told_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outlast(capsys, "run", "--replcas", "4", "train.py")
    assert (code, "--replicas" in err) == (2, True)
    assert "leave out the word python" in outlast(capsys, "run", "python", "train.py")[2]
    for launcher in ("start", "torchrun", "dlrover-run", "ft_launcher", "deepspeed"):
        assert "'run'" in outlast(capsys, launcher)[2]
    assert "'doctor'" in outlast(capsys, "check")[2]


@pytest.mark.parametrize("args", [("ckpt", "compare"), ("prove", "nonsense"), ("health", "list"), ("launch", "pbs")])
def test_an_unknown_command_of_a_group_is_answered_with_those_that_are(
    args: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = outlast(capsys, *args)
    assert code == 2
    for name in command_of(args[0]).commands:
        assert name in err


def test_a_file_that_is_no_text_is_no_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "job.toml"
    binary.write_bytes(b"\xf1\x00\xff")
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    for args in (["plan", str(binary)], ["plan", "fit", str(tmp_path / "log.csv"), "--mapping", str(binary)]):
        code, _, err = outlast(capsys, *args)
        assert (code, "not TOML" in err, "remedy: " in err) == (2, True, True), err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outlast(capsys, "completion", shell)
    assert code == 0
    for word in (*COMMANDS, "checkpoint-dir", "resume-check", "--quick" if shell != "fish" else "-l quick"):
        assert word in out
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=out, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "expected"), [(["outlast", "sta"], ["status"]), (["outlast", "plan", "inter"], ["interval"]),
                            (["outlast", "why", "--pri"], ["--price"])]
)  # fmt: skip
def test_bash_completes(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = outlast(capsys, "completion", "bash")[1]
    asked = f'{script}\nCOMP_WORDS=({" ".join(words)})\nCOMP_CWORD={len(words) - 1}\n_outlast\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", asked], text=True, capture_output=True, check=True)
    assert done.stdout.split() == expected


class Stop(threading.Event):
    """Each wait lets the run go one chapter on."""

    def __init__(self, journal: Journal, chapters: list[list[ev.AnyEvent]]) -> None:
        super().__init__()
        self.journal, self.chapters, self.waits = journal, chapters, 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        assert self.waits < 20, "it follows a run that is over"
        if self.chapters:
            self.journal.append_many(self.chapters.pop(0))
            self.journal.flush()
        return False


def chapters() -> list[list[ev.AnyEvent]]:
    start = ev.RunStarted(at_s=1.0, run_id="r", command=[], num_replicas=1, num_spares=0, signature={}, config={})
    view = ev.ViewInstalled(at_s=2.0, epoch=1, n=1, members=["r0.0"], cause="start", planned=False)
    formed = ev.ViewFormed(at_s=2.0, epoch=1, n=1, step=0, roll_call_s=0.0)
    end = ev.RunFinished(at_s=3.0, outcome="finished", steps=7, detail="", exit_code=0, seconds={})
    replica = ev.ReplicaStarted(at_s=1.5, replica="r0.0", agent="a0", pid=5)
    return [[start], [], [replica, view, formed], [], [end]]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_status_that_is_followed_tells_changes_and_ends_with_the_run(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.create(tmp_path / "run") as writer:
        first, *rest = chapters()
        writer.append_many(first)
        writer.flush()
        stop = Stop(writer, rest)
        monkeypatch.setattr(status_module.threading, "Event", lambda: stop)
        args: list[Any] = ["status", str(tmp_path / "run"), "--follow", *(["--json"] if as_json else [])]
        code, out, _ = outlast(capsys, *args)
    assert code == 0
    if as_json:
        assert [json.loads(line)["state"] for line in out.splitlines()] == ["starting", "stalled", "finished"] or [
            json.loads(line)["state"] for line in out.splitlines()
        ] == ["starting", "training", "finished"]
    else:
        assert len(re.findall(r"^run r: ", out, re.MULTILINE)) == 3
        assert "run r: finished" in out
