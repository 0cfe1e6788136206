"""Reading a file of a local store: directly where the disk can, through the page cache where it cannot."""

from __future__ import annotations

import ctypes
import errno
import os

from outlast.checkpoint._arena import address_of, thread_buffer
from outlast.checkpoint.fs import ALIGN, NOT_REGULAR, FileSystem
from outlast.checkpoint.manifest import Damage

__all__ = ["LocalReader", "NO_DIRECT", "ODD", "open_to_read", "read_fully"]


NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


ODD = {NOT_REGULAR, errno.ENXIO, errno.ELOOP}  # a FIFO or device, a socket, a symbolic link


class LocalReader:
    """One data file. What the page cache holds is copied from it; the rest is read around it, directly."""

    def __init__(self, fs: FileSystem, path: str, name: str) -> None:
        self._fs, self._path, self._name = fs, path, name
        self._fd = open_to_read(fs, path)
        self.bytes = fs.size(path) or 0
        self._direct: int | None = None
        try:
            self._direct = fs.open(path, "read", direct=True)
        except OSError as error:
            if error.errno not in NO_DIRECT:
                self.close()
                raise

    def read(self, offset: int, buffer: memoryview) -> None:
        done = self._read_cached(offset, buffer)
        if done < len(buffer) and self._direct is not None and (offset + done) % ALIGN == 0:
            done += self._read_direct(offset + done, buffer[done:])
        done += read_fully(self._fs, self._fd, buffer[done:], offset + done)
        if done < len(buffer):
            raise Damage("ends too early", file=self._name, offset=offset + done, bytes=len(buffer) - done)

    def _read_cached(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            try:
                count = self._fs.pread(self._fd, buffer[done:], offset + done, cached=True)
            except OSError as error:
                if error.errno in {errno.EAGAIN, *NO_DIRECT}:
                    return done
                raise
            if count == 0:
                return done
            done += count
        return done

    def _read_direct(self, offset: int, buffer: memoryview) -> int:
        """Straight into memory that is aligned, else through a buffer of this thread that is."""
        assert self._direct is not None
        straight = len(buffer) % ALIGN == 0 and address_of(buffer) % ALIGN == 0
        place = buffer if straight else thread_buffer(len(buffer))
        try:
            count = min(read_fully(self._fs, self._direct, place, offset), len(buffer))
        except OSError as error:
            if error.errno in NO_DIRECT:
                return 0
            raise
        if not straight:
            ctypes.memmove(address_of(buffer), address_of(place), count)
        return count

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd is not None:
                self._fs.close(fd)
        self._direct = None


def open_to_read(fs: FileSystem, path: str) -> int:
    try:
        return fs.open(path, "read")
    except FileNotFoundError as error:
        raise Damage("is missing", file=os.path.basename(path)) from error
    except OSError as error:
        if error.errno in ODD:
            what = "is a symbolic link" if error.errno == errno.ELOOP else "is no regular file"
            raise Damage(what, file=os.path.basename(path)) from error
        raise


def read_fully(fs: FileSystem, fd: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = fs.pread(fd, buffer[done:], offset + done)
        if count == 0:
            break
        done += count
    return done
