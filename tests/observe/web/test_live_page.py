"""The page of `outlast demo --serve` in a real browser: opened at its beginning, it follows every fault to the end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from benchmarks._browser import CHROMIUM, DRIVER, browsing
from tests.observe.web.telling import DRAWN_FIGURES

from outlast.observe import format_s

PATIENCE_S = 400.0
pytestmark = [
    pytest.mark.process,
    pytest.mark.campaign,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no browser: Debian's chromium and chromium-driver are not installed"
    ),
]


def test_a_demonstration_is_followed_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    """The demonstration is stopped between its two runs, so that it does not end before the page was looked at."""
    (tmp_path / "profile").mkdir()
    command = [sys.executable, "-m", "outlast", "demo", "--serve", "--keep", str(tmp_path / "kept")]
    with browsing(tmp_path / "profile") as browser, (tmp_path / "said").open("w") as said:
        demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert demo.stdout is not None
        try:
            url = re.search(r"http://\S+", line_with(demo.stdout, "http://", said))
            assert url is not None
            browser.open(url[0], 1400, "light", PATIENCE_S)
            line_with(demo.stdout, "undisturbed", said)
            demo.send_signal(signal.SIGSTOP)
            state = "return document.querySelector('h1 .state').textContent"
            browser.until(lambda: browser.script(state) == "finished", PATIENCE_S)
            told = json.loads(
                subprocess.run(
                    [sys.executable, "-m", "outlast", "why", str(tmp_path / "kept" / "disturbed"), "--json"],
                    capture_output=True, check=True, timeout=PATIENCE_S,
                ).stdout
            )  # fmt: skip
            wanted = {
                "step": "160 of 160", "faults outlasted": str(told["num_recoveries"]),
                "downtime": format_s(told["downtime_s"]), "useful time": f"{told['ettr']:.1%}",
                "wall time": format_s(told["cost"]["wall_s"]),
            }  # fmt: skip
            assert told["num_recoveries"] >= 4
            browser.until(lambda: wanted.items() <= browser.script(DRAWN_FIGURES).items(), PATIENCE_S)
            rows = "return [...document.querySelectorAll('table.rows td.what')].map((node) => node.textContent)"
            browser.until(lambda: browser.script(rows) == [row["what"] for row in told["timeline"]], PATIENCE_S)
            assert [entry["message"] for entry in browser.log("browser")] == []
            asked = [address for address in browser.asked() if not address.startswith(("chrome", "data:", "about:"))]
            assert asked
            assert [address for address in asked if not address.startswith(f"{url[0]}/")] == []
            demo.send_signal(signal.SIGCONT)
            assert "identical, to the bit" in demo.stdout.read()
            assert demo.wait(PATIENCE_S) == 0
        finally:
            if demo.poll() is None:
                demo.send_signal(signal.SIGCONT)
                demo.terminate()
                demo.wait(60)


def line_with(stream: IO[str], words: str, said: IO[str]) -> str:
    """The first line that has these words; what came before is kept for who looks why there was none."""
    for line in stream:
        said.write(line)
        if words in line:
            return line
    said.flush()
    raise AssertionError(f"no line with {words!r}: {Path(said.name).read_text(encoding='utf-8')}")
