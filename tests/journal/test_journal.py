"""What a run's journal keeps, and for whom."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from outlast.core.events import AnyEvent, CoordinatorStarted, Notice, ProgressMade
from outlast.errors import ConfigError, EnvironmentFault, ProtocolViolation
from outlast.journal import Journal, LastLine, _journal


def notice(number: int) -> Notice:
    return Notice(at_s=float(number), level="info", text=f"n{number}")


def test_events_come_back_as_written_in_order_and_by_kind(tmp_path: Path) -> None:
    written: list[AnyEvent] = [
        notice(1),
        ProgressMade(at_s=2.0, view=[1, 2], stable=3, losses=[(2, 0.5), (3, 0.25)], step_s=0.1),
        CoordinatorStarted(at_s=3.0, epoch=1, pid=7, takeover=False),
    ]
    with Journal.create(tmp_path / "run") as journal:
        journal.append(written[0])
        journal.append_many(written[1:])
        assert journal.flush()
        assert [entry.event for entry in journal.events()] == written
    with Journal.open_reader(tmp_path / "run") as reader:
        assert [entry.event for entry in reader.events()] == written
        assert [entry.event for entry in reader.events(kinds=[ProgressMade, CoordinatorStarted])] == written[1:]
        assert reader.events(kinds=[]) == []


def test_entries_come_in_parts_to_who_takes_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_journal, "_PART", 2)
    with Journal.create(tmp_path / "run") as journal:
        assert list(journal.each()) == []
        for count in (1, 2, 5):
            journal.append_many([notice(number) for number in range(count)])
            assert journal.flush()
            assert list(journal.each()) == journal.events()


def test_entries_are_found_by_their_times_and_from_a_place_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_journal, "_PART", 2)
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([notice(number) for number in (1, 2, 3, 2, 5)])
        assert journal.flush()
        written = journal.events()
        assert list(journal.each(since_seq=written[1].seq)) == written[2:]
        assert list(journal.each_at({written[1].event.at_s, 77.0})) == [written[1], written[3]]
        assert list(journal.each_at(set())) == []


def test_a_journal_has_records_of_its_own(tmp_path: Path) -> None:
    """Also before anybody has claimed, and no longer from one that was followed."""
    with Journal.create(tmp_path / "run") as journal:
        assert journal.epoch_here == 0
        assert journal.put_here(0, "key", b"waiting")
        old, new = journal.claim(""), journal.claim("")
        assert not journal.put_here(old, "key", b"old")
        assert journal.get_here("key") == b"waiting"
        assert journal.put_here(new, "key", b"new")
        assert journal.get_here("key") == b"new"
        assert journal.epoch_here == new


def test_a_reader_follows_a_running_writer(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run") as journal, Journal.open_reader(tmp_path / "run") as reader:
        assert reader.last_seq == 0
        journal.append_many([notice(1), notice(2)])
        assert journal.flush()
        seen = reader.events()
        journal.append(notice(3))
        assert journal.flush()
        assert [entry.event for entry in reader.events(since_seq=seen[-1].seq)] == [notice(3)]
        assert [entry.event for entry in reader.events(limit=2)] == [notice(1), notice(2)]
        assert reader.last_seq == reader.events()[-1].seq


def test_a_reader_in_the_middle_of_a_read_does_not_block_the_writer(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([notice(number) for number in range(100)])
        assert journal.flush()
        slow = sqlite3.connect(f"{(tmp_path / 'run' / 'journal.db').as_uri()}?mode=ro", uri=True)
        cursor = slow.execute("SELECT body FROM events")
        cursor.fetchone()
        journal.append(notice(100))
        assert journal.flush()
        assert journal.put(journal.claim(), "view", b"v")
        assert len(cursor.fetchall()) == 99
        slow.close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    Journal.create(tmp_path / "run").close()
    with Journal.open_reader(tmp_path / "run") as reader:
        for write in (lambda: reader.append(notice(1)), reader.claim, lambda: reader.put(1, "k", b"")):
            with pytest.raises(ValueError, match="opened to read"):
                write()


def test_epochs_rise_and_a_superseded_coordinator_writes_nothing(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run") as journal:
        assert journal.epoch == 0
        first = journal.claim("pid 1")
        assert journal.put(first, "view", b"one")
        second = journal.claim("pid 2")
        assert second > first
        assert not journal.put(first, "view", b"late")
        assert journal.get("view") == b"one"
        assert journal.put(second, "view", b"two")
        with pytest.raises(ProtocolViolation):
            journal.put(second + 1, "view", b"unclaimed")
        assert journal.get("view") == b"two"
        assert journal.get("other") is None
    with Journal.open_writer(tmp_path / "run") as journal:
        assert journal.epoch == second
        assert journal.get("view") == b"two"
        assert journal.claim() == second + 1


def test_a_record_is_in_the_file_when_put_returns_although_events_wait(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run") as journal:
        held = sqlite3.connect(tmp_path / "run" / "journal.db", isolation_level=None)
        held.execute("BEGIN IMMEDIATE")  # the events' file is busy for as long as this takes
        journal.append(notice(1))
        epoch = journal.claim()
        assert journal.put(epoch, "view", b"v")
        assert not journal.flush(timeout_s=0.0)
        other = sqlite3.connect(f"{(tmp_path / 'run' / 'record.db').as_uri()}?mode=ro", uri=True)
        assert other.execute("SELECT value FROM records WHERE key = 'view'").fetchone() == (b"v",)
        other.close()
        held.execute("ROLLBACK")
        held.close()
        assert journal.flush()
        assert [entry.event for entry in journal.events()] == [notice(1)]


def test_the_file_of_an_ended_run_can_be_copied_alone_though_somebody_reads(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "run")
    with Journal.open_reader(tmp_path / "run") as reader:
        journal.append_many([notice(number) for number in range(50)])
        assert journal.flush()
        assert len(reader.events()) == 50
        journal.close()
        copy = sqlite3.connect(shutil.copy(tmp_path / "run" / "journal.db", tmp_path / "alone.db"))
        assert copy.execute("SELECT count(*) FROM events").fetchone() == (50,)
        copy.close()


def test_a_last_line_is_the_last_and_leaves_the_file_whole(tmp_path: Path) -> None:
    """Also where somebody reads, and so keeps the log: what it wrote before is in the file."""
    with Journal.create(tmp_path / "run") as journal:
        journal.append(notice(1))
    with Journal.open_reader(tmp_path / "run") as reader:
        with LastLine(tmp_path / "run") as line:
            line.append(notice(2))
        assert [entry.event for entry in reader.events()] == [notice(1), notice(2)]
        copy = sqlite3.connect(shutil.copy(tmp_path / "run" / "journal.db", tmp_path / "alone.db"))
        assert copy.execute("SELECT count(*) FROM events").fetchone() == (2,)
        copy.close()
    with pytest.raises(ConfigError, match="holds no run"):
        LastLine(tmp_path)
    (tmp_path / "run" / "journal.db").write_bytes(b"x" * 8192)
    with pytest.raises(EnvironmentFault):
        LastLine(tmp_path / "run")


def test_a_directory_takes_one_run(tmp_path: Path) -> None:
    Journal.create(tmp_path / "run").close()
    with pytest.raises(ConfigError, match="already holds a run"):
        Journal.create(tmp_path / "run")
    Journal.open_writer(tmp_path / "run").close()


@pytest.mark.parametrize("open_journal", [Journal.open_reader, Journal.open_writer])
def test_no_run_is_said_so(tmp_path: Path, open_journal: object) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        open_journal(tmp_path)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["journal.db", "record.db"])
def test_a_damaged_file_names_itself_and_a_remedy(tmp_path: Path, name: str) -> None:
    Journal.create(tmp_path / "run").close()
    (tmp_path / "run" / name).write_bytes(b"not a database at all" * 100)
    with pytest.raises(EnvironmentFault, match="damaged") as caught:
        Journal.open_writer(tmp_path / "run")
    assert name in str(caught.value)
    assert caught.value.remedy
    with pytest.raises(EnvironmentFault, match="damaged"):
        Journal.open_reader(tmp_path / "run")


def test_a_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    Journal.create(tmp_path / "run").close()
    database = sqlite3.connect(tmp_path / "run" / "journal.db")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(EnvironmentFault, match="format 99"):
        Journal.open_writer(tmp_path / "run")
    with pytest.raises(EnvironmentFault, match="format 99"):
        Journal.open_reader(tmp_path / "run")


def test_an_event_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    Journal.create(tmp_path / "run").close()
    database = sqlite3.connect(tmp_path / "run" / "journal.db")
    database.execute("INSERT INTO events(at_s, kind, body) VALUES (1.0, 'notice', '{\"kind\":\"unheard of\"}')")
    database.commit()
    database.close()
    with Journal.open_reader(tmp_path / "run") as reader, pytest.raises(EnvironmentFault, match="event 1"):
        reader.events()


def test_an_interrupted_creation_can_be_repeated(tmp_path: Path) -> None:
    Journal.create(tmp_path / "run").close()
    (tmp_path / "run" / "journal.db").unlink()  # created last: this is what a crash before it leaves
    with Journal.create(tmp_path / "run") as journal:
        assert journal.claim() == 1
