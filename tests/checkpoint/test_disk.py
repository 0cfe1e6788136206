"""Reading a real disk: around the page cache, unless it has the bytes already."""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib

import pytest

from outlast.checkpoint._arena import map_private
from outlast.checkpoint._fs import Disk
from outlast.checkpoint._local import LocalStore

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
