"""Trainings with a habit in the process of the tests: no interpreter has to start and load torch for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import built
import loop

sys.path.pop(0)

HABITS: dict[str, Callable[[Any], None]] = loop.HABITS | built.HABITS_WITH_BUFFERS


def trained(habit: str, out: Path, *more: str) -> dict[str, Any]:
    """What a fleet of one ended with, by `training_here`. Raises what ended it before."""
    out.mkdir()
    loop.main(HABITS, [habit, *more, "--out", str(out)])
    (path,) = out.glob("*.json")
    return dict(json.loads(path.read_text()))
