"""Every figure of the metrics is the one that page, terminal and journal say at the same moment of a run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from benchmarks._long_run import Long, write
from tests.observe.web.asking import ask

from outlast import journal as journal_room
from outlast.cli import main
from outlast.cli._serve import _beside_plan
from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe.web import Board, build_app


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
    "outlast_certified_step": lambda t: t[0]["certified"],
    "outlast_wall_seconds": lambda t: t[1]["cost"]["wall_s"],
    "outlast_ettr_ratio": lambda t: t[1]["ettr"],
    "outlast_history_read_ratio": lambda t: 1.0,
    "outlast_steps_committed_total": sums(ev.ProgressMade, lambda e: max(0, e.committed - e.first)),
    "outlast_microbatches_recomputed_total": sums(ev.Recovery, lambda e: e.microbatches_recomputed),
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
    run_dir = tmp_path / "brave"
    now_s = events[-1].at_s + 0.25
    monkeypatch.setattr(journal_room, "run_now_s", lambda _: now_s)
    board = Board([run_dir], clock=lambda: now_s)
    with Journal.create(run_dir) as writer:  # held: the run is alive
        writer.append_many(events)
        assert writer.flush()
        for _ in range(2):
            board.turn()
        app = build_app(board, follow=False)
        lines = ask(app, "/metrics")[2].decode().splitlines()
        page = json.loads(ask(app, "/api/runs/brave/picture")[2])
        told = []
        for command in ("status", "why"):
            assert main([command, str(run_dir), "--json"]) == 0
            told.append(json.loads(capsys.readouterr().out))
        assert main(["status", str(run_dir)]) == 0
        terminal = capsys.readouterr().out
    status, why = told
    samples = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}
    families = {re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0]) for name in samples}
    known = {re.sub(r"_(sum|count)$", "", name) for name in ONE} | set(MANY) | ELSEWHERE
    assert families <= known, "a new metric: say what it equals"
    everything = (status, why, events)
    for name, value in ONE.items():
        expected, shown = value(everything), samples.get(f'{name}{{run="brave"}}')
        assert shown == (None if expected is None else pytest.approx(expected, rel=1e-12)), name
    for name, (label, values) in MANY.items():
        own = {key: value for key, value in samples.items() if key.startswith(f"{name}{{") and value}
        assert {re.findall(rf'{label}="(.*?)"}}', key)[0]: v for key, v in own.items()} == values(everything), name
    head = page["head"]
    assert head["status"] == {name: status[name] for name in head["status"]}
    assert {f"{name}_s": value for name, value in head["accounts"].items()} == why["cost"]
    assert (head["ettr"], page["story"]["headline"]) == (why["ettr"], why["headline"])
    assert page["story"]["downtime_s"] == why["downtime_s"]
    first = terminal.splitlines()
    assert first[0].startswith(f"run brave-otter: {status['state']}")
    assert f"recoveries {status['num_recoveries']}" in first[1]
    if status["loss"] is not None:
        assert f"loss {status['loss']:.4g}" in first[1]
        assert f"step {status['step']}" in first[1]


def test_beside_the_plan_the_page_has_the_tables_of_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write(tmp_path / "brave", Long(steps=600, members=3000, fault_every=150, save_every=1000))
    with Journal.open_reader(run_dir) as reader:
        now_s = reader.events(reader.last_seq - 1)[0].event.at_s
    board = Board([run_dir], clock=lambda: now_s, beside_plan=_beside_plan)
    while not board.ready:
        board.turn()
    board.turn()
    plan = json.loads(ask(build_app(board, follow=False), "/api/runs/brave/picture")[2])["plan"]
    assert main(["why", str(run_dir)]) == 0
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [table["title"] for table in plan["tables"]] == [
        "Failures, predicted beside observed", "What the run believes now, and what its policies choose by it",
    ]  # fmt: skip
    for table in plan["tables"]:
        assert table["title"] in told
        assert {table["note"], *(" ".join(" ".join(row).split()) for row in table["rows"])} <= set(told)
    assert plan["since_s"] == pytest.approx(60.0 + 601.0)
    assert [plan["tables"][0]["rows"][0][place] for place in (0, 2)] == ["a replica dies", "4"]


def test_beside_the_plan_stands_nothing_where_nothing_can_be_said(tmp_path: Path, story: Any) -> None:
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many([*story.started, *story.training])
    board = Board([tmp_path / "brave"], clock=lambda: story.start_s + 9.0, beside_plan=_beside_plan)
    for _ in range(2):
        board.turn()
    page = json.loads(ask(build_app(board, follow=False), "/api/runs/brave/picture")[2])
    assert page["plan"]["tables"] == []
