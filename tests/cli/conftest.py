"""For tests of commands: `outlast run` up to where it would start something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outlast.cli import _run


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(resolved configuration, command) of each run that would have started."""
    seen: list[Any] = []

    def launch(resolved: Any, command: list[str], run_dir: Path, **_: Any) -> int:
        seen.append((resolved.config, command))
        return 0

    monkeypatch.setattr(_run, "launch", launch)
    return seen
