"""History that was kept beside the journal: the same figures, or none at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe import (
    StateReading,
    read_history,
    read_state,
    read_story,
    run_status,
    sample_losses,
    state_reading,
    status,
    why,
)  # fmt: skip
from outlast.observe import _kept_history as kept_module
from outlast.observe._history import History
from outlast.observe._kept_history import KEPT_NAME, keep, kept_history


def steps(start_s: float, first: int, count: int) -> list[ev.AnyEvent]:
    return [
        ev.ProgressMade(
            at_s=start_s + n + 1, view=[1, 1], stable=first + n + 1, step_s=1.0,
            losses=[(first + n, 1 / (first + n + 1))], first=first + n,
            committed=first + n + 1, committed_at_s=start_s + n + 1, seconds={"productive": 1.0},
        )
        for n in range(count)
    ]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path, story: Any) -> Path:
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([*story.started, *story.training[:2], *steps(story.start_s + 10, 0, 2600), *story.killed])
    return tmp_path / "run"


@pytest.fixture
def journal(run_dir: Path) -> Iterator[Journal]:
    with Journal.open_reader(run_dir) as journal:
        yield journal


def told(history: History) -> tuple[Any, ...]:
    cost = history.accounts.accounting()
    curves = [(curve.head, curve.rows()) for curve in (history.losses, history.times)]
    return cost, curves, history.steps_committed, history.seq


def folded(journal: Journal) -> History:
    history = History()
    for entry in journal.events():
        history.take(entry.event, entry.seq)
    return history


def test_what_was_kept_is_what_the_journal_says(run_dir: Path, journal: Journal) -> None:
    first = read_history(run_dir, journal)
    assert (run_dir / KEPT_NAME).is_file()
    kept = kept_history(run_dir, journal)
    assert kept is not None
    assert told(kept) == told(first) == told(folded(journal))


def test_the_rest_of_the_journal_is_added(run_dir: Path, journal: Journal, story: Any) -> None:
    read_history(run_dir, journal)
    with Journal.open_writer(run_dir) as writer:
        writer.append_many([*steps(story.start_s + 3000, 2600, 50), *story.finished[1:]])
    assert told(read_history(run_dir, journal)) == told(folded(journal))


@pytest.mark.parametrize("harm", ["cut short", "a wrong byte", "empty", "gone", "other code"])
def test_what_cannot_be_relied_on_is_passed_over(
    run_dir: Path, journal: Journal, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = told(read_history(run_dir, journal))
    path = run_dir / KEPT_NAME
    data = path.read_bytes()
    if harm == "other code":
        monkeypatch.setattr(kept_module, "_code", lambda: b"other")
    elif harm == "gone":
        path.unlink()
    else:
        cuts = [data[:n] for n in range(0, len(data), 997)] if harm == "cut short" else [b""]
        if harm == "a wrong byte":
            cuts = [data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :] for n in range(0, len(data), 499)]
        for cut in cuts:
            path.write_bytes(cut)
            assert kept_history(run_dir, journal) is None
    assert kept_history(run_dir, journal) is None
    assert told(read_history(run_dir, journal)) == whole


def test_what_was_kept_of_another_journal_is_passed_over(run_dir: Path, journal: Journal, tmp_path: Path) -> None:
    """A directory that was copied over, or a run that began again in it."""
    read_history(run_dir, journal)
    with Journal.create(tmp_path / "other") as writer:
        writer.append_many(steps(5.0, 0, 3000))
    os.replace(run_dir / KEPT_NAME, tmp_path / "other" / KEPT_NAME)
    with Journal.open_reader(tmp_path / "other") as other:
        assert kept_history(tmp_path / "other", other) is None
        assert told(read_history(tmp_path / "other", other)) == told(folded(other))
    with Journal.create(tmp_path / "short") as writer:
        writer.append_many(steps(5.0, 0, 3))
    os.replace(tmp_path / "other" / KEPT_NAME, tmp_path / "short" / KEPT_NAME)
    with Journal.open_reader(tmp_path / "short") as short:
        assert kept_history(tmp_path / "short", short) is None


def test_a_place_that_cannot_be_written_is_no_error(run_dir: Path, journal: Journal) -> None:
    history = folded(journal)
    (run_dir / KEPT_NAME).mkdir()  # stands for any refusal: also root meets it
    assert not keep(run_dir, journal, history)
    assert told(read_history(run_dir, journal)) == told(history)
    assert sorted(path.name for path in run_dir.iterdir() if "kept" in path.name) == [KEPT_NAME]


def test_why_is_the_same_from_what_was_kept(run_dir: Path, journal: Journal) -> None:
    read_history(run_dir, journal)
    history, events = read_history(run_dir, journal), [entry.event for entry in journal.events()]
    assert why(read_story(journal), accounts=history.accounts) == why(events)


def test_a_status_is_the_same_from_the_few_events_that_make_it(run_dir: Path, journal: Journal) -> None:
    events = [entry.event for entry in journal.events()]
    assert status(read_state(journal)) == status(events)


def test_what_operators_asked_and_that_training_is_done_are_in_a_status(run_dir: Path, story: Any) -> None:
    at_s = story.start_s + 9000
    asked = [("scale", "7"), ("drain", "h0")]
    more = [ev.Asked(at_s=at_s, what=what, about=about, accepted=True, text="", replicas=[]) for what, about in asked]
    with Journal.create(run_dir.with_name("asked")) as writer:
        writer.append_many([*story.started, *story.training[:2], *more])
        writer.append(ev.TrainingEnded(at_s=at_s, steps=9000, writer="r0.0"))
        assert writer.flush()
        events = [entry.event for entry in writer.events()]
        told = status(read_state(writer))
    assert told == status(events)
    assert (told.state, told.step, told.num_replicas) == ("ending", 9000, 7)


def test_every_kind_that_a_status_knows_of_is_read_for_it() -> None:
    """From its source too, so that a new one is not forgotten: what is missing shows on the page only."""
    source = Path(str(run_status.__file__)).read_text(encoding="utf-8")
    known = set(run_status._TAKES)
    assert {getattr(ev, name) for name in re.findall(r"\bev\.(\w+)\(\)", source)} <= known
    read = {*state_reading._RUN_KINDS, *state_reading._PEOPLE_KINDS, *state_reading._NEWEST_ONLY, ev.ViewInstalled}
    assert len(known) > 20
    assert known <= read


def test_the_run_as_a_whole_is_told_before_who_is_in_it_is_read(run_dir: Path, story: Any, journal: Journal) -> None:
    """Both of the same moment, though more was written between them."""
    reading = StateReading(journal)
    whole = status(read_state(journal))
    first = [event for event in reading.of_run() if isinstance(event, ev.AgentStarted | ev.ReplicaStarted)]
    assert first == []
    told = msgspec.structs.replace(status(reading.of_run()), agents=whole.agents, replicas=whole.replicas)
    assert told == whole
    with Journal.open_writer(run_dir) as writer:
        writer.append(ev.ReplicaStarted(at_s=story.start_s + 9000, replica="r9.9", agent="a0", pid=1))
        writer.append_many(steps(story.start_s + 9000, 5000, 5100))
        assert writer.flush()
    assert status(reading.of_all()) == whole


def test_a_status_reads_no_more_of_a_longer_run(run_dir: Path, story: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: entries that are decoded."""
    from outlast.journal import _journal

    decoded: list[object] = []
    decode = _journal.decode
    monkeypatch.setattr(_journal, "decode", lambda body: decoded.append(body) or decode(body))

    def read() -> int:
        decoded.clear()
        with Journal.open_reader(run_dir) as journal:
            read_state(journal)
            assert len(sample_losses(journal)) > 100
        return len(decoded)

    before = read()
    with Journal.open_writer(run_dir) as writer:
        writer.append_many(steps(story.start_s + 3000, 2600, 5000))
    assert read() <= before + 20


def test_losses_of_a_short_run_are_all_there(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run") as writer:
        writer.append_many(steps(5.0, 0, 40))
    with Journal.open_reader(tmp_path / "run") as journal:
        assert sample_losses(journal) == [1 / (n + 1) for n in range(40)]
