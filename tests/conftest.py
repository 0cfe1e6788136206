"""For all tests: how the processes that they start begin.

Most of a fleet's cost is the start of its processes, so a third of that is saved here: `start/sitecustomize.py`, and
outlast compiled once where the environment forbids Python to keep what it compiled (every process would do it anew).
And no example of a property has a time limit: speed is asserted in benchmarks.
"""

from __future__ import annotations

import compileall
import os
import sys
from pathlib import Path

import hypothesis
import pytest

_START = str(Path(__file__).with_name("start"))
_SOURCE = Path(__file__).resolve().parents[1] / "src" / "outlast"

hypothesis.settings.register_profile("outlast", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("outlast")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of xdist: its parent has done it
        return
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_START, inherited]))
    if sys.dont_write_bytecode and os.access(_SOURCE, os.W_OK):
        compileall.compile_dir(_SOURCE, quiet=1)
