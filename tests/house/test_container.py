"""The container file: what it installs, copies and starts is what this repository has. No engine is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
TEXT = re.sub(r"\\\n\s*", " ", (TOP / "Containerfile").read_text(encoding="utf-8"))
LINES = [line.split(None, 1) for line in TEXT.splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def of(word: str) -> list[str]:
    return [rest for first, rest in LINES if first == word]


def test_it_installs_extras_that_there_are_under_a_python_that_is_wanted() -> None:
    (install,) = [line for line in of("RUN") if "pip install" in line]
    (extras,) = re.findall(r"/src\[([\w,]+)\]", install)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (constraints,) = re.findall(r"-c /src/(\S+)", install)
    assert (TOP / constraints).is_file()
    (version,) = re.findall(r"python:3\.(\d+)", of("FROM")[0])
    (least,) = re.findall(r">=3\.(\d+)", PROJECT["requires-python"])
    assert int(version) >= int(least)
    (torch,) = re.findall(r"^torch==(\S+)", (TOP / constraints).read_text(encoding="utf-8"), re.MULTILINE)
    assert "+" not in torch, "an index for processors alone has it under the same number"


def test_nothing_that_was_made_here_is_copied() -> None:
    """docker and podman both read this file, and podman alone the other name that it had."""
    left_out = (TOP / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for made in (".git", ".venv", "build", "dist", "outlast-runs", "docs/_build", "strikes.jsonl", ".mypy_cache"):
        assert any(fnmatch(made, pattern) for pattern in left_out), made


@pytest.mark.process
def test_what_it_starts_is_a_command_that_answers(tmp_path: Path) -> None:
    (entry,), command = (json.loads(of(word)[0]) for word in ("ENTRYPOINT", "CMD"))
    assert entry in PROJECT["scripts"]
    done = subprocess.run(
        [sys.executable, "-m", entry, *command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode in (0, 3), done.stderr
    assert "versions: " in done.stdout
    assert of("STOPSIGNAL") == ["SIGTERM"], "a run saves, and stops in order"
