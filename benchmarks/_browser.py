"""Chromium, driven by ChromeDriver in its own plain protocol: what the page's benchmark and tests look through.

Role: a session, what was logged and asked for in it, and pages opened at a width in a theme. No package is needed but
Debian's chromium and chromium-driver. Every name but 127.0.0.1 resolves to nothing.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "DRIVER", "Browser", "browsing"]

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
_SHOWN = (
    "return document.querySelectorAll('table.rows tbody tr').length > 0"
    " && document.querySelectorAll('[data-figure]').length > 0"
)


class Browser:
    """A session with the ChromeDriver at `port`."""

    def __init__(self, port: int, profile: Path) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"alwaysMatch": {"goog:loggingPrefs": logs, "goog:chromeOptions": options}}
        self.until(lambda: bool(self._call("GET", "/status")["ready"]))
        self._session = "/session/" + self._call("POST", "/session", {"capabilities": wanted})["sessionId"]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._base + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def until(self, test: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Look until `test` holds. Raises TimeoutError."""
        end_s, turn = time.monotonic() + timeout_s, threading.Event()
        while True:
            try:
                if test():
                    return
            except urllib.error.URLError:
                pass  # the driver is starting
            if time.monotonic() >= end_s:
                raise TimeoutError("the browser did not come so far in time")
            turn.wait(0.05)

    def open(self, url: str, width: int, theme: str, timeout_s: float = 30.0, shown: str = _SHOWN) -> None:
        """Show `url` in a window so wide, in the light or the dark theme; returns when `shown`, a script, returns true:
        unless it is given, when there are figures and rows."""
        scheme = [{"name": "prefers-color-scheme", "value": theme}]
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setEmulatedMedia", {"features": scheme})
        self.command("Emulation.setDeviceMetricsOverride", size)
        self._call("POST", f"{self._session}/url", {"url": url})
        self.until(lambda: bool(self.script(shown)), timeout_s)

    def command(self, name: str, params: dict[str, Any]) -> Any:
        """A command of Chrome's DevTools protocol."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": params})

    def script(self, text: str) -> Any:
        """What a function of this text returns in the page; a promise is waited for."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": text, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since the last call: `browser` is the console, `performance` events of DevTools."""
        found: list[dict[str, Any]] = self._call("POST", f"{self._session}/se/log", {"type": kind})
        return found

    def asked(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def close(self) -> None:
        """End the session."""
        self._call("DELETE", self._session)


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A driver and a session of its own, with its profile in an empty folder."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = int(held.getsockname()[1])
    driver = subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        browser = Browser(port, profile)
        try:
            yield browser
        finally:
            browser.close()  # a browser outlives its driver
    finally:
        driver.terminate()
        driver.wait(20)
