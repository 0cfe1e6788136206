"""What `why` and the page read of a long run instead of all of it: the same story, from far fewer entries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe import incident, journal_streams, read_history, read_state, read_story, status, why
from outlast.observe._history import History
from outlast.observe._kept_history import KEPT_NAME, keep, kept_history
from outlast.observe.page_reading import RunReading
from outlast.observe.story_events import StoryFold, counted_view


def step(n: int) -> ev.ProgressMade:
    return ev.ProgressMade(
        at_s=1100.0 + n, view=[1, 3], stable=100 + n, losses=[(100 + n, 1.0 / (n + 1))], step_s=1.0, first=100 + n,
        committed=101 + n, committed_at_s=1100.0 + n, seconds={"productive": 1.0},
    )  # fmt: skip


def fault(n: int, slot: int, incarnation: int) -> list[ev.AnyEvent]:
    """One replica is killed, and another process takes its place by a planned view."""
    at_s, dead, fresh = 1100.5 + n, f"r{slot}.{incarnation}", f"r{slot}.{incarnation + 1}"
    others = ["r0.0", "r1.0", "r4.0"]  # as the view before the first fault has them
    return [
        ev.ReplicaExited(at_s=at_s, replica=dead, cause="signal", detail="SIGKILL", noticed_by="agent a0", step=n),
        ev.ViewInstalled(at_s=at_s, epoch=2, n=2 * n + 4, members=others, cause=f"{dead} died", planned=False),
        ev.ViewFormed(at_s=at_s, epoch=2, n=2 * n + 4, step=100 + n, roll_call_s=0.01),
        ev.Recovery(
            at_s=at_s, cause="signal", replica=dead, noticed_by="agent a0", detect_s=0.01, downtime_s=0.05,
            microbatches_recomputed=2, lost_steps=0, step=100 + n, view=[2, 2 * n + 4], detail="SIGKILL",
        ),
        ev.ReplicaStarted(at_s=at_s, replica=fresh, agent="a0", pid=900 + n),
        ev.JoinerServed(at_s=at_s, replica=fresh, step=100 + n, donors=others),
        ev.JoinerCaughtUp(at_s=at_s, replica=fresh, step=101 + n, seconds=0.1),
        ev.ViewInstalled(at_s=at_s, epoch=2, n=2 * n + 5, members=[*others, fresh], cause="planned", planned=True),
        ev.ViewFormed(at_s=at_s, epoch=2, n=2 * n + 5, step=101 + n, roll_call_s=0.01),
    ]  # fmt: skip


def long_run(story: Any, steps: int, faults: int) -> list[ev.AnyEvent]:
    events: list[ev.AnyEvent] = [*story.started, *story.training, *story.killed, *story.coordinator_lost]
    incarnation = 0
    for n in range(steps):
        events.append(step(n))
        if n % (steps // faults) == steps // faults - 1:
            events += fault(n, 3, incarnation)
            incarnation += 1
    return [*events, *story.finished[1:3]]


@pytest.fixture
def journal(tmp_path: Path, story: Any) -> Iterator[Journal]:
    with Journal.create(tmp_path / "run") as writer:
        writer.append_many(long_run(story, 3000, 20))
    with Journal.open_reader(tmp_path / "run") as reader:
        yield reader


def said(events: list[ev.AnyEvent], history: History) -> tuple[Any, ...]:
    story = why(events, accounts=history.accounts)
    return story, incident(story, events, accelerators=64)


@pytest.mark.parametrize("folded", [1, 300, 2900, 10_000])
def test_the_story_is_the_same_from_what_was_kept_and_the_rest(journal: Journal, folded: int) -> None:
    history = History()
    for entry in journal.events(limit=folded):
        history.take(entry.event, entry.seq)
    keep(journal.run_dir, journal, history)
    kept = read_history(journal.run_dir, journal)
    assert kept_history(journal.run_dir, journal) is not None
    story, told = said(read_story(journal, kept), kept)
    assert (story, told) == said([entry.event for entry in journal.events()], kept)
    assert (story, told) == said(read_story(journal), kept)
    assert story.num_recoveries == 22
    assert len(story.timeline) > 60


def rows_read(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many rows of the journal `why` reads once its history was kept."""
    read_history(journal.run_dir, journal)
    assert (journal.run_dir / KEPT_NAME).is_file()
    rows, query = 0, Journal._query

    def counted(self: Journal, text: str, values: list[int | str]) -> list[tuple[int, str]]:
        nonlocal rows
        found = query(self, text, values)
        rows += len(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_query", counted)
        read_story(journal, read_history(journal.run_dir, journal))
    return rows


def test_how_much_is_read_does_not_grow_with_steps_or_faults(
    tmp_path: Path, story: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for name, steps, faults in (("short", 2500, 10), ("long", 5000, 40)):
        with Journal.create(tmp_path / name) as writer:
            writer.append_many(long_run(story, steps, faults))
        with Journal.open_reader(tmp_path / name) as reader:
            counts.append(rows_read(reader, monkeypatch))
    assert counts[0] == counts[1] < 60


def test_what_comes_with_every_step_is_sampled_evenly_and_never_much() -> None:
    fold = StoryFold()
    for n in range(100_000):
        fold.take(step(n), n + 1)
    places = [seq for seq, _ in fold.entries()]
    assert 1000 <= len(places) < 2000
    assert len({later - earlier for earlier, later in itertools.pairwise(places)}) == 1
    again = StoryFold()
    again.load(fold.dump())
    fold.take(step(100_000), 100_001)
    again.take(step(100_000), 100_001)
    assert list(again.entries()) == list(fold.entries())


@pytest.mark.parametrize("names", [[], ["r0.0"], ["r0.0", "r1.0", "r2.17"]])
def test_a_view_is_read_without_names_and_with_their_number(names: list[str]) -> None:
    view = ev.ViewInstalled(
        at_s=1.5, epoch=2, n=7, members=names, cause='"odd", cause', planned=True, num_microbatches=8
    )
    counted = counted_view(ev.encode(view))
    assert len(counted.members) == len(names)
    assert msgspec.structs.replace(counted, members=names) == view


def test_old_views_without_names_change_no_status(
    journal: Journal, story: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = status([entry.event for entry in journal.events()])
    assert status(read_state(journal)) == whole
    monkeypatch.setattr(journal_streams, "_NAMES", 4)
    assert journal_streams.NUM_NAMED_VIEWS[0] == len(journal_streams.named_views(journal)) == 4
    assert status(read_state(journal)) == whole
    reading = RunReading(journal.run_dir)
    assert reading.open()
    assert reading.fold.status(held=None, now_s=None) == whole
    rows = [page.row.what for page in reading.fold.rows if page.row.kind == "view_installed"]
    assert len(rows) == 43
    assert sum("with 4 members" in row for row in rows) == 22
    reading.close()
