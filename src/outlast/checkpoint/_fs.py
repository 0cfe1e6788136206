"""The file-system calls that checkpoints make, as one small interface.

Role: everything `_local` does to a disk goes through `FileSystem`, so that tests can count the calls, die at each of
them, and lose any subset of what was not fsynced. Invariant: no durability is implied by any call but `fsync` and
`sync_dir`. Knows nothing of generations, chunks or names.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
from typing import Any, Literal, Protocol

__all__ = ["ALIGN", "Disk", "FileSystem", "Mode"]

ALIGN = 4096
"""O_DIRECT wants address, offset and length to be multiples of this."""

Mode = Literal["read", "create", "overwrite"]


class FileSystem(Protocol):
    """Calls raise `OSError` as the system does. `path` is absolute or relative to the working directory."""

    def open(self, path: str, mode: Mode, *, direct: bool = False) -> int: ...
    def pwrite(self, fd: int, data: memoryview, offset: int) -> int: ...
    def pread(self, fd: int, buffer: memoryview, offset: int, *, cached: bool = False) -> int: ...
    def truncate(self, fd: int, size: int) -> None: ...
    def fsync(self, fd: int) -> None: ...
    def close(self, fd: int) -> None: ...
    def size(self, path: str) -> int | None: ...
    def names(self, path: str) -> list[str]: ...
    def mkdir(self, path: str) -> bool: ...
    def rename(self, source: str, target: str) -> None: ...
    def link(self, source: str, target: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def sync_dir(self, path: str) -> None: ...
    def lock(self, fd: int, *, exclusive: bool) -> bool: ...
    def is_at(self, fd: int, path: str) -> bool: ...


_FLAGS = {
    "read": os.O_RDONLY | os.O_NOFOLLOW,
    "create": os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
    "overwrite": os.O_RDWR | os.O_NOFOLLOW,
}


class Disk:
    """The real one. Links are never followed at the last component: a manifest cannot point outside its directory."""

    def open(self, path: str, mode: Mode, *, direct: bool = False) -> int:
        return os.open(path, _FLAGS[mode] | (os.O_DIRECT if direct else 0) | os.O_CLOEXEC, 0o644)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, buffer: memoryview, offset: int, *, cached: bool = False) -> int:
        """With `cached`, reads only from the page cache: raises EAGAIN unless it is known to hold all of this."""
        if cached and not _is_cached(fd, offset, len(buffer)):
            raise BlockingIOError(errno.EAGAIN, "not in the page cache")
        return os.preadv(fd, [buffer], offset, os.RWF_NOWAIT if cached else 0)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, path: str) -> int | None:
        try:
            return os.lstat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def mkdir(self, path: str) -> bool:
        """True if it was not there."""
        try:
            os.mkdir(path)
        except FileExistsError:
            return False
        return True

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, fd: int, *, exclusive: bool) -> bool:
        """Advisory, released when the process dies. False if another holds it against us."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                return False
            raise
        return True

    def is_at(self, fd: int, path: str) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            return False
        here = os.fstat(fd)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


_CACHESTAT = 451  # the same on every architecture but one; since Linux 6.5


@functools.cache
def _system() -> Any:
    return ctypes.CDLL(None, use_errno=True).syscall


def _is_cached(fd: int, offset: int, size: int) -> bool:
    """Whether the page cache holds the whole range. False where the kernel does not tell.

    Asked first, because a read that must not wait starts reading ahead when it finds nothing: the same bytes would
    come from the disk twice, once into the cache and once around it.
    """
    wanted = (ctypes.c_uint64 * 2)(offset, size)
    found = (ctypes.c_uint64 * 5)()
    if _system()(ctypes.c_long(_CACHESTAT), fd, ctypes.byref(wanted), ctypes.byref(found), 0) != 0:
        return False
    pages = (offset + size - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return size > 0 and found[0] >= pages
