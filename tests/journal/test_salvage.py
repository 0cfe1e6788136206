"""A journal that was cut or damaged: what is readable of it becomes a run of its own."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal import Journal, salvage

NUM = 800


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(
            ev.Notice(at_s=float(number), level="info", text=f"{number} {'x' * 200}") for number in range(NUM)
        )
    return tmp_path / "run"


def texts(run_dir: Path) -> list[int]:
    with Journal.open_reader(run_dir) as journal:
        return [int(entry.event.text.split()[0]) for entry in journal.events() if isinstance(entry.event, ev.Notice)]


@pytest.mark.parametrize("share", [0.4, 0.7, 0.9])
def test_of_a_journal_that_was_cut_amid_a_record_the_rest_is_saved(
    share: float, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remedy that the error names is called as it stands there."""
    path = run_dir / "journal.db"
    os.truncate(path, int(path.stat().st_size * share) + 7)
    before = path.read_bytes()
    assert main(["status", str(run_dir)]) == 3
    remedy = capsys.readouterr().err.rpartition("save what is readable: outlast ")[2].split()
    saved = tmp_path / "saved"
    assert main([str(saved) if word == "NEW-DIR" else word for word in remedy]) == 0
    said = capsys.readouterr().err
    found = texts(saved)
    assert found == sorted(set(found))
    assert NUM * (share - 0.25) < len(found) < NUM
    assert f"{len(found):,} of {NUM:,} entries are saved: outlast why {saved}" in said
    assert path.read_bytes() == before, "the damaged file is never written"
    assert main(["status", str(saved)]) == main(["why", str(saved)]) == 0


def test_pages_in_the_middle_may_be_lost(run_dir: Path, tmp_path: Path) -> None:
    with (run_dir / "journal.db").open("r+b") as file:
        file.seek(20 * 4096)
        file.write(b"\xff" * 3 * 4096)
    found = salvage(run_dir, tmp_path / "saved")
    assert found.num_known == NUM
    assert NUM - 60 < found.num_entries < NUM
    read = texts(tmp_path / "saved")
    assert (read[0], read[-1], len(read)) == (0, NUM - 1, found.num_entries)


def test_a_number_of_entries_that_is_damaged_itself_keeps_nobody_looking(run_dir: Path, tmp_path: Path) -> None:
    path = run_dir / "journal.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE sqlite_sequence SET seq = ?", [1 << 60])
    found = salvage(run_dir, tmp_path / "saved")
    assert found.num_entries == NUM
    assert found.num_known <= sum(file.stat().st_size for file in run_dir.glob("journal.db*"))


@pytest.mark.parametrize("size", [0, 10, 100, 4000])
def test_where_nothing_is_readable_no_run_is_made(size: int, run_dir: Path, tmp_path: Path) -> None:
    os.truncate(run_dir / "journal.db", size)
    with pytest.raises(EnvironmentFault) as caught:
        salvage(run_dir, tmp_path / "saved")
    assert caught.value.remedy == "restore it from a copy"
    assert not (tmp_path / "saved").exists()


def test_what_is_no_run_or_holds_one_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        salvage(tmp_path, tmp_path / "saved")
    with pytest.raises(ConfigError, match="already holds a run"):
        salvage(run_dir, run_dir)
