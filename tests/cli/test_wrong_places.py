"""What is no run, and where nothing can be written: a sentence with what helps, and the exit code that says which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.journal import Journal

LOOKS = [["status"], ["status", "--json"], ["why"], ["watch"], ["export", "--jsonl", "rows"]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with Journal.create(tmp_path / "run") as journal:
        journal.append(ev.ProgressMade(at_s=1.0, view=[1, 1], stable=1, losses=[(1, 0.5)], step_s=0.1))
    return tmp_path / "run"


def told(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    code = main([str(arg) for arg in args])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert code == 0 or "remedy: " in err
    return code, err


@pytest.mark.parametrize("look", LOOKS)
def test_a_run_without_its_record_is_not_taken_for_none(
    look: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "record.db").unlink()
    code, err = told(capsys, *look, run_dir)
    assert code == 3
    assert "record.db is missing" in err
    assert f"outlast export {run_dir} --salvage NEW-DIR" in err
    assert told(capsys, "export", run_dir, "--salvage", run_dir.with_name("saved"))[0] == 0
    assert told(capsys, "status", run_dir.with_name("saved"))[0] == 0


@pytest.mark.parametrize("look", LOOKS)
def test_a_file_is_no_directory_of_a_run(look: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = told(capsys, *look, run_dir / "journal.db")
    assert code == 2
    assert "journal.db is no directory of a run" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("look", LOOKS)
def test_a_directory_that_may_not_be_entered(
    look: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.parent.chmod(0)
    try:
        assert told(capsys, *look, run_dir)[0] == 2
    finally:
        run_dir.parent.chmod(0o700)


def test_what_may_not_be_looked_at_is_told_for_what_it_is(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(run_dir / "journal.db"))

    monkeypatch.setattr("outlast.observe._find.holds_run", denied)
    code, err = told(capsys, "status", run_dir)
    assert code == 2
    assert f"cannot read {run_dir}: Permission denied" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_an_export_filled_is_the_one_that_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = told(capsys, "export", run_dir, "--jsonl", "/dev/full")
    assert code == 3
    assert "No space left on device: /dev/full" in err


def test_an_export_into_a_file_s_place_says_that_it_is_none(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = told(capsys, "export", run_dir, "--tensorboard", run_dir / "journal.db")
    assert code == 3
    assert "journal.db is no directory" in err


@pytest.mark.process
def test_an_export_to_standard_output_makes_no_file(run_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outlast", "export", str(run_dir), "--jsonl", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert json.loads(done.stdout)["loss"] == 0.5
    assert "1 row written" in done.stderr
    assert not (tmp_path / "-").exists()


def test_a_report_that_is_not_there_is_not_called_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = told(capsys, "doctor", "--compare", tmp_path / "absent")
    assert code == 2
    assert f"cannot read {tmp_path / 'absent'}: No such file or directory" in err
