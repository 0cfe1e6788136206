"""`outlast watch` on runs that are over: it tells them, and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.journal import Journal

STARTED = ev.RunStarted(
    at_s=100.0, run_id="quiet-heron", command=["t.py"], num_replicas=1, num_spares=0, signature={}, config={}
)


def test_a_run_that_finished_is_told_and_the_watching_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.create(tmp_path / "run") as journal:
        journal.append(STARTED)
        journal.append(ev.RunFinished(at_s=103.0, outcome="finished", steps=7, detail="", exit_code=0, seconds={}))
    assert main(["watch", str(tmp_path)]) == 0
    assert "+3.0 s  run finished after 7 steps" in capsys.readouterr().out


def test_a_run_that_nobody_holds_is_not_watched_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.create(tmp_path / "run") as journal:
        journal.append(STARTED)
    assert main(["watch", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "started with 1 replica" in out
    assert "no process holds the run" in out


def test_where_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_journal_that_cannot_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.create(tmp_path / "run") as journal:
        journal.append(STARTED)
    (tmp_path / "run" / "journal.db").write_bytes(b"no database" * 1000)
    assert main(["watch", str(tmp_path / "run")]) == 3
    printed = capsys.readouterr()
    assert "is damaged" in printed.err
    assert "the run goes on" not in printed.out + printed.err
