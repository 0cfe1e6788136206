"""The page of a journal of many steps and members: it opens, and its figures are the journal's.

CI has an eighth of what is written in the soak: a million steps of ten thousand members.
How soon it opens and how evenly it scrolls is measured by `python -m benchmarks opening`, not here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from benchmarks._browser import Browser
from benchmarks._long_run import Long, write

from outlast.observe import format_s

RUNS = [
    pytest.param(Long(steps=125_000, members=2_000, fault_every=500), id="an eighth"),
    pytest.param(Long(), id="whole", marks=pytest.mark.soak),
]
PATIENCE_S = 400.0
pytestmark = [
    pytest.mark.process,
    pytest.mark.campaign,
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> Long:
    found: Long = request.param
    return found


def num_faults(run: Long) -> int:
    return run.steps // run.fault_every


@pytest.fixture(scope="module")
def url(run: Long) -> Iterator[str]:
    """In memory where there is room: half a gigabyte that is made durable would hold up every run beside this test."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30
    with tempfile.TemporaryDirectory(dir=memory if roomy else None) as folder:
        run_dir = write(Path(folder) / "long", run)
        command = [sys.executable, "-m", "outlast", "serve", str(run_dir), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[1]
        finally:
            server.terminate()
            server.wait(60)


def test_a_long_run_of_many_members_is_shown_and_browsed(browser: Browser, url: str, run: Long) -> None:
    faults = num_faults(run)
    browser.command("Page.navigate", {"url": "about:blank"})
    for kind in ("browser", "performance"):
        browser.log(kind)  # of the page before this one, whose server is gone
    browser.open(url, 1400, "light", PATIENCE_S)  # long before its history is read
    figures = shown(browser)
    assert figures["step"] == f"{run.steps:,} of {run.steps:,}"
    assert (figures["faults outlasted"], figures["saves"]) == (str(faults), f"{run.steps // run.save_every:,}")
    assert figures["downtime"] == format_s(faults * 0.2)
    browser.until(lambda: not browser.script("return document.querySelectorAll('.banner').length"), PATIENCE_S)
    wall_s = run.steps * 1.0 + 61.0
    productive_s = run.steps * 0.97 - (faults - 1) * 0.2  # the last fault came after the last step
    figures = shown(browser)
    assert figures["wall time"] == format_s(wall_s)
    assert figures["useful time"] == f"{productive_s / wall_s:.1%}"
    plan = "return document.querySelector('[aria-label=\"Beside the plan\"]').innerText"
    browser.until(lambda: "a replica dies" in browser.script(plan), PATIENCE_S)
    assert re.search(rf"a replica dies\s[^\n]*\b{faults}\b", browser.script(plan))
    everybody(browser, run)
    rows_are_browsed(browser, run)
    assert browser.script("return document.documentElement.scrollWidth") <= 1400
    assert [entry["message"] for entry in browser.log("browser")] == []
    asked = [address for address in browser.asked() if not address.startswith(("chrome", "data:", "about:"))]
    assert asked
    assert [address for address in asked if not address.startswith(f"{url}/")] == []


def shown(browser: Browser) -> dict[str, str]:
    found: dict[str, str] = browser.script(
        "return Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
        ".map((node) => [node.dataset.figure, node.querySelector('dd').textContent]))"
    )
    return found


def everybody(browser: Browser, run: Long) -> None:
    """Every member is drawn and can be reached by keyboard; of the hosts as many as fit, and the number of the rest."""
    members = "[aria-label=Members]"
    assert f"ended {run.members:,}" in browser.script(f"return document.querySelector('{members}').innerText")
    said = browser.script(
        f"const grid = document.querySelector('{members} canvas'); grid.focus();"
        "const key = (name) => grid.dispatchEvent(new KeyboardEvent('keydown', {key: name}));"
        "key('ArrowRight'); key('ArrowLeft');"
        f"return document.querySelector('{members} [role=status]').textContent"
    )
    assert said.startswith(f"r{run.members - 1}."), "the one before the first is the last"
    hosts = "[aria-label=Hosts]"
    assert browser.script(f"return document.querySelectorAll('{hosts} tbody tr').length") == 200
    assert f"{run.members // 8 - 200:,} more" in browser.script(f"return document.querySelector('{hosts}').innerText")


def rows_are_browsed(browser: Browser, run: Long) -> None:
    """Kinds of rows, older ones, a link to a moment."""
    told = 2 * num_faults(run)  # each death, and its recovery
    number = "return document.querySelector('button[data-show=failure]').closest('.card').innerText"
    click = "document.querySelector('button[data-show={}]').click()"
    browser.script(click.format("failure"))
    browser.until(lambda: f" of {told:,}" in browser.script(number))
    browser.script("[...document.querySelectorAll('button')].find((node) => node.textContent === 'older').click()")
    browser.until(lambda: f"{told - 199:,} to {told - 100:,} of" in browser.script(number))
    moment = 60.0 + run.fault_every * 7 + 0.2
    browser.script(f"location.hash = 'show=story&t={moment}'")
    row = "return document.querySelector('tr.here')?.textContent ?? ''"
    browser.until(lambda: f"recovered in step {run.fault_every * 7 - 1}" in browser.script(row))
