"""A disk that never answers a load: after its limit the load goes on to the next place or generation, and says so."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore
from outlast.checkpoint import save_events as events
from outlast.checkpoint.fs import Disk
from outlast.errors import CheckpointError

from .dead import Dead, state

LIMIT_S = 3.0  # of each read, of well disks too: far more than these take in memory, however busy the machine
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
def places(tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The same two generations, of steps 1 and 2, near and far."""
    near, far = tmp_path / "near", tmp_path / "far"
    with_both = CheckpointEngine(str(near), drain_to=str(far))
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
    engine = CheckpointEngine(LocalStore(str(near), fs=disk), drain_to=str(far), on_event=log.append, timeout_s=LIMIT_S)
    disk.call = call
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 2
    assert f"has not returned for {LIMIT_S:g} s" in reasons(log)
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
    engine = CheckpointEngine(LocalStore(str(places[0]), fs=disk), on_event=log.append, timeout_s=LIMIT_S)
    disk.call = call
    with pytest.raises(CheckpointError, match=f"has not returned for {LIMIT_S:g} s") as caught:
        engine.load()
    assert caught.value.remedy
    disk.back.set()
    engine.close()


def test_a_file_that_is_never_read_costs_its_generation_only(
    places: tuple[pathlib.Path, pathlib.Path], log: list[Any]
) -> None:
    disk = OneFile()
    engine = CheckpointEngine(LocalStore(str(places[0]), fs=disk), on_event=log.append, timeout_s=LIMIT_S)
    (newest,) = (path.name for path in (places[0] / "data").glob("*s2-*.bin"))
    disk.path = newest
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 1
    assert torch.equal(loaded.tree["w"], state(1.0)["w"])
    assert f"has not returned for {LIMIT_S:g} s" in reasons(log)
    disk.back.set()
    engine.close()


def ended() -> None:
    """The reads that were given up have returned."""
    for thread in threading.enumerate():
        if thread.name.startswith("outlast-read"):
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize("has_far", [True, False])
def test_a_state_that_is_filled_in_place_goes_on_to_what_serves(
    places: tuple[pathlib.Path, pathlib.Path], log: list[Any], has_far: bool
) -> None:
    """And what was given up does not write into it, when it returns."""
    disk, into = OneFile(), state(0.0)
    far = str(places[1]) if has_far else None
    engine = CheckpointEngine(LocalStore(str(places[0]), fs=disk), drain_to=far, timeout_s=LIMIT_S, on_event=log.append)
    (disk.path,) = (path.name for path in (places[0] / "data").glob("*s2-*.bin"))
    loaded = engine.load(into=into)
    assert loaded is not None
    assert loaded.step == (2 if has_far else 1)
    assert loaded.tree["w"] is into["w"]
    assert f"has not returned for {LIMIT_S:g} s" in reasons(log)
    into["w"].mul_(10.0)  # training goes on
    disk.back.set()
    ended()
    assert torch.equal(into["w"], state(20.0 if has_far else 10.0)["w"])
    engine.close()


def test_a_state_that_nothing_fills_is_said_to_be_lost(places: tuple[pathlib.Path, pathlib.Path]) -> None:
    disk = OneFile()
    engine = CheckpointEngine(LocalStore(str(places[0]), fs=disk), timeout_s=LIMIT_S)
    disk.path = ".bin"
    with pytest.raises(CheckpointError, match=r"no generation of 2 could be loaded: .* has not returned") as caught:
        engine.load(into=state(0.0))
    assert "not to be trained on" in caught.value.did
    disk.back.set()
    engine.close()


def test_what_a_failed_generation_half_filled_is_not_left_to_train_on(tmp_path: pathlib.Path) -> None:
    """The older one that serves has no values for it: not the state's own any more, nor anyone's."""
    both = {**state(2.0), "late": torch.ones(5000)}
    engine = CheckpointEngine(str(tmp_path))
    for step, tree in ((1, state(1.0)), (2, both)):
        handle = engine.save(step, tree)
        assert handle is not None
        engine.commit(handle)
    (newest,) = (tmp_path / "data").glob("*s2-*.bin")
    data = bytearray(newest.read_bytes())
    data[10] ^= 1
    newest.write_bytes(data)
    into = {**state(0.0), "late": torch.zeros(5000)}
    with pytest.raises(CheckpointError, match="generation 0 has no values for late") as caught:
        engine.load(into=into, strict=False)
    assert "from generation 1, which failed: it is not to be trained on" in caught.value.did
    assert "load generation=0" in caught.value.remedy
    with pytest.raises(CheckpointError, match="does not fit generation 0") as strict:
        engine.load(into=into)
    assert "not to be trained on" in strict.value.did
    loaded = engine.load(into={"late": into["late"], **state(0.0)}, strict=False, generation=0)
    assert loaded is not None
    assert loaded.tree["w"][0] == 1.0
    engine.close()


HANGS = """
import sys, threading
from outlast.checkpoint import CheckpointEngine, LocalStore
from outlast.checkpoint.fs import Disk
from outlast.errors import CheckpointError
Disk.pread = lambda *_, **__: threading.Event().wait()
engine = CheckpointEngine(sys.argv[1], timeout_s=0.3)
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
