"""The view that follows a run."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe import Live


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
