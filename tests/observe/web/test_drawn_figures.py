"""What a browser draws of a run at a frozen moment is, word for word, what status and why print of it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from benchmarks._browser import Browser
from tests.observe.web.telling import DRAWN_FIGURES, Telling, board_of, differences, told
from tests.observe.web.test_same_figures import saves

from outlast.journal import Journal
from outlast.observe.rounding import format_number, format_s, format_share, size
from outlast.observe.web import Serving, listen

pytestmark = pytest.mark.process
ROWS = (
    "return [...document.querySelectorAll('[aria-label=\"{}\"] tbody tr')]"
    ".map((row) => [...row.children].map((cell) => cell.textContent))"
)
SAID = "return [...document.querySelectorAll('[aria-label=\"{}\"] li')].map((node) => node.textContent)"


@pytest.mark.parametrize("over", [False, True])
def test_a_browser_draws_what_the_terminal_prints(
    over: bool, browser: Browser, story: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    events = [*story.started, *story.training, *story.killed, *saves(story), *story.coordinator_lost]
    events += story.finished if over else []
    now_s = max(event.at_s for event in events) + 0.4125
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal.create(tmp_path / "brave"))
        journal.append_many(events)
        assert journal.flush()
        if over:
            journal.close()
        board = board_of(tmp_path / "brave", lambda: now_s)
        seen = told(tmp_path / "brave", events, now_s, not over, board, capsys, monkeypatch)
        assert differences(seen) == []
        serving = Serving(board_of(tmp_path / "brave", lambda: now_s), listen(0))
        thread = threading.Thread(target=serving.run, daemon=True)
        thread.start()
        try:
            browser.open(f"{serving.url}/?{over}", 1400, "light")
            drawn(browser, seen)
        finally:
            serving.stop()
            thread.join(10)


def drawn(browser: Browser, seen: Telling) -> None:
    s, w, head = seen.status, seen.why, seen.page["head"]
    useful = w["useful_time"]
    failed = f", {s['num_failed_saves']:,} failed" if s["num_failed_saves"] else ""
    assert browser.script(DRAWN_FIGURES) == {
        "step": f"{s['step']:,}" + (f" of {s['until']:,}" if s["until"] else ""),
        "newest commit": "–" if s["step_age_s"] is None else f"{format_s(s['step_age_s'])} ago",
        "a step": format_s(s["step_s"]) if s["step_s"] else "–",
        "loss": format_number(s["loss"]),
        "useful time": format_share(w["ettr"]),
        **(
            {"useful time, 95 %": f"{format_share(useful['seen_low'])} to {format_share(useful['seen_high'])}"}
            if useful["seen_low"] is not None
            else {}
        ),
        "faults outlasted": str(s["num_recoveries"]),
        "downtime": format_s(w["downtime_s"]),
        "saves": f"{head['num_saves']:,}{failed}",
        "wall time": format_s(w["cost"]["wall_s"]),
    }
    text = browser.script("return document.body.innerText")
    assert w["headline"] in text
    cost = {name.removesuffix("_s"): value for name, value in w["cost"].items() if name != "wall_s"}
    wall_s = w["cost"]["wall_s"]
    rows = browser.script(ROWS.format("Where the time went"))
    assert {row[0]: row[1:] for row in rows} == {
        use: [format_s(value), format_share(value / wall_s)] for use, value in cost.items()
    }
    for use, value in cost.items():
        assert f"{use} {format_s(value)} {format_share(value / wall_s)}" in " ".join(seen.why_text.split())
    assert browser.script(ROWS.format("clocks")) == [
        [
            f"{c['name']} {c['meaning']}", f"{c['count']:,}", "–" if c["mean_s"] is None else format_s(c["mean_s"]),
            f"{format_s(c['low_s'])} to {'no bound' if c['high_s'] is None else format_s(c['high_s'])}",
        ]
        for c in w["clocks"]
    ]  # fmt: skip
    saved = s["last_save"]
    assert browser.script(ROWS.format("checkpoints"))[0][:5] == [
        f"{saved['step']:,}", format_s(s["save_age_s"]), format_s(saved["durable_s"]), format_s(saved["blocked_s"]),
        size(saved["written_bytes"]),
    ]  # fmt: skip
    assert f"Newest certified state: step {s['certified_step']}." in text
    members = browser.script("return document.querySelector('[aria-label=Members]').innerText")
    for state, count in seen.page["members"]["counts"].items():
        assert f"{state} {count}" in members
    suspects = browser.script(SAID.format("Audits and suspects"))
    assert suspects == [f"+{row['since_s']:.3f} s {row['what']}" for row in seen.page["story"]["suspects"]]
    rows = browser.script(ROWS.format("timeline"))
    recoveries = [row for row in w["timeline"] if row["downtime_s"] is not None]
    assert [row[2:5] for row in rows if row[4]] == [
        [format_s(row["detect_s"]), str(row["microbatches_recomputed"]), format_s(row["downtime_s"])]
        for row in recoveries
    ]
