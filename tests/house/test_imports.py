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

MEASURE_FIRST = """
import json, sys
class First:
    def write(self, text):
        if text:
            print(json.dumps(sorted(sys.modules)), file=sys.stderr)
            sys.stderr.flush()
            import os; os._exit(0)
    def flush(self): pass
sys.stdout = First()
from outlast.cli import main
main(sys.argv[1:])
"""
LATE = {
    "typer", "click", "asyncio", "ssl", "starlette", "uvicorn", "dataclasses", "statistics", "email",
    "importlib.metadata", "difflib", "tomllib", "outlast.core.policy", "outlast.plan", "outlast.health",
    "outlast.checkpoint", "outlast.observe._live", "outlast.observe._export", "outlast.observe.page_picture",
    "outlast.observe.page_reading", "outlast.observe.web",
}  # fmt: skip
"""What no command that answers at once needs before its first word; each takes milliseconds to import."""
OF_STORIES = {"hashlib", "outlast.observe._why", "outlast.observe._history", "outlast.observe.timeline_rows"}
OF_JOURNALS = {"sqlite3", "hashlib", "outlast.core.events", "outlast.observe"}
MAX_MODULES_FIRST = 200


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
@pytest.mark.parametrize(
    ("args", "late"), [(["status"], LATE | OF_STORIES), (["why"], LATE), (["doctor", "--quick"], LATE | OF_JOURNALS)]
)
def test_what_is_asked_most_says_its_first_word_before_it_imports_more(
    args: list[str], late: set[str], tmp_path: Path
) -> None:
    Journal.create(tmp_path / "run").close()
    where = [] if args[0] == "doctor" else [str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_FIRST, *args, *where],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": str(TOP / "src")},
    )  # fmt: skip
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert not loaded & (late | HEAVY)
    assert len(loaded) <= MAX_MODULES_FIRST


@pytest.mark.process
def test_the_walls_between_the_rooms_stand() -> None:
    """The contracts are in pyproject.toml; this is `lint-imports`, so that a test run sees a breach too."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environ = {**os.environ, "PYTHONPATH": str(TOP / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=TOP, env=environ, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout
