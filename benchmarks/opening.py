"""How soon the page of a long run is there, and how evenly it scrolls: a million steps of ten thousand members.

From the command `outlast serve` to the page with its figures, rows and every member drawn, in Debian's Chromium; first
as the first reader of the journal, then with the history that an earlier reader has kept. While the page is scrolled up
and down, and its rows are paged through, the longest time between two frames is taken.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks._browser import CHROMIUM, DRIVER, Browser, browsing
from benchmarks._common import Bounds, Table, alone, environment, options, publish, spread
from benchmarks._long_run import Long, keep_history, write

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Opened", "look", "main"]

_OPEN_S, _FRAME_S = 2.0, 1.0
_WIDTH = 1400
_WATCH = """
  window.shownAt = {};
  const look = () => {
    const there = {
      figures: document.querySelectorAll('[data-figure]').length > 0,
      rows: document.querySelectorAll('table.rows tbody tr').length > 0,
      members: [...document.querySelectorAll('canvas')].some((c) => c.getAttribute('aria-label')?.startsWith('Members')
        && c.height > 100),
    };
    for (const name in there) if (there[name] && !shownAt[name]) shownAt[name] = performance.now();
    if (Object.keys(shownAt).length < 3) requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
"""
_FRAMES = """
  window.frames_ = [];
  const tick = (now) => { frames_.push(now); if (frames_.length < 1e6) requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
"""
_GAPS = """
  const gaps = frames_.slice(1).map((at, index) => at - frames_[index]);
  return {longest: Math.max(...gaps), number: gaps.length, seconds: (frames_.at(-1) - frames_[0]) / 1000};
"""
_OLDER = "[...document.querySelectorAll('button')].find((node) => node.textContent === 'older').click()"


class Opened(NamedTuple):
    """Seconds from the command to the page, those of them in the browser, the longest frame of a scroll, its frames."""

    whole_s: float
    page_s: float
    frame_s: float
    frames: int


def look(browser: Browser, run_dir: Path) -> Opened:
    """Serve `run_dir` with a process of its own, open its page, scroll it."""
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "outlast", "serve", str(run_dir), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[1]
        told_s = time.monotonic() - begin_s
        added = browser.command("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
        begin_s = time.monotonic()
        browser.open(url, _WIDTH, "light", 120.0)
        browser.until(lambda: len(browser.script("return window.shownAt")) == 3, 120.0)
        lead_s = time.monotonic() - begin_s  # at most what it took; the page's own clock began within
        browser.command("Page.removeScriptToEvaluateOnNewDocument", {"identifier": added["identifier"]})
        page_s = min(lead_s, max(browser.script("return window.shownAt").values()) / 1000)
        gaps = _scroll(browser)
    finally:
        server.terminate()
        server.wait(30)
    return Opened(told_s + page_s, page_s, gaps["longest"] / 1000, gaps["number"])


def _scroll(browser: Browser) -> Any:
    browser.script(_FRAMES)
    for turn in range(3):
        for way in (-1, 1):
            gesture = {"x": 700, "y": 450, "yDistance": way * 4000, "speed": 4000, "gestureSourceType": "mouse"}
            browser.command("Input.synthesizeScrollGesture", gesture)
        if turn:
            browser.script(_OLDER)
    return browser.script(_GAPS)


def main(argv: Sequence[str] | None = None) -> int:
    made = options(__doc__)
    made.add_argument("--steps", type=int, default=Long().steps)
    made.add_argument("--members", type=int, default=Long().members)
    made.add_argument("--samples", type=int, default=5, help="times that each kind is opened")
    args = made.parse_args(argv)
    if not (CHROMIUM and DRIVER):
        print("opening: no browser here: make browser-env", file=sys.stderr)
        return 2
    machine, bounds, rows, data = environment(args, ("starlette", "uvicorn")), Bounds(), [], []
    with alone(args.lock), tempfile.TemporaryDirectory() as folder:
        run_dir = write(Path(folder) / "long", Long(steps=args.steps, members=args.members))
        with browsing(Path(folder) / "profile") as browser:
            for kind in ("first reader", "history kept"):
                found = []
                for _ in range(args.samples):
                    if kind == "first reader":
                        (run_dir / "history.kept").unlink(missing_ok=True)
                    found.append(look(browser, run_dir))
                rows.append(_row(kind, found))
                data.append({"kind": kind, "opened": [each._asdict() for each in found]})
                whole = spread(each.whole_s for each in found).median
                bounds.check(f"{kind}: command to page", whole, _OPEN_S)
                bounds.check(f"{kind}: longest frame of a scroll", max(each.frame_s for each in found), _FRAME_S)
                if kind == "first reader":
                    keep_history(run_dir)
    table = Table(
        title=f"{args.steps:,} steps of {args.members:,} members, window of {_WIDTH} pixels", rows=rows,
        columns=["journal", "command to page s", "of it in the browser s", "longest frame s", "frames of a scroll"],
    )  # fmt: skip
    return publish("opening", args, machine, [table], bounds, data)


def _row(kind: str, found: Sequence[Opened]) -> list[str]:
    return [
        kind, spread(each.whole_s for each in found).show(), spread(each.page_s for each in found).show(),
        spread(each.frame_s for each in found).show(), str(min(each.frames for each in found)),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
