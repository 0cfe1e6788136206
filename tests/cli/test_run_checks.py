"""`outlast run` told where the run shall be, and options that are not its own."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main
from outlast.cli._run_checks import _OF_PROTECT, argument_for
from outlast.journal import Journal
from outlast.runtime.loop.run import Run


def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('not to be run')\n")
    return str(path)


@pytest.mark.parametrize(
    ("after", "names"),
    [
        (["--replicas", "2"], "--replicas"),
        (["--lr", "1", "--resume=never", "--spares", "1", "--resume", "x"], "--resume and --spares"),
        (["--checkpoint-dir", "there"], "--checkpoint-dir"),
        (["--replica", "2", "--replicas-of-data", "3", "replicas"], ""),
    ],
)
def test_options_of_outlast_after_the_script_are_told_of(
    after: list[str], names: str, tmp_path: Path, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    train = script(tmp_path)
    assert main(["run", train, *after]) == 0
    assert launched[0][1] == [sys.executable, train, *after]
    told = capsys.readouterr().err
    assert told.count("\n") == (1 if names else 0)
    if names:
        assert told.startswith(f"outlast: {names} after {train} is given to the script; an option of outlast's goes ")


@pytest.mark.parametrize("option", ["--microbatches", "--global-batch-size", "--seed"])
def test_what_is_an_argument_of_protect_is_told_so(
    option: str, tmp_path: Path, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", option, "4", script(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"{option} is said in the script, as an argument: protect({option[2:].replace('-', '_')}=…)" in err
    assert "Did you mean" not in err
    assert launched == []


@pytest.mark.parametrize("given", ["outlast-runs", "./outlast-runs/", "elsewhere"])
def test_a_directory_that_holds_runs_is_no_run_s(
    given: str,
    tmp_path: Path,
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those in it, and those that follow, would not be found any more."""
    monkeypatch.chdir(tmp_path)
    train = script(tmp_path)
    if given == "elsewhere":
        Journal.create(tmp_path / given / "first").close()
    assert main(["run", "--run-dir", given, train]) == 2
    err = capsys.readouterr().err
    assert ("holds other runs (first)" if given == "elsewhere" else "is the folder in which runs get") in err
    assert f"remedy: a new directory in it: --run-dir {given.rstrip('/').removeprefix('./')}/NAME" in err
    assert launched == []
    assert main(["run", "--run-dir", f"{given}/second", train]) == 0


def test_what_is_said_to_be_an_argument_of_protect_is_one() -> None:
    taken = inspect.signature(Run.protect).parameters
    assert {name for name in _OF_PROTECT if name not in taken} == set()
    assert argument_for("--clip-norm") == "clip_norm"
    assert argument_for("--replicas") == ""
