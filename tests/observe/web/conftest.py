"""The browser in which the page is looked at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks._browser import CHROMIUM, DRIVER, Browser, browsing


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Ask for it before what takes long to make: where there is none, the test is skipped here."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("no browser: Debian's chromium and chromium-driver are not installed")
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
