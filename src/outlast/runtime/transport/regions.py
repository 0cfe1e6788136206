"""Memory shared between the processes of a host, without names: memfds passed over sockets or inherited.

A region has one writer, so a late write into somebody else's buffer cannot happen (protocol, 14); it vanishes with the
last process that maps it, so nothing is left behind after any crash.
"""

from __future__ import annotations

import mmap
import os
import weakref

__all__ = ["Region"]


class Region:
    """A memfd mapped shared. `size` bytes, sparse until touched. `fd` is the region's own from here on: it is closed by
    `close`, or when nobody refers to the region any more."""

    def __init__(self, size: int, fd: int | None = None, name: str = "outlast") -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC) if fd is None else fd
        self.close = weakref.finalize(self, _close, self.fd, os.getpid())
        self.close.atexit = False
        if fd is None:
            os.ftruncate(self.fd, max(size, mmap.PAGESIZE))
        self.size = os.fstat(self.fd).st_size
        self.map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _close(fd: int, pid: int) -> None:
    """Forget the descriptor, once; the mapping lives as long as a tensor views it. A fork's number may be another's."""
    if pid == os.getpid():
        os.close(fd)
