"""The page in a real browser: no error, no other host, nothing wider than a phone, the terminal's own figures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from benchmarks._browser import Browser

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe import format_s, why
from outlast.observe.web import Board, Serving, Wishes, listen

pytestmark = pytest.mark.process


FIGURES = (
    "[...document.querySelectorAll('main > *')].map((run) => Object.fromEntries("
    "[...run.querySelectorAll('[data-figure]')].map((n) => [n.dataset.figure, n.querySelector('dd').textContent])))"
    ".filter((figures) => 'useful time' in figures)"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, story: Any) -> Iterator[str]:
    run_dir, calm_dir = (tmp_path_factory.mktemp("runs") / name for name in ("brave", "calm"))
    with Journal.create(run_dir) as journal:
        journal.append_many(story.whole)
    with Journal.create(calm_dir) as journal:
        journal.append_many([*story.started, *story.training, *story.finished])
    serving = Serving(Board([run_dir, calm_dir]), listen(0))
    thread = threading.Thread(target=serving.run, daemon=True)
    thread.start()
    yield serving.url
    serving.stop()
    thread.join(10)


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (820, "light"), (1400, "dark")])
def test_it_fits_and_complains_of_nothing_and_asks_no_other_host(
    browser: Browser, url: str, width: int, theme: str
) -> None:
    browser.open(url, width, theme)
    assert browser.script("return document.documentElement.scrollWidth") <= width
    parts = "document.querySelector('[aria-label=\"a step by member\"]')"
    aside = f"return {parts}.scrollWidth - {parts}.clientWidth"
    assert browser.script(aside) == 0, "it is read without moving it sideways"
    assert "null" not in browser.script("return document.body.innerText")
    assert [entry["message"] for entry in browser.log("browser")] == []
    asked = browser.asked()
    assert asked
    foreign = [address for address in asked if not address.startswith((f"{url}/", "chrome", "data:", "about:"))]
    assert foreign == []  # chrome: the browser's own start page, out of itself


CONTRAST = """
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const colour = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (node) => { for (; node; node = node.parentElement) { const c = colour(getComputedStyle(node).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const poor = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.getClientRects().length) continue;
    const [a, b] = [light(colour(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${walk.currentNode.data.trim()}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return poor;
"""  # noqa: E501
NAMED = {"button", "link", "image", "region", "canvas", "status", "navigation", "group", "heading"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_it_and_reach_it(browser: Browser, url: str, theme: str) -> None:
    """Text stands out from its ground (WCAG 2.2, AA), and what can be reached or is announced has a name."""
    browser.open(url, 1400, theme)
    assert browser.script(CONTRAST) == []
    tree = browser.command("Accessibility.getFullAXTree", {})["nodes"]
    found = [(node["role"]["value"].lower(), node.get("name", {}).get("value", "")) for node in tree if "role" in node]
    assert {"button", "link", "region", "heading", "main", "table", "columnheader"} <= {role for role, _ in found}
    assert [role for role, name in found if role in NAMED - {"status"} and not name.strip()] == []
    levels = browser.script(
        "return [...document.querySelectorAll('h1, h2, h3')].map((node) => Number(node.tagName[1]))"
    )
    assert levels[0] == 1
    assert max(levels) == 2
    lost = browser.script(
        "return [...document.querySelectorAll('a[href], button:not(:disabled), [tabindex]')]"
        ".filter((node) => node.offsetParent && (node.focus({preventScroll: true}), document.activeElement !== node))"
        ".map((node) => node.outerHTML.slice(0, 80))"
    )
    assert lost == [], "all that can be used can be reached by keyboard"


def test_its_figures_are_the_terminal_s(browser: Browser, url: str, story: Any) -> None:
    browser.open(url, 1400, "light")
    told = why(story.whole)
    figures = browser.script(
        "return Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
        ".map((node) => [node.dataset.figure, node.querySelector('dd').textContent]))"
    )
    assert figures["useful time"] == f"{told.ettr:.1%}"
    assert figures["wall time"] == format_s(told.cost.wall_s)
    assert figures["downtime"] == format_s(told.downtime_s)
    assert figures["faults outlasted"] == str(told.num_recoveries)
    rows = browser.script("return [...document.querySelectorAll('table.rows td.what')].map((n) => n.textContent)")
    assert rows == [row.what for row in told.timeline]
    cells = browser.script(
        "return [...document.querySelectorAll('[aria-label=\"a step by member\"] tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    assert cells == [
        [
            m.replica,
            f"{m.steps:,}",
            f"{m.microbatches:g}",
            *map(format_s, (m.load_s, m.compute_s, m.exchange_s, m.wait_s)),
            m.waits_for,
        ]
        for m in told.anatomy.members
    ]


@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (1000, "light"), (1400, "dark")])
def test_two_runs_stand_side_by_side_or_one_below_the_other(
    browser: Browser, url: str, story: Any, width: int, theme: str
) -> None:
    browser.open(f"{url}/?both#runs=brave,calm", width, theme)
    browser.until(lambda: len(browser.script(f"return {FIGURES}")) == 2)
    both = browser.script(f"return {FIGURES}")
    told = [why(events) for events in (story.whole, [*story.started, *story.training, *story.finished])]
    assert [row["faults outlasted"] for row in both] == [str(one.num_recoveries) for one in told]
    assert [row["useful time"] for row in both] == [f"{one.ettr:.1%}" for one in told]
    tops = browser.script("return [...document.querySelectorAll('main > *')].map((n) => n.getBoundingClientRect().top)")
    assert (tops[0] == tops[1]) == (width > 800)
    hidden = browser.script(
        "return [...document.querySelectorAll('table.rows td.what')].filter((cell) => "
        "cell.getBoundingClientRect().right > cell.closest('.scroll').getBoundingClientRect().right + 1).length"
    )
    assert hidden == 0, "what happened can be read without moving the list sideways"
    assert browser.script("return document.documentElement.scrollWidth") <= width
    assert [entry["message"] for entry in browser.log("browser")] == []


def test_pages_that_were_left_hold_no_connection(browser: Browser, url: str) -> None:
    """A browser has six to a server: each page of two runs takes two, and what was left or is hidden none."""
    for number in range(5):
        browser.open(f"{url}/?left{number}#runs=brave,calm", 820, "light")
        browser.until(lambda: len(browser.script(f"return {FIGURES}")) == 2)


def test_a_link_to_a_moment_marks_its_row(browser: Browser, url: str) -> None:
    browser.open(url, 1400, "light")
    browser.open(f"{url}/?again#t=5.05", 1400, "light")
    assert "r2.0: signal" in browser.script("return document.querySelector('tr.here').textContent")


def test_who_reads_on_is_left_where_they_are(browser: Browser, tmp_path: Path, story: Any) -> None:
    """What happens meanwhile is counted, and shown at once only to who stands at the end of the list."""
    listed = "const list = document.querySelector('[aria-label=timeline]'); "
    told = "return document.querySelector('[aria-label=\"What happened\"]').innerText"
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many([*story.started, *story.training, *story.killed] * 4)
        assert journal.flush()
        serving = Serving(Board([tmp_path / "brave"]), listen(0))
        thread = threading.Thread(target=serving.run, daemon=True)
        thread.start()
        try:
            browser.open(f"{serving.url}/#show=all", 1400, "light")
            count = browser.script("return document.querySelectorAll('table.rows tbody tr').length")
            at_end = "return list.scrollHeight - list.clientHeight - list.scrollTop"
            assert browser.script(listed + "return list.scrollHeight") > 500
            assert browser.script(listed + at_end) < 8
            for top, at_s in ((None, 1.0), (100, 2.0)):
                if top is not None:
                    browser.script(listed + f"list.scrollTop = {top}")
                journal.append(ev.CoordinatorStarted(at_s=story.start_s + 30 + at_s, epoch=9, pid=7, takeover=True))
                assert journal.flush()
                count += 1
                browser.until(lambda count=count: f" of {count}" in browser.script(told))
                stays = browser.script(listed + ("return list.scrollTop" if top is not None else at_end))
                assert stays == top if top is not None else stays < 8
        finally:
            serving.stop()
            thread.join(10)


def test_its_buttons_ask_with_the_key_that_was_typed(browser: Browser, url: str, tmp_path: Path, story: Any) -> None:
    over = next(i for i, event in enumerate(story.whole) if isinstance(event, ev.RunFinished))
    journal = Journal.create(tmp_path / "brave")
    journal.append_many(story.whole[:over])
    assert journal.flush()
    asked: list[tuple[str, str, str]] = []

    def ask(run: Path, wish: str, what: str) -> str:
        asked.append((run.name, wish, what))
        return "it was asked"

    wishes = Wishes({"save": "", "stop": "", "drain": "host"}, ask, "KEY")
    serving = Serving(Board([tmp_path / "brave"]), listen(0), wishes=wishes)
    thread = threading.Thread(target=serving.run, daemon=True)
    thread.start()
    try:
        browser.open(serving.url, 820, "light")
        click = "[...document.querySelectorAll('[aria-label=\"Ask the run\"] button')].at(arguments[0]).click()"
        said = "return document.querySelector('[aria-label=\"Ask the run\"] [role=status]').textContent"
        typed = "window.confirm = () => true; window.prompt = () => '{}'; {}"
        browser.script(typed.format("wrong", click.replace("arguments[0]", "0")))
        browser.until(lambda: "this is not the key" in browser.script(said))
        assert asked == []
        browser.script(typed.format("KEY", click.replace("arguments[0]", "1")))
        browser.until(lambda: browser.script(said) == "outlast: it was asked")
        assert asked == [("brave", "stop", "")]
        browser.script("window.confirm = () => false; " + click.replace("arguments[0]", "0"))
        assert asked == [("brave", "stop", "")]
        browser.script(
            "window.confirm = () => true; window.prompt = () => ' h2 '; " + click.replace("arguments[0]", "2")
        )
        browser.until(lambda: asked[-1:] == [("brave", "drain", "h2")])
        browser.script("window.prompt = () => ''; " + click.replace("arguments[0]", "2"))
        assert len(asked) == 2, "nothing named, nothing asked"
        hidden = "return document.querySelector('[aria-label=\"Ask the run\"]').hidden"
        assert not browser.script(hidden)
        journal.append_many(story.whole[over:])
        assert journal.flush()
        browser.until(lambda: browser.script(hidden))
        browser.log("browser")  # the refusal is told there, as it should be
    finally:
        serving.stop()
        thread.join(10)
        journal.close()
    browser.open(url, 820, "light")
    assert browser.script("return document.querySelectorAll('[aria-label=\"Ask the run\"]').length") == 0
