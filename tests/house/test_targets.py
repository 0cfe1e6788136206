"""Every test is run by some target of the Makefile, and a mark never takes it out of all of them."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
TARGETS = ("test", "campaign", "campaign-long")


def commands(target: str) -> list[tuple[list[str], list[str], str]]:
    """(paths, ignored paths, marks) of each pytest command that a target runs."""
    if shutil.which("make") is None:
        pytest.skip("make is missing")
    done = subprocess.run(["make", "-n", target], cwd=TOP, capture_output=True, text=True, check=True)
    found = []
    for line in done.stdout.splitlines():
        if " -m pytest " in line:
            words = shlex.split(line.split(" -m pytest ")[1])
            paths = [word for word in words if word.startswith("tests")] or ["tests"]
            ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
            found.append((paths, ignored, words[words.index("-m") + 1]))
    return found


def runs(command: tuple[list[str], list[str], str], file: Path, marks: set[str]) -> bool:
    paths, ignored, expression = command
    mine = str(file.relative_to(TOP))

    def below(places: list[str]) -> bool:
        return any(mine == place or mine.startswith(f"{place}/") for place in places)

    names = {name: name in marks for name in re.findall(r"[a-z_]+", expression) if name not in {"and", "not", "or"}}
    return below(paths) and not below(ignored) and bool(eval(expression, {}, names))


def marked(file: Path) -> set[str]:
    return {
        node.attr for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)
    }


FILES = sorted((TOP / "tests").rglob("test_*.py"))


def test_every_marked_test_is_run_by_one_target() -> None:
    run_by = [command for target in TARGETS for command in commands(target)]
    assert len(run_by) == 4
    for file in FILES:
        attributes = marked(file)
        kinds: list[set[str]] = [set(), *([{"campaign"}] if "campaign" in attributes else [])]
        kinds += [{"campaign", "soak"}] if "soak" in attributes else []
        for marks in kinds:
            assert sum(runs(command, file, marks) for command in run_by) == 1, (file, marks)


def test_a_soak_is_a_campaign_too() -> None:
    """Or `make test` would run it."""
    for file in FILES:
        assert "soak" not in marked(file) or "campaign" in marked(file), file
