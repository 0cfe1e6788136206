"""What tests of disks that do not answer share."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from .dead import Dead


@pytest.fixture
def disk() -> Iterator[Dead]:
    disk = Dead()
    yield disk
    disk.back.set()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """For tests of silent disks in memory, where there is a place for it: a shared machine's disk may be silent for
    longer than their limit, and be well."""
    shared = pathlib.Path("/dev/shm")
    if not request.path.name.startswith("test_hanging") or not shared.is_dir():
        yield tmp_path
        return
    # A write that hung goes on as its test ends, and may put a file beside those that are being removed.
    with tempfile.TemporaryDirectory(dir=shared, ignore_cleanup_errors=True) as place:
        yield pathlib.Path(place)


@pytest.fixture
def log() -> list[Any]:
    return []
