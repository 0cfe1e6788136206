"""Every view of the page under axe-core in a real browser: light and dark, on a phone, a tablet and a desk.

The dialogs that ask for a key, for a name and whether one is sure are the browser's own (`prompt`, `confirm`): no
script looks into them, so what the page says once they were answered is what is looked at.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from benchmarks._browser import Browser
from benchmarks._long_run import Long, write
from tests.observe.web.test_same_figures import saves

from outlast.cli._serve import _beside_plan
from outlast.journal import Journal
from outlast.observe.web import Board, Serving, Wishes, listen

PACKAGE = importlib.util.find_spec("axe_playwright_python")
"""What carries axe-core. It is found and not imported: importing it asks for Playwright."""
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PACKAGE is None, reason="no axe-core: `make env` installs it"),
]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RUN_AXE = (
    f"return axe.run(document, {{runOnly: {{type: 'tag', values: {RULES}}}, resultTypes: ['violations']}}).then("
    "(found) => ({rules: found.passes.length, violations: found.violations.flatMap((rule) => rule.nodes.map((node) => "
    "`${rule.id}: ${node.target.join(' ')}: ${node.failureSummary}`))}))"
)
CARD = "document.querySelectorAll('[aria-label=\"{}\"] {}').length"


class View(NamedTuple):
    """Where it is: the fragment of the page's address; a script's expression that is true once it is there; what is
    done in it before axe-core looks, and an expression that is true once that has come to something."""

    place: str
    there: str
    done: str = ""
    then: str = "true"


ASK = (
    "window.confirm = () => true; window.prompt = () => 'wrong'; "
    "document.querySelector('[aria-label=\"Ask the run\"] button').click()"
)
VIEWS = {
    "a live run": View(
        "runs=brave",
        CARD.format("Ask the run", "button:enabled"),
        ASK,
        "document.body.innerText.includes('not the key')",
    ),
    "a moment of it": View("runs=brave&show=all&t=5.05", "document.querySelectorAll('tr.here').length"),
    "a journal alone": View("runs=calm", CARD.format("a step by member", "tbody tr")),
    "two runs side by side": View("runs=long,brave", CARD.format("Beside the plan", "tbody tr")),
    "no journal yet": View("runs=none", "document.body.innerText.includes('No journal')"),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, story: Any) -> Iterator[str]:
    runs = tmp_path_factory.mktemp("runs")
    live = [*story.started, *story.training, *story.killed, *saves(story), *story.coordinator_lost]
    with Journal.create(runs / "calm") as journal:
        journal.append_many([*story.started, *story.training, *story.finished])
    write(runs / "long", Long(steps=200, members=9, fault_every=80, save_every=100, word_every=150))
    with Journal.create(runs / "brave") as journal:
        journal.append_many(live)
        assert journal.flush()
        board = Board(
            [runs / name for name in ("brave", "calm", "long", "none")],
            clock=lambda _: live[-1].at_s + 0.2, beside_plan=_beside_plan,
        )  # fmt: skip
        wishes = Wishes({"save": "", "stop": "", "drain": "host"}, lambda *_: "it was asked", "KEY")
        serving = Serving(board, listen(0), wishes=wishes)
        thread = threading.Thread(target=serving.run, daemon=True)
        thread.start()
        yield serving.url
        serving.stop()
        thread.join(10)


@pytest.fixture(scope="module")
def axe() -> str:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    return Path(PACKAGE.origin).with_name("axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_core_finds_nothing_against_any_view(browser: Browser, url: str, axe: str, view: str, theme: str) -> None:
    place, there, done, then = VIEWS[view]
    for width in (390, 820, 1400):
        browser.open(f"{url}/?{theme}{width}#{place}", width, theme, shown=f"return {there} > 0")
        browser.script(done)
        browser.until(lambda: browser.script(f"return {then}"))
        browser.script(axe)
        found = browser.script(RUN_AXE)
        assert found["violations"] == [], f"{view}, {theme}, {width} pixels wide"
        assert found["rules"] > 30, "axe-core looked at a page that has something in it"
