"""The view that follows a run."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from benchmarks._long_run import Long
from benchmarks._long_run import events as generated

from outlast.core import events as ev
from outlast.errors import OutlastError
from outlast.journal import Journal, _journal
from outlast.observe import Live, status


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_off_a_terminal_plain_lines_come_as_things_happen(tmp_path: Path, story: Any) -> None:
    out = io.StringIO()
    now_s = [story.start_s + 4.5]
    live = Live(tmp_path / "run", 100, stream=out, clock=lambda: now_s[0])
    assert live.poll().state == "starting"  # nothing there yet
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([*story.started, *story.training])
        assert journal.flush()
        assert live.poll().state == "training"
        before = out.getvalue()
        assert "step 20 of 100, 4 of 4 replicas training, loss 3" in before
        assert live.poll().step == 20
        assert out.getvalue() == before  # nothing new, nothing said
        journal.append_many(story.killed)
        assert journal.flush()
        live.poll()
        told = out.getvalue()[len(before) :]
        assert "+5.0 s  ! r2.0: signal (SIGKILL); recovered in step 30" in told
        assert "noticed by agent a0; after 10 ms; 2 microbatches recomputed; downtime 50 ms" in told
        assert "\x1b" not in out.getvalue()
        assert "silent" not in told
        now_s[0] += 30.0
        assert live.poll().state == "stalled"  # nothing new, and that is news
        assert "silent for 26.5 s, and steps take 100 ms" in out.getvalue()
        before = out.getvalue()
        live.poll()
        assert out.getvalue() == before
    live.close()


def test_a_run_without_a_step_says_how_far_it_is_now_and_then(tmp_path: Path, story: Any) -> None:
    out = io.StringIO()
    now_s = [story.start_s]
    live = Live(tmp_path / "run", 100, stream=out, clock=lambda: now_s[0])
    begun, *rest = story.started
    with Journal.create(tmp_path / "run") as journal:
        told: list[list[str]] = []
        for after_s, events in (
            (0.5, [begun]), (5.0, []), (10.6, []), (11.0, []), (12.0, rest[:3]), (13.0, rest[3:]), (22.0, []),
            (23.1, []), (24.0, story.training[:2]),
        ):  # fmt: skip
            now_s[0] = story.start_s + after_s
            journal.append_many(events)
            assert journal.flush()
            before = len(out.getvalue())
            live.poll()
            told.append([line.split("  ", 1)[1] for line in out.getvalue()[before:].splitlines()])
        live.close()
    loading = "all replicas have a process and load the script; it goes on when all have joined"
    assert told[0] == ["run brave-otter started with 4 replicas and 1 spare"]
    assert told[1:4] == [[], ["coordinator and agents are starting"], []]
    assert told[4:8] == [[], [loading], [], [loading]], "each news once, and then as often as steps are told"
    assert told[8] == ["step 0 of 100, 4 of 4 replicas training"]


def test_a_terminal_shows_how_long_a_run_is_without_a_step(tmp_path: Path, story: Any) -> None:
    out = Terminal()
    live = Live(tmp_path / "run", 100, stream=out, clock=lambda: story.start_s + 12.0)
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(story.started[:3])
        assert journal.flush()
        live.poll()
    live.close()
    assert "for 12 s" in out.getvalue()
    assert "0 of 4 replicas have a process" in out.getvalue()
    assert "None" not in out.getvalue()


def test_while_the_whole_fleet_is_gone_nothing_is_told_of_the_view_that_was(tmp_path: Path, story: Any) -> None:
    """Nor for how long it has been so: the run's beginning was long before."""
    again = "every replica was gone, and the run begins again"
    gone = ev.FleetGone(at_s=story.start_s + 5.0, step=20, detail="r0.0: signal")
    now_s = story.start_s + 60.0
    outs = [io.StringIO(), Terminal()]
    lives = [Live(tmp_path / "run", 100, stream=out, clock=lambda: now_s) for out in outs]
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([*story.started, *story.training])
        assert journal.flush()
        for live in lives:
            live.poll()
        told = [len(out.getvalue()) for out in outs]
        journal.append(gone)
        assert journal.flush()
        for live in lives:
            assert live.poll().state == "starting"
            live.close()
    plain, drawn = (out.getvalue()[begin:] for out, begin in zip(outs, told, strict=True))
    assert plain.splitlines()[-1] == f"+60.0 s  {again}"
    assert again in drawn
    for text in (plain, drawn):
        assert "know each other" not in text
        assert "for 60 s" not in text


def test_the_loop_says_how_many_steps_there_are(tmp_path: Path, story: Any) -> None:
    out = Terminal()
    live = Live(tmp_path / "run", stream=out)
    said = ev.ProgressMade(at_s=story.training[-1].at_s + 1.0, view=[1, 1], stable=30, losses=[], step_s=0.1, until=50)
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([*story.started, *story.training])
        assert journal.flush()
        assert live.poll().until is None
        assert "━" not in out.getvalue()
        journal.append(said)
        assert journal.flush()
        assert live.poll().until == 50
    live.close()
    assert "━" in out.getvalue()
    assert "step 30 of 50" in out.getvalue()


def test_progress_lines_keep_their_distance(tmp_path: Path) -> None:
    out = io.StringIO()
    live = Live(tmp_path, stream=out, line_every_s=10.0)
    with Journal.create(tmp_path) as journal:
        for second in range(35):
            journal.append(ev.ProgressMade(at_s=1e3 + second, view=[1, 1], stable=second, losses=[], step_s=1.0))
            assert journal.flush()
            live.poll()
    live.close()
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == [
        "+0.0 s  step 0", "+10.0 s  step 10", "+20.0 s  step 20", "+30.0 s  step 30",
    ]  # fmt: skip


def test_on_a_terminal_it_draws_bar_replicas_and_what_happened(tmp_path: Path, story: Any) -> None:
    out = Terminal()
    live = Live(tmp_path / "run", 100, stream=out)
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many([*story.started, *story.training, *story.killed])
        assert journal.flush()
        live.poll()
    live.close()
    text = out.getvalue()
    for word in ("r4.0", "training", "downtime 50 ms", "step 60 of 100", "━", "loss"):
        assert word in text


def test_on_a_terminal_a_silence_grows(tmp_path: Path, story: Any) -> None:
    """A run whose sole replica is stopped writes nothing: the figure that was drawn first stood still with it."""
    out, now_s = Terminal(), [story.start_s + 5.0]
    live = Live(tmp_path, stream=out, clock=lambda: now_s[0])
    with Journal.create(tmp_path) as journal:
        journal.append_many([*story.started, *story.training])
        assert journal.flush()
        for later_s in (5.0, 12.0, 34.0):
            now_s[0] = story.start_s + later_s
            live.poll()
    shown = out.getvalue()
    assert shown.count("silent for 8 s") == shown.count("silent for 30 s") == 5  # the run and its four members
    assert "100 ms a step" not in shown.partition("silent for 8 s")[2]
    live.close()


def test_it_runs_in_a_thread_until_told_and_shows_the_end(tmp_path: Path, story: Any) -> None:
    out = io.StringIO()
    done = threading.Event()
    live = Live(tmp_path / "run", 100, stream=out)
    thread = threading.Thread(target=live.run_until, args=(done,))
    thread.start()
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(story.whole)
        assert journal.flush()
        done.set()
        thread.join(10)
    assert not thread.is_alive()
    assert out.getvalue().splitlines()[-1].endswith("loss 1, 100 ms a step, 2 recoveries")
    assert "run finished after 91 steps" in out.getvalue()


def test_a_journal_that_cannot_be_read_ends_the_view_once(tmp_path: Path) -> None:
    out = io.StringIO()
    Journal.create(tmp_path).close()
    (tmp_path / "journal.db").write_bytes(b"noise" * 1000)
    live = Live(tmp_path, stream=out)
    live.poll()
    live.poll()
    live.close()
    assert out.getvalue().count("the run goes on") == 1


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("trained", [False, True])
def test_nothing_is_shown_once_the_view_has_ended(
    tmp_path: Path, story: Any, stream: type[io.StringIO], trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither how the run begins, over and over, nor that it has stalled: that it goes on is not seen any more."""
    out = stream()
    now_s = [story.start_s + 5.0]
    live = Live(tmp_path, stream=out, clock=lambda: now_s[0])
    with Journal.create(tmp_path) as journal:
        journal.append_many([*story.started, *(story.training if trained else [])])
        assert journal.flush()
        live.poll()

        def unreadable(*_: object, **__: object) -> list[Any]:
            raise OutlastError("the disk is gone")

        monkeypatch.setattr(Journal, "events", unreadable)
        live.poll()
        ended = out.getvalue()
        assert "the run goes on" in ended
        for later_s in (20.0, 40.0, 400.0):
            now_s[0] = story.start_s + later_s
            live.poll()
    assert out.getvalue() == ended
    live.close()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_run_that_is_long_under_way_is_shown_from_its_newest_entries(
    tmp_path: Path, stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: entries that are decoded. What is shown is what a status says, and what comes is followed."""
    run = Long(steps=25_000, members=40, fault_every=2_000, save_every=5_000, word_every=10_000)
    *events, end = generated(run)
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(events)
        assert journal.flush(60.0)
        decoded: list[object] = []
        monkeypatch.setattr(_journal, "decode", lambda body: decoded.append(body) or ev.decode(body))
        out, now_s = stream(), max(event.at_s for event in events) + 0.5
        live = Live(tmp_path / "run", stream=out, clock=lambda: now_s)
        state = live.poll()
        assert len(decoded) < 3000
        assert state == status(events, held=True, now_s=now_s)
        told = out.getvalue()
        assert f"the newest of {len(events):,} entries; outlast why {tmp_path / 'run'} tells" in told
        assert "step 25000 of 25000" in told
        assert "recovered in step 23999" in told
        assert "recovered in step 1999;" not in told
        journal.append(end)
        assert journal.flush()
        assert live.poll() == status([*events, end], held=True, now_s=now_s)
        assert "run finished after 25,000 steps" in out.getvalue()
    live.close()
    assert not (tmp_path / "run" / "history.kept").exists(), "of a part no history is kept"
