"""Memory shared between the processes of a host, without names: memfds passed over sockets or inherited.

A region has one writer, so a late write into somebody else's buffer cannot happen (protocol, 14); it vanishes with the
last process that maps it, so nothing is left behind after any crash.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from outlast.runtime.transport.descriptors import closed_with

__all__ = ["Region"]


class Region:
    """A memfd mapped shared. `size` bytes, sparse until touched. `fd` is the region's own from here on: it is closed by
    `close`, or when nobody refers to the region any more; the mapping lives as long as a tensor views it. `alone`: no
    other process is ever passed it, so it takes no descriptor (a mapped memfd takes two), and `fd` is -1."""

    def __init__(self, size: int, fd: int | None = None, name: str = "outlast", *, alone: bool = False) -> None:
        if alone:
            self.fd, self.size = -1, max(size, mmap.PAGESIZE)
            self.close: Callable[[], object] = lambda: None
            self.map = mmap.mmap(-1, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC) if fd is None else fd
        self.close = closed_with(self, self.fd)
        if fd is None:
            os.ftruncate(self.fd, max(size, mmap.PAGESIZE))
        self.size = os.fstat(self.fd).st_size
        self.map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
