"""`outlast run` before anything is started: whose options are whose, and what is refused."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from outlast.cli import main
from outlast.cli._follow import Follower
from outlast.core import events as ev
from outlast.journal import Journal, RunLock
from outlast.runtime.host.launcher import Launcher


def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('not to be run')\n")
    return str(path)


def test_options_after_the_script_are_its_own(tmp_path: Path, launched: list[Any]) -> None:
    train = script(tmp_path)
    assert main(["run", "--replicas", "3", train, "--replicas", "7", "-m", "x", "--", "--json"]) == 0
    config, command = launched[0]
    assert config.replicas == 3
    assert command == [sys.executable, train, "--replicas", "7", "-m", "x", "--", "--json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [(b"x = 1\nfor (\n", "train.py, line 2: "), (b"x = 1\0", "train.py: "), (b"\xff\xfe", "train.py, line 1: ")],
)
def test_a_script_that_is_no_python_is_refused_before_replicas_are_started(
    text: bytes, words: str, tmp_path: Path, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(text)
    assert main(["run", str(path)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "remedy: mend the script first" in err
    assert launched == []


def test_what_may_be_a_number_or_a_word_is_told_so(
    tmp_path: Path, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--spares", "many", script(tmp_path)]) == 2
    assert "remedy: a number, or auto\n" in capsys.readouterr().err
    assert launched == []


def test_replicas_of_different_widths_are_refused_in_one_sentence(
    tmp_path: Path, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--replicas", "2", "--ranks", "4,2", script(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "the replicas of a run cannot have different numbers of ranks yet" in err
    assert "remedy: one number for all" in err
    assert launched == []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the working directory, with a module `train`; to import it is an error."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('not to be imported')\n")
    (folder / "train.py").write_text("raise SystemExit('not to be run')\n")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.usefixtures("package")
def test_a_module_and_its_options(launched: list[Any]) -> None:
    assert main(["run", "--replicas", "2", "--json", "-m", "package.train", "--steps", "5", "data", "--json"]) == 0
    assert main(["run", "--replicas=4", "-m", "package.train"]) == 0
    assert [(config.replicas, command[1:]) for config, command in launched] == [
        (2, ["-m", "package.train", "--steps", "5", "data", "--json"]),
        (4, ["-m", "package.train"]),
    ]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("nosuchmodule", "no module nosuchmodule\n"),
        ("package.tran", "no module package.tran\n"),
        ("package.train.more", "no module package.train.more\n"),
        ("package/train.py", "no module package/train.py: a script is given without -m\n"),
        ("", "no module \n"),
        ("package", "package is a package without a __main__, which cannot be run\n"),
        ("package.broken", "broken.py, line 1: "),
    ],
)
@pytest.mark.parametrize("command", [["run"], ["prove", "run"], ["prove", "gate"], ["ckpt", "resume-check"]])
def test_a_module_that_cannot_be_run_is_refused_before_anything_is_started(
    command: list[str], module: str, words: str, package: Path, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "broken.py").write_text("for (\n")
    assert main([*command, "-m", module, "--steps", "5"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert f"remedy: outlast {' '.join(command)} [OPTIONS] " in err or "remedy: mend the script first" in err
    assert launched == []


def test_what_only_python_can_tell_of_a_module_is_left_to_it(package: Path, launched: list[Any]) -> None:
    (package / "__init__.py").write_text("__path__.append('elsewhere')\n")
    (package.parent / "my-train.py").write_text("")
    for module in ("package.made", "package", "my-train", "json.tool", "outlast.examples.gpt"):
        assert main(["run", "-m", module]) == 0
    assert [command[2] for _, command in launched] == [
        "package.made", "package", "my-train", "json.tool", "outlast.examples.gpt",
    ]  # fmt: skip


@pytest.mark.parametrize("command", [["prove", "run"], ["prove", "gate"], ["ckpt", "resume-check"]])
def test_a_script_that_is_no_python_is_not_proved(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("x = 1\nfor (\n")
    assert main([*command, str(tmp_path / "train.py")]) == 2
    err = capsys.readouterr().err
    assert "train.py, line 2: " in err
    assert "remedy: mend the script first" in err


def test_a_file_of_settings_is_outranked(tmp_path: Path, launched: list[Any]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nreplicas = 4\nspares = 2\n")
    assert main(["run", "--config", str(file), "--replicas", "5", script(tmp_path)]) == 0
    assert (launched[0][0].replicas, launched[0][0].spares) == (5, 2)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--replcas", "2", "SCRIPT"], "--replicas"),
        (["--replicas", "none", "SCRIPT"], "not a valid int"),
        (["--replicas", "0", "SCRIPT"], "from 1 to"),
        (["--exchange", "smoke", "SCRIPT"], "smoke"),
        (["--resume", "absent", "--checkpoint-dir", "x", "SCRIPT"], "there is no directory absent"),
        (["--resume", "absent@3", "--checkpoint-dir", "x", "SCRIPT"], "there is no directory absent@3"),
        (["--checkpoint-dir", "SCRIPT", "SCRIPT"], "is no directory"),
        (["absent.py"], "no script absent.py"),
        ([], "no script given"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    args: list[str], reason: str, tmp_path: Path, launched: list[Any],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    train = script(tmp_path)
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    assert main(["run", *[train if arg == "SCRIPT" else arg for arg in args]]) == 2
    assert reason in capsys.readouterr().err
    assert not launched
    assert not any(here.iterdir()), "nothing is left of what was refused"


TOO_LONG = "x" * 300  # a name that nobody can ask for, root neither


def of_begin(tmp_path: Path) -> dict[str, str]:
    """Places to begin from, by what is there."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.pt").write_bytes(b"PK")
    (tmp_path / "cut.safetensors").write_bytes(b"12")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    (tmp_path / "damaged" / "manifests").mkdir(parents=True)
    (tmp_path / "damaged" / "manifests" / "g0000000007.json").write_bytes(b"{}")
    there = {name: str(tmp_path / name) for name in ("empty", "weights.pt", "cut.safetensors", "dcp", "damaged")}
    return there | {"long": TOO_LONG, "seven": f"{tmp_path / 'empty'}@7", "damaged seven": there["damaged"] + "@7"}


@pytest.mark.parametrize(
    ("option", "what", "words", "code"),
    [
        ("--resume", "empty", "there is no checkpoint at {empty}\n", 7),
        ("--resume", "seven", "there is no checkpoint at {empty}\n", 7),
        ("--resume", "weights.pt", "resume: {weights.pt} is no directory", 2),
        ("--resume", "dcp", "remedy: outlast ckpt import {dcp} NEW, then --init-from NEW", 7),
        ("--resume", "damaged", "no generation at {damaged} can be read: generation 7: ", 7),
        ("--resume", "damaged seven", "`outlast ckpt verify {damaged}`", 7),
        ("--resume", "long", "xxx cannot be read: File name too long", 2),
        ("--init-from", "empty", "there is no checkpoint at {empty}\n", 7),
        ("--init-from", "seven", "there is no checkpoint at {empty}\n", 7),
        ("--init-from", "weights.pt", "{weights.pt} is a file, and none of safetensors", 7),
        ("--init-from", "cut.safetensors", "holds 2 bytes, less than a header's length", 7),
        ("--init-from", "dcp", "{dcp} is a checkpoint of torch's DCP", 7),
        ("--init-from", "damaged", "no generation at {damaged} can be read: generation 7: ", 7),
        ("--init-from", "long", "xxx cannot be read: File name too long", 2),
        ("--checkpoint-dir", "long", "xxx cannot be read: File name too long", 2),
    ],
)
def test_a_place_that_holds_nothing_to_begin_with_is_refused_before_replicas_are_started(
    option: str, what: str, words: str, code: int, tmp_path: Path, launched: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    places = of_begin(tmp_path)
    assert main(["run", option, places[what], script(tmp_path)]) == code
    err = capsys.readouterr().err
    for name, place in places.items():
        words = words.replace(f"{{{name}}}", place)
    assert words in err
    assert "remedy: " in err
    assert launched == []


@pytest.mark.parametrize("option", ["--resume", "--init-from"])
@pytest.mark.parametrize("function", ["listdir", "stat"])
def test_a_directory_that_may_not_be_read_is_refused_before_replicas_are_started(
    option: str, function: str, tmp_path: Path, launched: list[Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As others than root meet it: who runs the tests may be root, who reads everything."""
    place, real = tmp_path / "theirs", getattr(os, function)

    def refuses(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(str(place)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    place.mkdir()
    monkeypatch.setattr(os, function, refuses)
    assert main(["run", option, str(place), script(tmp_path)]) in (2, 7)
    err = capsys.readouterr().err
    assert f"{place} cannot be read: Permission denied\n" in err
    assert "remedy: see its " in err
    assert launched == []


def test_a_generation_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    import safetensors.numpy

    file, place = tmp_path / "w.safetensors", tmp_path / "kept"
    safetensors.numpy.save_file({"w": numpy.zeros(2)}, str(file))
    assert main(["ckpt", "import", str(file), str(place)]) == 0
    for option in ("--resume", "--init-from"):
        assert main(["run", option, f"{place}@7", script(tmp_path)]) == 7
        err = capsys.readouterr().err
        assert f"there is no generation 7 at {place}\n" in err
        assert f"remedy: there: 0; `outlast ckpt ls {place}` lists them" in err
    assert launched == []
    assert main(["run", "--init-from", f"{place}@0", script(tmp_path)]) == 0
    assert main(["run", "--init-from", str(file), script(tmp_path)]) == 0


def test_a_busy_port_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run_dir = tmp_path / "run"
        assert main(["run", "--port", port, "--run-dir", str(run_dir), script(tmp_path)]) == 3
    told = capsys.readouterr()
    assert f"port {port} is busy" in told.err
    assert "another --port" in told.err
    assert not told.out
    assert not run_dir.exists()


def test_one_directory_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    lock = RunLock.take(run_dir)
    assert main(["run", "--run-dir", str(run_dir), script(tmp_path)]) == 3
    assert "two runs in one directory" in capsys.readouterr().err
    lock.release()
    Journal.create(run_dir).close()
    assert main(["run", "--run-dir", str(run_dir), script(tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_run_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["run", "--run-dir", str(tmp_path / "file" / "run"), script(tmp_path)]) == 3
    assert "cannot make the run directory" in capsys.readouterr().err


def test_the_first_member_s_output_is_followed(tmp_path: Path) -> None:
    """From the start of r0's log, on to the next first member from where its log stands, and never half a line."""
    journal = Journal.create(tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    lines: list[str] = []
    follower = Follower(tmp_path, lines.append)

    def told(event: ev.AnyEvent) -> None:
        journal.append(event)
        journal.flush()
        follower.poll()

    def write(name: str, text: str) -> None:
        with (logs / f"{name}.log").open("a") as file:
            file.write(text)

    def view(n: int, members: list[str], planned: bool = False) -> ev.ViewInstalled:
        return ev.ViewInstalled(at_s=1.0, epoch=1, n=n, members=members, cause="x", planned=planned)

    follower.poll()
    write("r0.1", "hello\nha")
    write("r1.1", "of r1\n")
    for name in ("r0.1", "r1.1"):
        told(ev.ReplicaStarted(at_s=1.0, replica=name, agent="a0", pid=1))
    told(view(1, ["r0.1", "r1.1"]))
    assert lines == ["hello"]
    write("r0.1", "lf\n\nlast words")
    told(view(2, ["r1.1"]))
    assert lines == ["hello", "half", "", "last words"]
    write("r1.1", "goes on\n")
    follower.poll()
    told(view(3, ["r2.1", "r1.1"], planned=True))
    write("r1.1", "still\n")
    follower.poll()
    told(ev.ViewFormed(at_s=1.0, epoch=1, n=3, step=3, roll_call_s=0.1))
    write("r2.1", "end")
    follower.close()
    journal.close()
    assert lines[4:] == ["goes on", "still", "end"]
    assert "last words" in follower.shown


def test_a_demonstration_on_hosts_that_cannot_be_made_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("outlast.prove.demo_hosts.unavailable", lambda: "network namespaces need root here")
    assert main(["demo", "--hosts", "3", "--keep", str(tmp_path)]) == 3
    assert "network namespaces need root here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no secret of the run"),
        (["--secret-file", "nowhere"], "no secret can be read from nowhere"),
        (["--secret-file", "{secret}", "--join", "head"], "is not HOST:PORT"),
        (["--secret-file", "{secret}", "--host", "a b"], "is no name for a host"),
        (["--secret-file", "{secret}", "--wait", "0"], "no coordinator at 127.0.0.1:9"),
    ],
)
def test_an_agent_that_cannot_join_says_why(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTLAST_SECRET", raising=False)
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    given = [word.format(secret=secret) for word in words]
    if "--join" not in given:
        given += ["--join", "127.0.0.1:9"]  # where nobody listens
    assert main(["agent", *given]) in (2, 3)
    err = capsys.readouterr().err
    assert said in err
    assert "remedy" in err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--replicas", "2"], "starting 2 replicas of {train} in {run}"),
        (["--replicas", "1", "--spares", "1"], "starting 1 replica and 1 spare of {train} in {run}"),
        (["--replicas", "2", "--ranks", "2"], "starting 2 replicas of 2 ranks each of {train} in {run}"),
        (["--json"], ""),
    ],
)
def test_it_is_said_at_once_what_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    def run(launcher: Launcher) -> int:
        if launcher.ready is not None:
            launcher.ready()
        return 0

    monkeypatch.setattr(Launcher, "run", run)
    train, run_dir = script(tmp_path), tmp_path / "run"
    assert main(["run", "--run-dir", str(run_dir), *options, train]) == 0
    said = capsys.readouterr()
    assert told.format(train=train, run=run_dir) in said.out
    assert (f"outlast watch {run_dir}" in said.out) == bool(told)
    assert said.err == ""
