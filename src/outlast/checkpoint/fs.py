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
import signal
import stat
from typing import Any, Literal, Protocol

__all__ = ["ALIGN", "NOT_REGULAR", "Disk", "FileSystem", "Mode"]

ALIGN = 4096
"""O_DIRECT wants address, offset and length to be multiples of this."""

NOT_REGULAR = errno.EMEDIUMTYPE
"""`errno` of the refusal to open what is no regular file."""

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
    def is_only_ours(self, fd: int) -> bool: ...


_FLAGS = {
    "read": os.O_RDONLY | os.O_NOFOLLOW,
    "create": os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
    "overwrite": os.O_RDWR | os.O_NOFOLLOW,
}


class Disk:
    """The real one. Links are never followed at the last component: a manifest cannot point outside its directory."""

    def open(self, path: str, mode: Mode, *, direct: bool = False) -> int:
        """Opens regular files only: a FIFO would wait for its other end, a device may do anything."""
        flags = _FLAGS[mode] | (os.O_DIRECT if direct else 0) | os.O_CLOEXEC
        try:
            fd = os.open(path, flags | os.O_NONBLOCK, 0o644)
        except BlockingIOError:  # somebody's lease is being broken, and only regular files have leases
            fd = os.open(path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(NOT_REGULAR, "is no regular file", path)
        return fd

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

    def is_only_ours(self, fd: int) -> bool:
        """Whether nobody else can see what is written: the file has this one name and is open nowhere else.

        The kernel tells by granting a write lease, for an instant. Where it has none to give (NFS, FUSE), it is not
        known, and the answer is no. A reader that comes in that instant waits for its end; the signal that it raises
        is one that is ignored unless somebody asked for it.
        """
        if os.fstat(fd).st_nlink != 1:
            return False
        try:
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True


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
