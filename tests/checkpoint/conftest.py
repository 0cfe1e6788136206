"""What tests of disks that do not answer share."""

from __future__ import annotations

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
def log() -> list[Any]:
    return []
