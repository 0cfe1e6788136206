"""The walls between the rooms, and commands that answer at once: counted in modules, not in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.cli import COMMANDS
from outlast.journal import Journal

TOP = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "numpy", "scipy", "pandas", "sklearn", "pydantic", "rich"}
MAX_MODULES_HELP, MAX_MODULES = 100, 280
MEASURE = """
import json, sys
from outlast.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules}), len(sys.modules)]), file=sys.stderr)
"""


def modules_after(args: list[str], cwd: Path) -> tuple[int, set[str], int]:
    """(exit code, top-level packages, number of modules) once `outlast ARGS` has answered."""
    environ = {**os.environ, "PYTHONPATH": str(TOP / "src")}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env=environ,
        check=True,
    )
    code, packages, count = json.loads(done.stderr.splitlines()[-1])
    return code, set(packages), count


@pytest.mark.process
@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_imports_next_to_nothing(args: list[str], tmp_path: Path) -> None:
    code, packages, count = modules_after(args, tmp_path)
    assert code == 0
    assert not packages & (HEAVY | {"typer", "msgspec"})
    assert count <= MAX_MODULES_HELP


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_s_help_needs_torch(command: str, tmp_path: Path) -> None:
    code, packages, _ = modules_after([command, "--help"], tmp_path)
    assert code == 0
    assert not packages & {"torch", "numpy", "scipy"}


@pytest.mark.process
@pytest.mark.parametrize("args", [["status"], ["status", "--json"], ["why"], ["why", "--json"], ["config", "show"]])
def test_looking_at_a_run_loads_nothing_heavy(args: list[str], tmp_path: Path) -> None:
    Journal.create(tmp_path / "run").close()
    where = [] if args[0] == "config" else [str(tmp_path / "run")]
    code, packages, count = modules_after([*args, *where], tmp_path)
    assert code == 0
    assert not packages & HEAVY
    assert count <= MAX_MODULES


@pytest.mark.process
def test_a_quick_look_at_a_host_loads_nothing_heavy(tmp_path: Path) -> None:
    code, packages, count = modules_after(["doctor", "--quick"], tmp_path)
    assert code in (0, 4), "what it finds of this host is no matter here"
    assert not packages & HEAVY
    assert count <= MAX_MODULES


@pytest.mark.process
def test_the_walls_between_the_rooms_stand() -> None:
    """The contracts are in pyproject.toml; this is `lint-imports`, so that a test run sees a breach too."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environ = {**os.environ, "PYTHONPATH": str(TOP / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=TOP, env=environ, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout
