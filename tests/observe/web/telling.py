"""All that is told of a run at one frozen moment, by all who tell it, and where two of them do not say the same.

The readers know nothing of each other: commands are called as from a shell, page and metrics over the application.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.observe.web.asking import ask

from outlast.cli import main
from outlast.core import events as ev
from outlast.observe import Live
from outlast.observe.rounding import counted, format_number, format_s
from outlast.observe.web import Board, build_app
from outlast.prove._printed_text import text_findings

__all__ = ["DRAWN_FIGURES", "Telling", "board_of", "differences", "told"]

DRAWN_FIGURES = (
    "return Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
    ".map((node) => [node.dataset.figure, node.querySelector('dd').textContent]))"
)
"""A browser's script: the page's figures by name, as they are drawn."""


class Telling(NamedTuple):
    """`status`, `why`: with `--json`; `status_text`, `why_text`, `watch_text`: printed; `page`: its parts; `metrics`:
    by name and labels; `events`: the journal."""

    status: dict[str, Any]
    status_text: str
    why: dict[str, Any]
    why_text: str
    watch_text: str
    page: dict[str, Any]
    metrics: dict[str, float]
    events: list[ev.AnyEvent]


def board_of(run_dir: Path, now_s: Callable[[], float]) -> Board:
    return Board([run_dir], clock=lambda _: now_s())


def told(
    run_dir: Path, events: list[ev.AnyEvent], now_s: float, held: bool, board: Board,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> Telling:  # fmt: skip
    """Ask everyone. `held`: whether somebody holds the run; `board`: what has followed it, or has not looked yet."""
    monkeypatch.setattr("outlast.journal.run_now_s", lambda _: now_s)
    said: dict[str, str] = {}
    for command in ("status", "why"):
        for option in ([], ["--json"]):
            assert main([command, str(run_dir), *option]) == 0
            said[" ".join([command, *option])] = capsys.readouterr().out
    watched = io.StringIO()
    live = Live(run_dir, stream=watched, clock=lambda: now_s)
    live.poll(held=held)
    live.close()
    board.turn()
    while not board.ready:
        board.turn()
    board.turn()
    app = build_app(board, follow=False)
    name = next(iter(board.runs))
    lines = ask(app, "/metrics")[2].decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line[:1] != "#")
    return Telling(
        status=json.loads(said["status --json"]),
        status_text=said["status"],
        why=json.loads(said["why --json"]),
        why_text=said["why"],
        watch_text=watched.getvalue(),
        page=json.loads(ask(app, f"/api/runs/{name}/picture")[2]),
        metrics={series.replace(f'run="{name}"', ""): float(value) for series, _, value in samples},
        events=events,
    )


def differences(t: Telling) -> list[str]:
    """Each number that is told by two and not the same; none is as it should be."""
    found = [f"{where}: {what}" for where, what in text_findings(t.why, t.why_text, t.status, t.status_text)]
    pairs = [*_of_page(t), *_of_metrics(t), *_of_journal(t)]
    found += [f"{name}: {one!r} and {other!r}" for name, one, other in pairs if not _same(one, other)]
    return found + [f"{name}: {words!r} is not said" for name, words, text in _words(t) if words not in text]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return one == pytest.approx(other, rel=1e-12, abs=1e-12)
    return bool(one == other)


def _of_page(t: Telling) -> Iterator[tuple[str, Any, Any]]:
    head, story, people = t.page["head"], t.page["story"], t.page["members"]
    yield from ((f"page, status: {name}", value, t.status[name]) for name, value in head["status"].items())
    yield from ((f"page, why: {name}", head[name], t.why[name]) for name in ("headline", "cost", "ettr", "clocks"))
    yield from ((f"page: {name}", head[name], t.status[name]) for name in ("coordinator", "last_save"))
    for name in ("num_recoveries", "lost_steps", "downtime_s", "microbatches_recomputed", "alarms", "advice"):
        yield f"page's story: {name}", story[name], t.why[name]
    for name in ("num_failed_saves", "certified_step", "num_audit_mismatches"):
        yield f"page's story: {name}", story[name], t.status[name]
    yield "page: members", people["counts"], dict(Counter(r["state"] for r in t.status["replicas"]))
    drawn = {m[0]: (people["codes"][m[1]], m[2]) for host in people["hosts"] for m in host["members"]}
    yield "page: each member", drawn, {r["replica"]: (r["state"], r["pid"]) for r in t.status["replicas"]}
    yield "page: a step's parts", story["anatomy"]["said"], t.why["anatomy"]["said"]
    yield from (
        (f"page: parts of {m['replica']}", m, next((w for w in t.why["anatomy"]["members"] if w == m), None))
        for m in story["anatomy"]["members"]
    )
    if t.status["last_save"] is not None:
        newest = story["generations"][0]
        yield "page: newest generation", newest["step"], t.status["last_save"]["step"]
        yield "page: its age", head["status"]["as_of_s"] - newest["at_s"], t.status["save_age_s"]


def _of_metrics(t: Telling) -> Iterator[tuple[str, Any, Any]]:
    cost = {name.removesuffix("_s"): value for name, value in t.why["cost"].items()}
    single = {
        "run_step": t.status["step"], "run_steps_wanted": t.status["until"], "loss": t.status["loss"],
        "step_duration_seconds": t.status["step_s"], "last_commit_timestamp_seconds": t.status["step_at_s"],
        "replicas_wanted": t.status["num_replicas"], "certified_step": t.status["certified_step"],
        "audit_mismatches_total": t.status["num_audit_mismatches"],
        "checkpoints_failed_total": t.status["num_failed_saves"], "wall_seconds": cost["wall"],
        "ettr_ratio": t.why["ettr"], "downtime_seconds_total": t.why["downtime_s"],
        "steps_lost_total": t.why["lost_steps"], "microbatches_recomputed_total": t.why["microbatches_recomputed"],
        "recovery_detection_seconds_count": t.status["num_recoveries"],
    }  # fmt: skip
    for name, value in single.items():
        yield f"metric {name}", t.metrics.get(f"outlast_{name}{{}}"), value
    for use, value in cost.items():
        if use != "wall":
            yield f"metric of {use}", t.metrics[f'outlast_time_seconds{{,use="{use}"}}'], value
    for clock in t.why["clocks"]:
        name = f'outlast_clock_events_total{{,clock="{clock["name"].lower()}"}}'
        yield f"metric of {clock['name']}", t.metrics[name], clock["count"]
    yield "metric of recoveries", _sum(t, "outlast_recoveries_total"), t.status["num_recoveries"]
    yield "metric of verdicts", _sum(t, "outlast_verdicts_total"), t.status["num_verdicts"]
    save = t.status["last_save"]
    if save is not None:
        yield "metric of the newest save", t.metrics["outlast_checkpoint_timestamp_seconds{}"], save["at_s"]
        yield "age of the newest save", t.status["as_of_s"] - save["at_s"], t.status["save_age_s"]
    for (part, of), value in _parts(t.why["anatomy"]["members"]).items():
        yield f"metric of {part}", t.metrics[f'outlast_step_part_seconds{{,part="{part}",of="{of}"}}'], value


def _sum(t: Telling, family: str) -> float:
    return sum(value for name, value in t.metrics.items() if name.startswith(f"{family}{{"))


def _parts(members: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for part in ("load", "compute", "exchange", "wait") if members else ():
        each = [member[f"{part}_s"] for member in members]
        found |= {(part, "mean"): sum(each) / len(each), (part, "most"): max(each)}
    return found


def _of_journal(t: Telling) -> Iterator[tuple[str, Any, Any]]:
    """What the journal itself says, counted here."""
    recoveries = [e for e in t.events if isinstance(e, ev.Recovery)]
    progress = [e for e in t.events if isinstance(e, ev.ProgressMade)]
    losses = [loss for e in progress[-20:] for _, loss in e.losses]
    yield "recoveries", len(recoveries), t.status["num_recoveries"]
    rows = [row for row in t.why["timeline"] if row["kind"] == "recovery"]
    named = ("downtime_s", "detect_s", "microbatches_recomputed")
    yield (
        "each recovery",
        [[getattr(e, name) for name in named] for e in sorted(recoveries, key=lambda e: e.at_s)],
        [[row[name] for name in named] for row in rows],
    )
    yield "loss", losses[-1] if losses else None, t.status["loss"]
    yield "saves", sum(isinstance(e, ev.CheckpointSaved) for e in t.events), t.page["head"]["num_saves"]
    yield "audits", sum(isinstance(e, ev.AuditMismatch) for e in t.events), t.status["num_audit_mismatches"]
    views = [e for e in t.events if isinstance(e, ev.ViewFormed)]
    if views and t.status["state"] != "forming":
        yield "view", [views[-1].epoch, views[-1].n], t.status["view"]
    suspects = ev.VerdictReached | ev.AuditMismatch | ev.ReducerAccused | ev.Suspected
    told = [e.at_s for e in t.events if isinstance(e, suspects)]
    yield "suspects", [row["at_s"] for row in t.page["story"]["suspects"]], told[-50:][::-1]
    parts = [value for name, value in t.why["cost"].items() if name != "wall_s"]
    yield "the identity", sum(parts), t.why["cost"]["wall_s"]


def _words(t: Telling) -> Iterator[tuple[str, str, str]]:
    """(what, as it is rounded for people, where it must stand)."""
    s, facts = t.status, t.status_text.partition("\n\n")[0]
    last = t.watch_text.rstrip().rpartition("\n")[2]
    yield "status: recoveries", f"recoveries {s['num_recoveries']}", facts
    if s["loss"] is not None:
        yield "status: loss", f"loss {format_number(s['loss'])}", facts
        yield "watch: loss", f"loss {format_number(s['loss'])}", last
    if s["save_age_s"] is not None:
        yield "status: age of the save", f", {format_s(s['save_age_s'])} ", facts
        yield "watch: save", f"step {s['last_save']['step']} saved", last
    if s["step"] is not None:
        yield "watch: step", f"step {s['step']}", last
    if s["num_recoveries"] and s["step"] is not None:
        yield "watch: recoveries", counted(s["num_recoveries"], "recovery", "recoveries"), last
    if s["state"] == "training" and s["step_s"]:
        yield "watch: a step", f"{format_s(s['step_s'])} a step", last
        training = sum(r["state"] == "training" for r in s["replicas"])
        yield "watch: members", f"{training} of {s['num_replicas']} replicas training", last
    table = " ".join(re.sub(r" +", " ", t.why_text).split())
    for clock in t.why["clocks"]:
        mean = "-" if clock["mean_s"] is None else format_s(clock["mean_s"])
        yield f"why: {clock['name']}", f"{clock['name']} {clock['count']:,} {mean} {format_s(clock['low_s'])} to", table
    yield "why: headline", t.why["headline"].partition("\n")[0], t.why_text
