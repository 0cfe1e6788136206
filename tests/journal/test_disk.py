"""A disk that refuses: events wait in bounded memory and the run goes on; a view record still finds room."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.core.events import AnyEvent, Notice, ProgressMade
from outlast.errors import EnvironmentFault
from outlast.journal import Journal
from outlast.journal._faults import sqlite_fault
from outlast.journal._writer import EventWriter


def notice(number: int, size: int = 1) -> Notice:
    return Notice(at_s=float(number), level="info", text=f"n{number} ".ljust(size, "x"))


def progress(number: int) -> ProgressMade:
    return ProgressMade(at_s=float(number), view=[1, 1], stable=number, losses=[], step_s=0.1)


def stored(run_dir: Path) -> list[AnyEvent]:
    with Journal.open_reader(run_dir) as reader:
        return [entry.event for entry in reader.events()]


def allow_pages(writer: EventWriter, num_pages: int) -> None:
    """SQLite's own limit on the file gives its own `database or disk is full`."""
    writer._connection.execute(f"PRAGMA max_page_count = {num_pages}")


def test_events_wait_for_a_full_disk_and_one_notice_tells_it(tmp_path: Path) -> None:
    Journal.create(tmp_path).close()
    writer = EventWriter(tmp_path)
    allow_pages(writer, 1)
    big = [notice(number, size=8000) for number in range(10)]
    writer.append(list(big))
    assert not writer.flush(10.0)
    assert writer.trouble is not None
    assert "full" in writer.trouble
    assert not writer.flush(10.0)
    allow_pages(writer, 10_000)
    assert writer.flush(10.0)
    assert writer.trouble is None
    assert writer.close(10.0)
    *events, told = stored(tmp_path)
    assert events == big
    assert isinstance(told, Notice)
    assert told.level == "warning"
    assert "full" in told.text


def test_what_is_held_is_bounded_and_what_is_lost_is_told(tmp_path: Path) -> None:
    Journal.create(tmp_path).close()
    writer = EventWriter(tmp_path, max_events=20)
    allow_pages(writer, 1)
    writer.append([notice(0, size=8000)])
    assert not writer.flush(10.0)
    for number in range(1, 101):
        writer.append([progress(number), notice(number)] if number % 10 == 0 else [progress(number)])
    allow_pages(writer, 10_000)
    assert writer.flush(10.0)
    assert writer.close(10.0)
    events = stored(tmp_path)
    kept = [event for event in events if isinstance(event, Notice)]
    assert kept[:-1] == [notice(0, size=8000), *(notice(number) for number in range(10, 101, 10))]
    num_lost = 111 - (len(events) - 1)
    assert num_lost > 0
    assert f"{num_lost} did not fit" in kept[-1].text


def test_closing_on_a_full_disk_says_that_events_were_lost(tmp_path: Path) -> None:
    Journal.create(tmp_path).close()
    writer = EventWriter(tmp_path)
    allow_pages(writer, 1)
    writer.append([notice(1, size=8000)])
    assert not writer.close(10.0)
    assert stored(tmp_path) == []


def test_a_damage_during_the_run_ends_the_writing_not_the_run(tmp_path: Path) -> None:
    Journal.create(tmp_path).close()
    writer = EventWriter(tmp_path)
    other = sqlite3.connect(tmp_path / "journal.db")
    other.execute("DROP TABLE events")
    other.commit()
    other.close()
    writer.append([notice(1)])
    assert not writer.flush(10.0)
    assert "events" in (writer.trouble or "")
    writer.append([notice(2)])
    assert not writer.flush(10.0)
    assert not writer.close(10.0)


IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount(where: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        [*IN_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(where)], capture_output=True, check=False
    )
    return tried.returncode == 0


def in_tmpfs(where: Path, script: str, *, options: str = "size=3m") -> None:
    """Run `script` in a process of its own that sees a small tmpfs at `where` (its `run_dir`'s parent)."""
    if not can_mount(where):
        pytest.skip("this machine lets nobody mount a tmpfs")
    command = f'mount -t tmpfs -o {options} tmpfs "{where}" && exec "$0" -c "$1" "{where}"'
    done = subprocess.run(
        [*IN_NAMESPACE, "sh", "-c", command, sys.executable, PREAMBLE + script],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


PREAMBLE = """
import os, pathlib, subprocess, sys
from outlast.core.events import Notice
from outlast.errors import EnvironmentFault
from outlast.journal import Journal
top = pathlib.Path(sys.argv[1]); run_dir = top / "run"
def notice(number, size=1): return Notice(at_s=float(number), level="info", text="x" * size)
def fill():
    with open(top / "ballast", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
"""


@pytest.mark.process
def test_a_real_full_disk(tmp_path: Path) -> None:
    in_tmpfs(tmp_path, """
journal = Journal.create(run_dir)
epoch = journal.claim()
fill()
journal.append_many([notice(number, size=1000) for number in range(500)])
assert not journal.flush()
assert "full" in journal.trouble, journal.trouble
for number in range(50):  # the view record has room of its own
    assert journal.put(epoch, "view", os.urandom(20_000))
assert journal.claim() == epoch + 1
(top / "ballast").unlink()
assert journal.flush() and journal.trouble is None
assert journal.close()
with Journal.open_reader(run_dir) as reader:
    texts = [entry.event.text for entry in reader.events()]
    assert len(texts) == 501 and "full" in texts[-1], texts[-1]
fill()
Journal.open_writer(run_dir).close()  # a coordinator restarts although the disk is full
""")  # fmt: skip


@pytest.mark.process
def test_creating_a_run_on_a_full_disk_names_the_remedy(tmp_path: Path) -> None:
    in_tmpfs(tmp_path, """
run_dir.mkdir()
fill()
try:
    Journal.create(run_dir)
except EnvironmentFault as fault:
    assert "is full" in fault.message and "df" in fault.remedy, fault
else:
    raise AssertionError("created on a full disk")
(top / "ballast").unlink()
Journal.create(run_dir).close()
""")  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("clean", [True, False])
def test_a_read_only_disk_can_be_read_and_not_written(tmp_path: Path, clean: bool) -> None:
    end = "assert journal.flush() and journal.close()" if clean else "assert journal.flush(); os._exit(0)"
    in_tmpfs(tmp_path, f"""
if os.fork() == 0:
    journal = Journal.create(run_dir); journal.append(notice(7)); {end}; os._exit(0)
assert os.wait()[1] == 0
subprocess.run(["mount", "-o", "remount,ro", str(top)], check=True)
with Journal.open_reader(run_dir) as reader:
    assert [entry.event for entry in reader.events()] == [notice(7)]
for make in (lambda: Journal.open_writer(run_dir), lambda: Journal.create(top / "other")):
    try:
        make()
    except EnvironmentFault as fault:
        assert "cannot be written" in fault.message and fault.remedy, fault
    else:
        raise AssertionError("wrote to a read-only disk")
""")  # fmt: skip


def test_a_coordinator_stopped_in_the_middle_of_a_write_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.journal._files._BUSY_S", 0.05)
    with Journal.create(tmp_path) as journal:
        held = sqlite3.connect(tmp_path / "record.db", isolation_level=None)
        held.execute("BEGIN IMMEDIATE")
        with pytest.raises(EnvironmentFault, match="middle of a write") as caught:
            journal.claim()
        assert "coordinator" in caught.value.remedy
        held.execute("ROLLBACK")
        held.close()
        assert journal.claim() == 1


@pytest.mark.parametrize(
    ("code", "reading", "words"),
    [
        (sqlite3.SQLITE_CANTOPEN, True, "cannot be read"),
        (sqlite3.SQLITE_CANTOPEN, False, "cannot be written"),
        (sqlite3.SQLITE_IOERR_FSYNC, False, "the write was undone"),
        (sqlite3.SQLITE_CORRUPT, True, "damaged"),
    ],
)
def test_each_refusal_of_the_disk_has_a_remedy(code: int, reading: bool, words: str) -> None:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code
    fault = sqlite_fault(error, Path("/runs/one/journal.db"), reading=reading)
    assert words in str(fault)
    assert fault.remedy


def test_words_after_the_end_are_dropped(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path)
    journal.append(notice(1))
    assert journal.close()
    journal.append(notice(2))
    assert stored(tmp_path) == [notice(1)]


def test_a_file_in_the_way_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot open"):
        Journal.create(tmp_path / "file" / "run")
