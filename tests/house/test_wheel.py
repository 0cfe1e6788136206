"""What is built has every module: the source distribution, and the wheel that is built from it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
WANTED = {
    str(path.relative_to(TOP / "src"))
    for path in (TOP / "src" / "outlast").rglob("*")
    if path.is_file() and path.suffix in {".py", ".c", ".js", ".css", ".html", ".svg", ".toml", ".typed"}
} | {"outlast/py.typed"}


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="the package build is not installed")
def test_source_distribution_and_wheel_have_every_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(TOP)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(sdist) as archive:
        found = {name.partition("/src/")[2] for name in archive.getnames()}
    assert sorted(WANTED - found) == []
    assert sorted(WANTED - set(zipfile.ZipFile(wheel).namelist())) == []
