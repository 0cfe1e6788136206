"""Checkpoints in a directory: aligned direct writes into recycled files, atomic publication, fsync at every turn.

Role: the `disk` tier. `manifests/` holds heads, `data/` what they reach, `spare/` files that no head reaches and that
the next save writes over. Order that every crash test leans on: data and parts are fsynced, then their directory (and
the one that recycled files came from), then the head under a temporary name, then it gets its name (a link, so that a
taken number is refused), then its directory is fsynced. Removing goes backwards: the head first, *durably*, before any
file it reached may be reused. Does not decide what to keep, and never looks inside a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Collection, Iterator

from outlast.checkpoint._local_reader import NO_DIRECT, ODD, LocalReader, open_to_read, read_fully
from outlast.checkpoint.fs import ALIGN, Disk, FileSystem
from outlast.checkpoint.manifest import MAX_HEAD_BYTES, Damage
from outlast.checkpoint.store import generation_name, generation_number

__all__ = ["LocalStore", "make_directory"]

_MAX_SWEPT = 100
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class LocalStore:
    """See `Store`. Raises `OSError` as the file system does; `Damage` for what is missing or cut short."""

    tier = "disk"

    def __init__(
        self, path: str, *, fs: FileSystem | None = None, nonce: Callable[[], str] | None = None, num_spare: int = 16
    ) -> None:
        self.url = path
        self._fs: FileSystem = fs if fs is not None else Disk()
        self._nonce = nonce if nonce is not None else lambda: secrets.token_hex(4)
        self._num_spare = num_spare
        self._ready = self._claimed = False
        self._data, self._heads, self._spare = (os.path.join(path, d) for d in ("data", "manifests", "spare"))

    # reading

    def generations(self) -> list[int]:
        numbers = [generation_number(name) for name in self._fs.names(self._heads)]
        return sorted(n for n in numbers if n is not None)

    def read_head(self, generation: int) -> bytes:
        return self._read_whole(os.path.join(self._heads, generation_name(generation)), MAX_HEAD_BYTES)

    def read_part(self, name: str, max_bytes: int) -> bytes:
        return self._read_whole(os.path.join(self._data, name), max_bytes)

    def _read_whole(self, path: str, max_bytes: int) -> bytes:
        with self._opened(path) as fd:
            size = self._fs.size(path) or 0
            if size > max_bytes:
                raise Damage(f"holds {size} bytes; at most {max_bytes} are allowed", file=os.path.basename(path))
            buffer = bytearray(size)
            done = read_fully(self._fs, fd, memoryview(buffer), 0)
            return bytes(buffer[:done])

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        fd = open_to_read(self._fs, path)
        try:
            yield fd
        finally:
            self._fs.close(fd)

    def open_data(self, name: str) -> LocalReader:
        return LocalReader(self._fs, os.path.join(self._data, name), name)

    def names(self) -> list[str]:
        return self._fs.names(self._data)

    def size(self, name: str) -> int | None:
        return self._fs.size(os.path.join(self._data, name))

    @contextlib.contextmanager
    def in_use(self, generation: int) -> Iterator[bytes]:
        path = os.path.join(self._heads, generation_name(generation))
        with self._opened(path) as fd:
            # A pruner that holds the lock is about to remove the name; one that had removed it left us a dead file.
            if not self._fs.lock(fd, exclusive=False) or not self._fs.is_at(fd, path):
                raise Damage("is being removed", file=generation_name(generation))
            yield self.read_head(generation)

    # writing

    def _prepare(self) -> None:
        if self._ready:
            return
        make_directory(self._fs, self.url)
        for directory in (self._data, self._heads, self._spare):
            self._fs.mkdir(directory)
        # Unconditional: another writer may have made them and died before it came to this.
        self._fs.sync_dir(self.url)
        self._ready = True

    def create(self, name: str, size_bytes: int) -> LocalWriter:
        self._prepare()
        path = os.path.join(self._data, name)
        try:
            return LocalWriter(self._fs, path, name, self._claim(path, size_bytes))
        except FileNotFoundError:  # somebody removed the directory: a retry makes it again
            self._ready = False
            raise

    def _claim(self, path: str, size_bytes: int) -> int:
        """Open a spare file under this name, the one nearest in size, or a new file where none can be had.

        Another writer may be faster: then the next. Whether somebody shares it (a hard link of a backup, a copy that is
        just being read) is asked only now: it lost the name that heads know it by when its generation went, so nobody
        comes to share it any more. One that is shared is left to those who do.
        """
        names = [(self._fs.size(os.path.join(self._spare, n)) or 0, n) for n in self._fs.names(self._spare)]
        for _, name in sorted(names, key=lambda pair: (abs(pair[0] - size_bytes), pair[1])):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rename(os.path.join(self._spare, name), path)
                self._claimed = True  # after it, so that whoever takes this back has synced the rename
                fd = self._unshared(path)
                if fd is not None:
                    return fd
                self._fs.unlink(path)
        return self._fs.open(path, "create")

    def _unshared(self, path: str) -> int | None:
        try:
            fd = self._fs.open(path, "overwrite")
        except OSError as error:
            if error.errno in ODD:
                return None
            raise
        if self._fs.is_only_ours(fd):
            return fd
        self._fs.close(fd)
        return None

    def put_part(self, name: str, data: bytes) -> None:
        self._prepare()
        self._write_whole(os.path.join(self._data, name), data)

    def _write_whole(self, path: str, data: bytes) -> None:
        fd = self._fs.open(path, "create")
        try:
            _write_fully(self._fs, fd, memoryview(data), 0)
            self._fs.fsync(fd)
        finally:
            self._fs.close(fd)

    def barrier(self) -> None:
        if self._claimed:
            # A rename between directories is two changes: a file that came back among the spare ones would be written
            # over while a head reaches it.
            self._claimed = False
            self._fs.sync_dir(self._spare)
        self._fs.sync_dir(self._data)

    def publish(self, generation: int, head: bytes) -> bool:
        self._prepare()
        final = os.path.join(self._heads, generation_name(generation))
        for temporary in self._temporaries(generation):
            self._write_whole(temporary, head)
            with contextlib.suppress(FileNotFoundError):
                if not self._publish_as(temporary, final):
                    return False
                break
        self._fs.sync_dir(self._heads)
        return True

    def _temporaries(self, generation: int) -> Iterator[str]:
        """Names for a head until it has its own: another save's `discard` may sweep it before."""
        for _ in range(_MAX_SWEPT):
            yield os.path.join(self._heads, f".tmp-{generation}-{self._nonce()}")
        raise OSError(errno.EBUSY, f"swept {_MAX_SWEPT} times before it had its name", self._heads)

    def _publish_as(self, temporary: str, final: str) -> bool:
        try:
            self._fs.link(temporary, final)
        except FileExistsError:
            self._remove(temporary)
            return False
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            # Without hard links: as atomic, but two publishers at the same instant are not refused.
            if self._fs.size(final) is not None:
                self._remove(temporary)
                return False
            self._fs.rename(temporary, final)
            return True
        self._remove(temporary)
        return True

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(path)

    def replace_head(self, generation: int, head: bytes) -> None:
        final = os.path.join(self._heads, generation_name(generation))
        for temporary in self._temporaries(generation):
            self._write_whole(temporary, head)
            with contextlib.suppress(FileNotFoundError):
                self._fs.rename(temporary, final)
                break
        self._fs.sync_dir(self._heads)

    # removing

    def withdraw(self, generations: Collection[int]) -> list[int]:
        gone = [g for g in sorted(generations) if self._withdraw_one(os.path.join(self._heads, generation_name(g)))]
        if gone:
            # Before anything it reached may be written over: else a crash brings the head back, its data gone.
            self._fs.sync_dir(self._heads)
        return gone

    def _withdraw_one(self, path: str) -> bool:
        try:
            fd = self._fs.open(path, "read")
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in ODD:
                raise
            self._remove(path)  # nobody reads a generation in it
            return True
        try:
            if not self._fs.lock(fd, exclusive=True):
                return False
            self._fs.unlink(path)
        finally:
            self._fs.close(fd)
        return True

    def discard(self, names: Collection[str], *, recycle: Collection[str] = ()) -> None:
        room = self._num_spare - len(self._fs.names(self._spare))
        for name in sorted(names):
            path = os.path.join(self._data, name)
            with contextlib.suppress(FileNotFoundError):
                if name in recycle and room > 0:
                    self._fs.rename(path, os.path.join(self._spare, name))
                    room -= 1
                else:
                    self._fs.unlink(path)
        for name in self._fs.names(self._heads):
            if name.startswith(".tmp-"):
                self._remove(os.path.join(self._heads, name))

    def make_room(self) -> int:
        """Give the spare files back to the file system; returns how many there were."""
        names = self._fs.names(self._spare)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(os.path.join(self._spare, name))
        return len(names)


class LocalWriter:
    """One data file. Direct where the file system and the caller's alignment allow it, buffered where not."""

    concurrent = True

    def __init__(self, fs: FileSystem, path: str, name: str, fd: int) -> None:
        self.name, self._fs, self._path, self._fd = name, fs, path, fd
        self._direct: int | None = None
        self._open = [fd]
        try:
            self._direct = self._open_direct()
        except OSError:
            self.abandon()
            raise
        self._open += [self._direct] if self._direct is not None else []

    def _open_direct(self) -> int | None:
        try:
            return self._fs.open(self._path, "overwrite", direct=True)
        except OSError as error:
            if error.errno in NO_DIRECT:
                return None
            raise

    def write(self, offset: int, data: memoryview) -> None:
        done = 0
        if self._direct is not None and offset % ALIGN == 0 and len(data) % ALIGN == 0:
            try:
                done = self._fs.pwrite(self._direct, data, offset)
            except OSError as error:
                if error.errno not in NO_DIRECT:
                    raise
        _write_fully(self._fs, self._fd, data[done:], offset + done)

    def finish(self, size_bytes: int) -> None:
        if self._fs.size(self._path) != size_bytes:
            self._fs.truncate(self._fd, size_bytes)
        self._fs.fsync(self._fd)
        self._close()

    def abandon(self) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self._fs.unlink(self._path)

    def _close(self) -> None:
        """Once, though a file that was finished may be abandoned: its numbers may be others' by then."""
        while self._open:
            with contextlib.suppress(OSError):
                self._fs.close(self._open.pop())


def make_directory(fs: FileSystem, path: str) -> None:
    """With what it lies in. Its name is durable when this returns, if it was not there before."""
    parent = os.path.dirname(os.path.abspath(path))
    try:
        made = fs.mkdir(path)
    except FileNotFoundError:
        make_directory(fs, parent)
        made = fs.mkdir(path)
    if made:
        fs.sync_dir(parent)


def _write_fully(fs: FileSystem, fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += fs.pwrite(fd, data[done:], offset + done)
