"""A page that follows a run in a real browser draws what it would of the whole; any two runs stand side by side."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from benchmarks._browser import Browser

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe.web import Board, Serving, listen

pytestmark = pytest.mark.process

DRAWN_ANEW = """
  const { curve, stack } = await import(new URL("page/draw.js", location.href));
  const { curves } = await (await fetch("api/runs/brave/picture")).json();
  return ["Loss", "Steps a second, and use of time"].every((label, index) => {
    const there = document.querySelector(`[aria-label="${label}"] canvas`), copy = there.cloneNode();
    there.after(copy);
    const said = index ? stack(copy, curves.times) : curve(copy, curves.losses);
    const same = copy.toDataURL() === there.toDataURL() && said === there.parentElement.querySelector("p").textContent;
    copy.remove();
    return same;
  });
"""
"""Whether the page's curves, with what is said below them, are those that its own code draws of the whole now."""
LINKS = "return [...document.querySelectorAll('#which a')].map((link) => [link.textContent, link.ariaLabel])"
OPEN = "return [...document.querySelectorAll('main > .run')].map((run) => run.ariaLabel)"


@contextlib.contextmanager
def served(board: Board) -> Iterator[str]:
    serving = Serving(board, listen(0))
    thread = threading.Thread(target=serving.run, daemon=True)
    thread.start()
    try:
        yield serving.url
    finally:
        serving.stop()
        thread.join(10)


def progress(start_s: float, second: float, first: int, losses: list[float]) -> ev.ProgressMade:
    at_s = start_s + 10.0 + second
    end = first + len(losses)
    return ev.ProgressMade(
        at_s=at_s, view=[1, 3], stable=end, losses=list(enumerate(losses, first)), step_s=0.1, first=first,
        committed=end, committed_at_s=at_s, seconds={"productive": 0.7, "idle": 0.2},
    )  # fmt: skip


def told_first_rows(browser: Browser) -> list[tuple[int, int]]:
    """Of each `curves` that came: the first of its rows of losses, and of times."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    came = [m["params"] for m in messages if m["method"] == "Network.eventSourceMessageReceived"]
    curves = [json.loads(event["data"]) for event in came if event["eventName"] == "curves"]
    return [(said["losses"]["first"], said["times"]["first"]) for said in curves]


def test_curves_that_came_bit_by_bit_are_drawn_as_the_whole_is(browser: Browser, tmp_path: Path, story: Any) -> None:
    """Also where steps are done again, and where neighbours are merged to one point."""
    now_s = itertools.count(int(story.start_s) + 20)  # later at each look, so that each tells what is new
    pieces = [
        [2.0, 1.5, 1.2], [1.1], [1.15], [1.0, 0.9], [0.5] * 40, [0.01] * 600, [0.02] * 600, [0.02, 9.0], [0.1],
    ]  # fmt: skip
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many([*story.started, *story.training, *story.killed])
        assert journal.flush()
        with served(Board([tmp_path / "brave"], clock=lambda _: float(next(now_s)))) as url:
            browser.open(url, 1400, "light")
            firsts = told_first_rows(browser)
            step, second = 61, 0.0
            for number, losses in enumerate(pieces, 1):
                step -= 2 if number == 4 else 0
                second += 700.0 if number == 8 else 1.3
                journal.append(progress(story.start_s, second, step, losses))
                assert journal.flush()
                step += len(losses)
                browser.until(lambda number=number: len(grown(firsts, browser)) > number)
                browser.until(lambda: browser.script(DRAWN_ANEW))
            browser.open("about:blank", 1400, "light", shown="return true")
        browser.log("browser")
    assert len(firsts) == 1 + len(pieces)
    whole = [[number for number, first in enumerate(each) if not first] for each in zip(*firsts, strict=True)]
    assert whole == [[0, 7], [0, 8]], "when the page was opened, and where neighbours were merged; else the end alone"


def grown(firsts: list[tuple[int, int]], browser: Browser) -> list[tuple[int, int]]:
    firsts += told_first_rows(browser)
    return firsts


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, story: Any) -> Iterator[str]:
    runs = tmp_path_factory.mktemp("runs")
    for name in ("brave", "calm", "dull"):
        with Journal.create(runs / name) as journal:
            journal.append_many([*story.started, *story.training, *story.finished])
    with served(Board([runs / name for name in ("brave", "calm", "dull")])) as url:
        yield url


@pytest.mark.parametrize("width", [390, 1400])
def test_any_two_of_three_runs_are_chosen_by_keyboard(browser: Browser, three: str, width: int) -> None:
    browser.open(f"{three}/?{width}", width, "dark")
    both = [["calm", "brave beside calm"], ["dull", "brave beside dull"]]
    assert browser.script(LINKS) == [["brave", None], ["calm", None], ["dull", None], *both]
    press(browser, 1)
    browser.until(lambda: browser.script(OPEN) == ["run calm"])
    assert browser.script(LINKS)[3:] == [["brave", "calm beside brave"], ["dull", "calm beside dull"]]
    press(browser, 4)
    browser.until(lambda: browser.script(OPEN) == ["run calm", "run dull"])
    current = "[...document.querySelectorAll('#which a[aria-current=page]')]"
    assert browser.script(f"return {current}.map((link) => link.ariaLabel)") == ["calm beside dull"]
    assert browser.script(f"return document.activeElement === {current}[0]"), "one goes on from here"
    press(browser, 3)
    browser.until(lambda: browser.script(OPEN) == ["run calm", "run brave"])
    assert browser.script("return document.documentElement.scrollWidth") <= width
    assert [entry["message"] for entry in browser.log("browser")] == []


def press(browser: Browser, number: int) -> None:
    """Enter, as it is pressed on a keyboard, on a link of those above."""
    browser.script(f"document.querySelectorAll('#which a')[{number}].focus()")
    for kind in ("keyDown", "keyUp"):
        key = {"type": kind, "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        browser.command("Input.dispatchKeyEvent", key)
