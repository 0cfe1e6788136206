"""Every Python that the package names reads all of it, with no warning. `make release` tries the wheel with each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
READ = """
import pathlib, sys
paths = sorted(pathlib.Path(sys.argv[1]).rglob("*.py"))
for path in paths:
    compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
print(sys.version_info[:2], len(paths))
"""


def found(version: str) -> str | None:
    """A Python of this version: the first that answers, of those on the path and of pyenv's."""
    own = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}*/bin/python{version}"))
    for place in [shutil.which(f"python{version}"), *map(str, own)]:
        if place and subprocess.run([place, "--version"], capture_output=True, check=False, timeout=60).returncode == 0:
            return place
    return None


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_it_reads_all_of_the_package_without_a_warning(version: str) -> None:
    python = found(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    done = subprocess.run(
        [python, "-I", "-W", "error", "-c", READ, str(TOP / "src" / "outlast")],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    number = len(list((TOP / "src" / "outlast").rglob("*.py")))
    assert done.stdout.strip() == f"(3, {version.partition('.')[2]}) {number}"


def test_the_pythons_that_are_tried_are_those_that_the_package_names() -> None:
    named = (TOP / "pyproject.toml").read_text(encoding="utf-8")
    for version in ("3.11", "3.12", "3.13"):
        assert f'"Programming Language :: Python :: {version}"' in named
