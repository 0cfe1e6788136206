"""Reading a real disk: around the page cache, unless it has the bytes already."""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointEngine
from outlast.checkpoint import fs as _fs
from outlast.checkpoint._arena import map_private
from outlast.checkpoint._local import LocalStore
from outlast.checkpoint.fs import Disk
from outlast.errors import Damage

SIZE = 1 << 20


def num_cached(path: pathlib.Path) -> int:
    """Pages of the file in the page cache; skips where the kernel does not tell."""
    wanted, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    fd = os.open(path, os.O_RDWR)
    failed = ctypes.CDLL(None).syscall(ctypes.c_long(451), fd, ctypes.byref(wanted), ctypes.byref(found), 0)
    os.close(fd)
    if failed:
        pytest.skip("this kernel does not tell what its page cache holds")
    return int(found[0])


@pytest.fixture
def written(tmp_path: pathlib.Path) -> tuple[LocalStore, pathlib.Path]:
    """A data file that was written around the page cache."""
    store, data = LocalStore(str(tmp_path)), memoryview(map_private(SIZE))[:SIZE]
    data[:] = os.urandom(SIZE // 64) * 64
    writer = store.create("a.bin", SIZE)
    writer.write(0, data)
    writer.finish(SIZE)
    path = tmp_path / "data" / "a.bin"
    if num_cached(path):
        pytest.skip("this file system does not write around the page cache")
    return store, path


def test_a_read_leaves_nothing_in_the_page_cache(written: tuple[LocalStore, pathlib.Path]) -> None:
    store, path = written
    reader, buffer = store.open_data("a.bin"), bytearray(SIZE)
    reader.read(0, memoryview(buffer)[: SIZE // 2])
    reader.read(SIZE // 2, memoryview(buffer)[SIZE // 2 :])
    reader.close()
    assert num_cached(path) == 0  # nor was it read ahead: the disk gave each byte once
    assert bytes(buffer) == path.read_bytes()


def test_what_the_page_cache_has_is_known(written: tuple[LocalStore, pathlib.Path]) -> None:
    store, path = written
    disk, buffer = Disk(), memoryview(bytearray(SIZE))
    fd = disk.open(str(path), "read")
    with pytest.raises(OSError, match="page cache") as caught:
        disk.pread(fd, buffer, 0, cached=True)
    assert caught.value.errno == errno.EAGAIN
    everything = path.read_bytes()
    assert disk.pread(fd, buffer, 0, cached=True) == SIZE
    assert bytes(buffer) == everything
    with pytest.raises(OSError, match="page cache"):
        disk.pread(fd, buffer, 4096, cached=True)  # ends beyond the file
    disk.close(fd)
    reader, again = store.open_data("a.bin"), bytearray(SIZE)
    reader.read(0, memoryview(again))
    reader.close()
    assert bytes(again) == everything


def refuses(*_arguments: Any) -> int:
    """As under a kernel or a filter that knows no such call."""
    return -1


def boasts(_number: Any, _fd: int, _wanted: Any, found: Any, _flags: int) -> int:
    """Everything is in the cache."""
    found._obj[0] = 1 << 40
    return 0


def says_nothing(*_arguments: Any) -> int:
    return 0


ANSWERS = [refuses, boasts, says_nothing]


def reads(store: LocalStore, size: int = SIZE, at: int = 0) -> bytes:
    reader, buffer = store.open_data("a.bin"), bytearray(size)
    reader.read(at, memoryview(buffer))
    reader.close()
    return bytes(buffer)


@pytest.mark.parametrize("answer", ANSWERS)
def test_whatever_the_kernel_says_of_its_cache_the_bytes_are_right(
    written: tuple[LocalStore, pathlib.Path], monkeypatch: pytest.MonkeyPatch, answer: Callable[..., int]
) -> None:
    store, path = written
    monkeypatch.setattr(_fs, "_system", lambda: answer)
    for at, size in ((0, SIZE), (4096, 5000), (777, 4096), (SIZE - 1, 1)):
        cold = reads(store, size, at)
        assert cold == path.read_bytes()[at : at + size]
        assert reads(store, size, at) == cold


@pytest.mark.parametrize("answer", [None, *ANSWERS])
@pytest.mark.parametrize("left", [0, 4096, SIZE // 2, SIZE // 2 + 1, SIZE - 1])
def test_a_file_cut_short_under_its_reader_is_damaged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., int] | None, left: int
) -> None:
    if answer is not None:
        monkeypatch.setattr(_fs, "_system", lambda: answer)
    store = LocalStore(str(tmp_path))
    writer = store.create("a.bin", SIZE)
    writer.write(0, memoryview(bytearray(os.urandom(SIZE))))
    writer.finish(SIZE)
    reader, buffer = store.open_data("a.bin"), memoryview(bytearray(SIZE))
    reader.read(0, buffer)
    os.truncate(tmp_path / "data" / "a.bin", left)
    with pytest.raises(Damage, match="ends too early"):
        reader.read(0, buffer)
    with pytest.raises(Damage, match="ends too early"):
        reader.read(SIZE - 4096, buffer[:4096])
    reader.close()


@pytest.mark.parametrize("answer", [None, *ANSWERS])
def test_a_hole_where_bytes_were_is_never_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., int] | None
) -> None:
    if answer is not None:
        monkeypatch.setattr(_fs, "_system", lambda: answer)
    engine = CheckpointEngine(str(tmp_path), incremental=False)
    for value in (1.0, 2.0):
        handle = engine.save(int(value), {"w": torch.full((SIZE,), value), "n": value}, wait=True)
        assert handle is not None
        engine.commit(handle)
    newest = max((tmp_path / "data").glob("e0-v0-s2-*.bin"))
    size = newest.stat().st_size
    os.truncate(newest, size - 4096)
    os.truncate(newest, size)  # as long as before, its end a hole
    loaded = engine.load()
    engine.close()
    assert loaded is not None
    assert (loaded.step, loaded.tree["n"], loaded.tree["w"].unique().tolist()) == (1, 1.0, [1.0])
    assert any("digest" in skip.reason for skip in loaded.skipped)
