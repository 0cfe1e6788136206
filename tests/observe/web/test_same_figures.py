"""Every figure of the metrics is the one that page, terminal and journal say at the same moment of a run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from benchmarks._long_run import Long, write
from benchmarks._long_run import events as generated
from tests.observe.web.asking import ask
from tests.observe.web.telling import board_of, differences, told

from outlast.cli import main
from outlast.cli._serve import _beside_plan
from outlast.core import events as ev
from outlast.journal import Journal, keep_clock
from outlast.observe import Live
from outlast.observe.web import Board, build_app
from outlast.runtime.settings.fault_points import Fault

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits.py"


def saves(story: Any) -> list[ev.AnyEvent]:
    at_s = story.start_s + 8.0
    saved = ev.CheckpointSaved(
        at_s=at_s, step=60, generation=3, view=[1, 3], num_writers=4, state_bytes=2000, written_bytes=1000,
        blocked_s=0.02, copied_s=0.1, durable_s=0.4, reason="interval", url="file:///c",
    )  # fmt: skip
    failed = ev.CheckpointFailed(at_s=at_s + 0.2, step=62, cause="writer_failed", reason="no space", url="file:///c")
    skipped = ev.VerdictReached(
        at_s=at_s + 0.3, step=63, action="skip_step", evidence="not finite", confidence="certain", remedy="look"
    )
    refused = ev.Refused(at_s=at_s + 0.3, reason="no proof", peer="10.0.0.9", count=10)
    mismatch = ev.AuditMismatch(
        at_s=at_s + 0.4, step=64, microbatch=1, culprit="r1.0", host="a0", device="cpu", verdict="transient",
        evidence="r1.0 differs", confidence=1.0, remedy="test it",
    )  # fmt: skip
    certified = ev.StateCertified(at_s=at_s + 0.4, step=60, share=0.5, audited=30)
    return [saved, failed, skipped, refused, mismatch, certified]


def moments(story: Any) -> dict[str, list[ev.AnyEvent]]:
    """The journal as far as it has come, at several moments of a run that is held."""
    training = [*story.started, *story.training]
    killed = [*training, *story.killed]
    return {
        "started": story.started,
        "training": training,
        "amid a fault": [*training, *story.killed[:3]],
        "after it": killed,
        "coordinator lost": [*killed, *saves(story), *story.coordinator_lost],
        "over": [*killed, *saves(story), *story.coordinator_lost, *story.finished],
    }


def by(counts: Any) -> dict[str, float]:
    return {str(key): float(value) for key, value in counts.items() if value}


Told = tuple[dict[str, Any], dict[str, Any], list[ev.AnyEvent]]
"""`status --json`, `why --json`, and the journal."""


def sums(kind: type[ev.AnyEvent], value: Callable[[Any], float]) -> Callable[[Told], float]:
    return lambda told: sum(value(event) for event in told[2] if isinstance(event, kind))


ONE: dict[str, Callable[[Told], float | None]] = {
    "outlast_run_step": lambda t: t[0]["step"],
    "outlast_run_steps_wanted": lambda t: t[0]["until"],
    "outlast_step_duration_seconds": lambda t: t[0]["step_s"],
    "outlast_last_commit_timestamp_seconds": lambda t: t[0]["step_at_s"],
    "outlast_loss": lambda t: t[0]["loss"],
    "outlast_replicas_wanted": lambda t: t[0]["num_replicas"],
    "outlast_audit_mismatches_total": lambda t: t[0]["num_audit_mismatches"],
    "outlast_checkpoints_failed_total": lambda t: t[0]["num_failed_saves"],
    "outlast_certified_step": lambda t: t[0]["certified_step"],
    "outlast_wall_seconds": lambda t: t[1]["cost"]["wall_s"],
    "outlast_ettr_ratio": lambda t: t[1]["ettr"],
    "outlast_history_read_ratio": lambda t: 1.0,
    "outlast_steps_committed_total": sums(ev.ProgressMade, lambda e: max(0, e.committed - e.first)),
    "outlast_microbatches_recomputed_total": sums(ev.Recovery, lambda e: e.microbatches_recomputed),
    "outlast_downtime_seconds_total": sums(ev.Recovery, lambda e: e.downtime_s),
    "outlast_steps_lost_total": lambda t: t[1]["lost_steps"],
    "outlast_checkpoints_saved_total": sums(ev.CheckpointSaved, lambda e: 1),
    "outlast_checkpoint_written_bytes_total": sums(ev.CheckpointSaved, lambda e: e.written_bytes),
    "outlast_recovery_downtime_seconds_sum": sums(ev.Recovery, lambda e: e.downtime_s),
    "outlast_recovery_downtime_seconds_count": sums(ev.Recovery, lambda e: 1),
    "outlast_recovery_detection_seconds_sum": sums(ev.Recovery, lambda e: e.detect_s),
    "outlast_recovery_detection_seconds_count": lambda t: t[0]["num_recoveries"],
    "outlast_checkpoint_step": lambda t: (t[0]["last_save"] or {}).get("step"),
    "outlast_checkpoint_timestamp_seconds": lambda t: (t[0]["last_save"] or {}).get("at_s"),
    "outlast_checkpoint_durable_seconds": lambda t: (t[0]["last_save"] or {}).get("durable_s"),
    "outlast_checkpoint_blocked_seconds": lambda t: (t[0]["last_save"] or {}).get("blocked_s"),
}
"""Figures of the run as a whole: what the others say of them."""
MANY: dict[str, tuple[str, Callable[[Told], dict[str, float]]]] = {
    "outlast_run_state": ("state", lambda t: {t[0]["state"]: 1.0}),
    "outlast_replicas": ("state", lambda t: by(Counter(r["state"] for r in t[0]["replicas"]))),
    "outlast_agents": ("state", lambda t: by(Counter(a["state"] for a in t[0]["agents"]))),
    "outlast_recoveries_total": ("cause", lambda t: by(Counter(e.cause for e in t[2] if isinstance(e, ev.Recovery)))),
    "outlast_verdicts_total": (
        "action", lambda t: by(Counter(e.action for e in t[2] if isinstance(e, ev.VerdictReached)))
    ),
    "outlast_refused_connections_total": (
        "reason", lambda t: {e.reason: float(e.count) for e in t[2] if isinstance(e, ev.Refused)}
    ),
    "outlast_time_seconds": ("use", lambda t: by({k[:-2]: v for k, v in t[1]["cost"].items() if k != "wall_s"})),
}  # fmt: skip
"""Figures by a label."""
ELSEWHERE = {"outlast_build_info", "outlast_run_info", "outlast_clock_events_total", "outlast_step_part_seconds"}
"""Names, and what tests of their own hold to the journal (`test_anatomy.py`, `test_status.py`)."""


@pytest.mark.parametrize("moment", ["started", "training", "amid a fault", "after it", "coordinator lost", "over"])
def test_every_metric_is_what_status_why_page_and_journal_say(
    moment: str, story: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = moments(story)[moment]
    now_s = events[-1].at_s + 0.25
    with Journal.create(tmp_path / "brave") as writer:  # held: the run is alive
        writer.append_many(events)
        assert writer.flush()
        board = board_of(tmp_path / "brave", lambda: now_s)
        told_ = told(tmp_path / "brave", events, now_s, True, board, capsys, monkeypatch)
    assert differences(told_) == []
    samples = told_.metrics
    families = {re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0]) for name in samples}
    known = {re.sub(r"_(sum|count)$", "", name) for name in ONE} | set(MANY) | ELSEWHERE
    assert families <= known, "a new metric: say what it equals"
    everything = (told_.status, told_.why, events)
    for name, value in ONE.items():
        expected, shown = value(everything), samples.get(f"{name}{{}}")
        assert shown == (None if expected is None else pytest.approx(expected, rel=1e-12)), name
    for name, (label, values) in MANY.items():
        own = {key: value for key, value in samples.items() if key.startswith(f"{name}{{") and value}
        assert {re.findall(rf'{label}="(.*?)"}}', key)[0]: v for key, v in own.items()} == values(everything), name


def test_who_has_followed_a_run_and_who_looks_at_it_now_say_the_same(
    story: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment of a run that is held: after each event, and long after the last one."""
    events: list[ev.AnyEvent] = []
    now = [story.start_s]
    followed = board_of(tmp_path / "brave", lambda: now[0])
    whole = [*story.started, *story.training, *story.killed, *saves(story), *story.coordinator_lost, *story.finished]
    with Journal.create(tmp_path / "brave") as writer:
        for event in whole:
            events.append(event)
            writer.append(event)
            assert writer.flush()
            for later_s in (0.25, 40.0):
                now[0] = max(e.at_s for e in events) + later_s
                seen = told(tmp_path / "brave", events, now[0], True, followed, capsys, monkeypatch)
                assert differences(seen) == [], f"after {event}, {later_s} s later"


def test_two_faults_that_one_view_mends_are_counted_alike(
    story: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = (event for event in story.killed if isinstance(event, ev.Recovery))
    other = msgspec.structs.replace(fault, replica="r3.0", downtime_s=0.07, lost_steps=3)
    events = [*story.started, *story.training, *story.killed, other]
    run_dir = frozen(tmp_path / "brave", events)
    board = board_of(run_dir, lambda: 0.0)
    told_ = told(run_dir, events, 0.0, False, board, capsys, monkeypatch)
    assert differences(told_) == []
    assert told_.metrics["outlast_downtime_seconds_total{}"] == 0.07
    assert told_.metrics["outlast_microbatches_recomputed_total{}"] == 2
    assert told_.metrics["outlast_steps_lost_total{}"] == 3


@pytest.mark.parametrize(
    ("rewinds", "end", "lost"),
    [
        ([(15, 11)], "", 4),
        ([(15, 11), (18, 11)], "", 6),  # the second one finds the first one's steps gone already
        ([(15, 11), (13, 11)], "", 6),  # the fleet had gone, and did them again
        ([(20, 15)], "failed", 20),  # no checkpoint holds any step: those are among them
    ],
)
def test_steps_that_a_guard_took_back_are_lost_for_all(
    rewinds: list[tuple[int, int]], end: str, lost: int, story: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    events = [*story.started, *story.training]
    at_s = max(event.at_s for event in events)
    events += [
        ev.VerdictReached(
            at_s=at_s, step=step, action="rewind", evidence="loss is not finite", confidence="certain", remedy="look",
            to_step=to,
        )
        for step, to in rewinds
    ]  # fmt: skip
    if end:
        events.append(ev.RunFinished(at_s=at_s, outcome=end, steps=20, detail="", exit_code=1, seconds={}))
    run_dir = frozen(tmp_path / "brave", events)
    told_ = told(run_dir, events, 0.0, False, board_of(run_dir, lambda: 0.0), capsys, monkeypatch)
    assert differences(told_) == []
    assert told_.why["lost_steps"] == told_.page["story"]["lost_steps"] == lost
    assert told_.metrics["outlast_steps_lost_total{}"] == lost
    assert f"Lost: {lost} steps" in told_.why["incident"]["paragraph"]
    assert f"{lost} steps lost" in told_.why_text


def frozen(run_dir: Path, events: list[ev.AnyEvent]) -> Path:
    with Journal.create(run_dir) as writer:
        writer.append_many(events)
    return run_dir


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_a_large_fleet_s_long_journal_is_told_alike(
    share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million steps cut to some hundreds; more members than words of them are read. Amid it, and over."""
    run = Long(steps=400, members=1300, fault_every=90, save_every=50, word_every=100)
    events = list(generated(run))
    events = events[: int(len(events) * share)]
    now = [events[0].at_s]
    followed = board_of(tmp_path / "long", lambda: now[0])
    with Journal.create(tmp_path / "long") as writer:
        for at in range(0, len(events), 1500):
            writer.append_many(events[at : at + 1500])
            assert writer.flush(60.0)
            followed.turn()
        now[0] = max(event.at_s for event in events) + 0.4
        for board in (followed, board_of(tmp_path / "long", lambda: now[0])):
            seen = told(tmp_path / "long", events, now[0], True, board, capsys, monkeypatch)
            assert differences(seen) == []


def test_losses_that_are_not_finite_leave_no_old_one_behind(
    story: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members tell no loss that is not finite. What the last finite one was is forgotten by all at once."""
    events, now = [*story.started, *story.training], [0.0]
    followed = board_of(tmp_path / "brave", lambda: now[0])
    with Journal.create(tmp_path / "brave") as writer:
        writer.append_many(events)
        for step in range(21, 46):
            at_s = story.start_s + 4.0 + 1.1 * (step - 20)  # readers are told of progress once a second
            events.append(ev.ProgressMade(
                at_s=at_s, view=[1, 1], stable=step, losses=[], step_s=1.1, first=step - 1, committed=step,
                committed_at_s=at_s, seconds={"productive": 1.1},
            ))  # fmt: skip
            writer.append(events[-1])
            assert writer.flush()
            now[0] = at_s + 0.1
            seen = told(tmp_path / "brave", events, now[0], True, followed, capsys, monkeypatch)
            assert differences(seen) == [], step
    assert seen.status["loss"] is None


@pytest.mark.process
def test_a_real_fleet_s_journal_is_told_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas, one of which is killed amid a step, and checkpoints: its journal at the end, and before it."""
    fault = Fault(replica="r1", phase="reduce", step=9, action="SIGKILL")
    command = [
        sys.executable, "-m", "outlast", "run", "--replicas", "2", "--run-dir", str(tmp_path / "real"),
        "--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "6", str(EXAMPLE), "--steps", "24", "--out",
        str(tmp_path / "out"),
    ]  # fmt: skip
    environ = os.environ | {"OUTLAST_FAULTS": msgspec.json.encode([fault]).decode()}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with Journal.open_reader(tmp_path / "real") as reader:
        whole = [entry.event for entry in reader.events()]
    assert any(isinstance(event, ev.Recovery) for event in whole)
    assert any(isinstance(event, ev.CheckpointSaved) for event in whole)
    board = board_of(tmp_path / "real", lambda: 0.0)
    assert differences(told(tmp_path / "real", whole, 0.0, False, board, capsys, monkeypatch)) == []
    for number, at in enumerate(range(len(whole) // 4, len(whole), max(1, len(whole) // 12))):
        run_dir, events = tmp_path / f"cut{number}", whole[:at]
        now_s = max(event.at_s for event in events) + 0.3
        with Journal.create(run_dir) as writer:
            writer.append_many(events)
            assert writer.flush()
            board = board_of(run_dir, lambda now_s=now_s: now_s)
            assert differences(told(run_dir, events, now_s, True, board, capsys, monkeypatch)) == [], f"of {at} entries"


def test_beside_the_plan_the_page_has_the_tables_of_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write(tmp_path / "brave", Long(steps=600, members=3000, fault_every=150, save_every=1000))
    with Journal.open_reader(run_dir) as reader:
        now_s = reader.events(reader.last_seq - 1)[0].event.at_s
    board = Board([run_dir], clock=lambda _: now_s, beside_plan=_beside_plan)
    while not board.ready:
        board.turn()
    board.turn()
    plan = json.loads(ask(build_app(board, follow=False), "/api/runs/brave/picture")[2])["plan"]
    assert main(["why", str(run_dir)]) == 0
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [table["title"] for table in plan["tables"]] == [
        "Failures, predicted beside observed", "Useful time, predicted beside observed",
        "What the run believes now, and what its policies choose by it",
    ]  # fmt: skip
    for table in plan["tables"]:
        assert table["title"] in told
        assert {table["note"], *(" ".join(" ".join(row).split()) for row in table["rows"])} <= set(told)
    assert plan["since_s"] == pytest.approx(60.0 + 601.0)
    useful = []
    for words in (["why", str(run_dir)], ["plan", "--from-run", str(run_dir)]):
        assert main([*words, "--json"]) == 0
        useful.append(json.loads(capsys.readouterr().out)["useful_time"])
        assert main(words) == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert " ".join(" ".join(plan["tables"][1]["rows"][0]).split()) in lines
    assert useful[0] == useful[1]
    assert useful[0]["failures"] >= 2
    assert 0 <= useful[0]["seen_low"] < useful[0]["seen"] < useful[0]["seen_high"] <= 1
    assert 0 <= useful[0]["low"] < useful[0]["predicted"] <= useful[0]["high"] <= 1
    assert [plan["tables"][0]["rows"][0][place] for place in (0, 2)] == ["a replica dies", "4"]


def test_beside_the_plan_stands_nothing_where_nothing_can_be_said(tmp_path: Path, story: Any) -> None:
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many([*story.started, *story.training])
    board = Board([tmp_path / "brave"], clock=lambda _: story.start_s + 9.0, beside_plan=_beside_plan)
    for _ in range(2):
        board.turn()
    page = json.loads(ask(build_app(board, follow=False), "/api/runs/brave/picture")[2])
    assert page["plan"]["tables"] == []


def test_page_and_watch_go_by_the_clock_that_the_run_s_events_go_by(
    story: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wall clock was set by an hour while it trained: neither it, nor its newest commit, is an hour old."""
    apart_s = time.time() - 3600.0 - story.start_s
    events = [shifted(event, apart_s) for event in [*story.started, *story.training]]
    run_dir = tmp_path / "brave"
    with Journal.create(run_dir) as writer:
        keep_clock(run_dir, story.start_s + 4.2 + apart_s - time.monotonic())
        writer.append_many(events)
        assert writer.flush()
        board, watched = Board([run_dir]), io.StringIO()
        for _ in range(2):
            board.turn()
        head = json.loads(ask(build_app(board, follow=False), "/api/runs/brave/picture")[2])["head"]
        live = Live(run_dir, stream=watched)
        state = live.poll()
        live.close()
        assert main(["status", str(run_dir), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    ages = [each["step_age_s"] for each in (status, head["status"])] + [state.step_age_s]
    assert all(age is not None and age < 600.0 for age in ages), ages


def shifted(event: ev.AnyEvent, by_s: float) -> ev.AnyEvent:
    told = {"at_s": event.at_s + by_s}
    if isinstance(event, ev.ProgressMade):
        told["committed_at_s"] = event.committed_at_s + by_s
    return msgspec.structs.replace(event, **told)


def test_a_generation_is_certified_where_a_state_at_or_after_it_is(story: Any, tmp_path: Path) -> None:
    """As its head in the archive is: saved before the state was certified, or after."""
    saved = next(event for event in saves(story) if isinstance(event, ev.CheckpointSaved))
    events = [*story.started, *story.training]
    for step, generation, certified in ((10, 1, 12), (20, 2, None), (30, 3, 35), (32, 4, None), (40, 5, None)):
        events.append(msgspec.structs.replace(saved, step=step, generation=generation))
        if certified is not None:
            events.append(ev.StateCertified(at_s=saved.at_s, step=certified, share=0.5, audited=9))
    run_dir = frozen(tmp_path / "brave", events)
    board = board_of(run_dir, lambda: 0.0)
    for _ in range(2):
        board.turn()
    page = json.loads(ask(build_app(board, follow=False), "/api/runs/brave/picture")[2])
    ladder = {rung["generation"]: rung["certified"] for rung in page["story"]["generations"]}
    assert ladder == {1: True, 2: False, 3: True, 4: True, 5: False}
