"""A disk that never answers a load: after its limit the load goes on to the next place or generation, and says so."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outlast.checkpoint import Engine, LocalStore
from outlast.checkpoint import _events as events
from outlast.checkpoint._fs import Disk
from outlast.errors import CheckpointError

from .test_hanging import Dead, state

LIMIT_S = 0.3
CALLS = ["names", "open", "pread", "lock", "size"]


class OneFile(Disk):
    """A real disk on which one file is never read."""

    def __init__(self) -> None:
        self.path, self.back, self._fds = "", threading.Event(), dict[int, str]()

    def open(self, path: str, mode: Any, *, direct: bool = False) -> int:
        fd = super().open(path, mode, direct=direct)
        self._fds[fd] = path
        return fd

    def pread(self, fd: int, buffer: memoryview, offset: int, *, cached: bool = False) -> int:
        if self.path and self._fds[fd].endswith(self.path):
            assert self.back.wait(60)
        return super().pread(fd, buffer, offset, cached=cached)


@pytest.fixture
def disk() -> Iterator[Dead]:
    disk = Dead()
    yield disk
    disk.back.set()


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def places(tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The same two generations, of steps 1 and 2, near and far."""
    near, far = tmp_path / "near", tmp_path / "far"
    with_both = Engine(str(near), drain_to=str(far))
    for step in (1, 2):
        handle = with_both.save(step, state(float(step)))
        assert handle is not None
        with_both.commit(handle)
        drained = with_both.drain(step - 1)
        assert drained is not None
        drained.result(20)
    with_both.close()
    return near, far


def reasons(log: list[Any]) -> str:
    return "; ".join(e.reason for e in log if isinstance(e, events.Skipped))


@pytest.mark.parametrize("call", CALLS)
def test_the_farther_place_serves(
    disk: Dead, places: tuple[pathlib.Path, pathlib.Path], log: list[Any], call: str
) -> None:
    near, far = places
    engine = Engine(LocalStore(str(near), fs=disk), drain_to=str(far), on_event=log.append, timeout_s=LIMIT_S)
    disk.call = call
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 2
    assert "has not returned for 0.3 s" in reasons(log)
    assert str(near) in {e.url for e in log if isinstance(e, events.Skipped)}
    disk.back.set()  # what was given up returns now, and must not write into what was loaded
    disk.call = ""
    again = engine.load()
    assert again is not None
    for found in (loaded, again):
        assert torch.equal(found.tree["w"], state(2.0)["w"])
    engine.close()


@pytest.mark.parametrize("call", CALLS)
def test_where_nothing_answers_the_error_says_so(
    disk: Dead, places: tuple[pathlib.Path, pathlib.Path], log: list[Any], call: str
) -> None:
    engine = Engine(LocalStore(str(places[0]), fs=disk), on_event=log.append, timeout_s=LIMIT_S)
    disk.call = call
    with pytest.raises(CheckpointError, match=r"has not returned for 0\.3 s") as caught:
        engine.load()
    assert caught.value.remedy
    disk.back.set()
    engine.close()


def test_a_file_that_is_never_read_costs_its_generation_only(
    places: tuple[pathlib.Path, pathlib.Path], log: list[Any]
) -> None:
    disk = OneFile()
    engine = Engine(LocalStore(str(places[0]), fs=disk), on_event=log.append, timeout_s=LIMIT_S)
    (newest,) = (path.name for path in (places[0] / "data").glob("*s2-*.bin"))
    disk.path = newest
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 1
    assert torch.equal(loaded.tree["w"], state(1.0)["w"])
    assert "has not returned for 0.3 s" in reasons(log)
    disk.back.set()
    engine.close()


def test_a_state_that_is_filled_in_place_is_given_up_with_a_word(places: tuple[pathlib.Path, pathlib.Path]) -> None:
    """A read that was given up may still write into it, so no other place may fill it meanwhile."""
    disk, into = OneFile(), state(0.0)
    engine = Engine(LocalStore(str(places[0]), fs=disk), drain_to=str(places[1]), timeout_s=LIMIT_S)
    (disk.path,) = (path.name for path in (places[0] / "data").glob("*s2-*.bin"))
    with pytest.raises(CheckpointError, match="a read of generation 1 was given up") as caught:
        engine.load(into=into)
    assert "not to be trained on" in caught.value.did
    assert "without into" in caught.value.remedy
    disk.back.set()
    engine.close()


HANGS = """
import sys, threading
from outlast.checkpoint import Engine, LocalStore
from outlast.checkpoint._fs import Disk
from outlast.errors import CheckpointError
Disk.pread = lambda *_, **__: threading.Event().wait()
engine = Engine(sys.argv[1], timeout_s=0.3)
try:
    engine.load()
except CheckpointError as error:
    print("given up" if "has not returned" in str(error) else error)
engine.close()
"""


@pytest.mark.process
def test_a_process_ends_though_its_reads_never_return(places: tuple[pathlib.Path, pathlib.Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(places[0])], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "given up"), done.stderr
