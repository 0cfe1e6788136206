"""A file system in memory that can die at any call and forget whatever was not fsynced.

Role: the crash model of the tests. What survives a crash: of each file, what was fsynced, and any subset of the writes
since; of each directory, what was synced, and any subset of the changes since (a rename is one change). It also counts
calls, dies at the n-th, and leaves fsyncs out on request, to show that each is needed.
"""

from __future__ import annotations

import errno
import itertools
import random
import sys
from collections.abc import Callable


class Died(Exception):
    """The process was killed here. Every later call raises it too."""


class Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""
        self.unsynced: list[tuple[str, int, bytes]] = []  # ("write", offset, bytes) or ("truncate", size, b"")
        self.locks = 0


class Directory:
    def __init__(self) -> None:
        self.entries: dict[str, Inode | Directory] = {}
        self.durable: dict[str, Inode | Directory] = {}
        self.unsynced: list[list[tuple[str, Inode | Directory | None]]] = []  # each change: (name, what or gone)


class CrashFs:
    """See `outlast.checkpoint.fs.FileSystem`."""

    def __init__(self) -> None:
        self.root = Directory()
        self.calls = 0
        self.die_at: int | None = None
        self.dead = False
        self.left_out: str | None = None  # the place in the code whose syncs are not carried out
        self.syncs: list[str] = []  # places in the code, in the order of their syncs
        self.fail: Callable[[str, str], OSError | None] = lambda call, path: None
        self._fds: dict[int, tuple[Inode, str, set[str]]] = {}
        self._next = itertools.count(3)

    def _call(self, name: str, path: str = "") -> None:
        if self.dead:
            raise Died
        error = self.fail(name, path)
        if error is not None:
            raise error
        self.calls += 1
        if self.die_at is not None and self.calls >= self.die_at:
            self.dead = True
            raise Died

    def _dir(self, path: str) -> tuple[Directory, str]:
        parts = [p for p in path.split("/") if p]
        here: Inode | Directory = self.root
        for part in parts[:-1]:
            if not isinstance(here, Directory) or part not in here.entries:
                raise FileNotFoundError(errno.ENOENT, "no such directory", path)
            here = here.entries[part]
        assert isinstance(here, Directory)
        return here, parts[-1] if parts else ""

    def _find(self, path: str) -> Inode | Directory:
        parent, name = self._dir(path)
        if not name:
            return parent
        if name not in parent.entries:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return parent.entries[name]

    def _change(self, directory: Directory, *changes: tuple[str, Inode | Directory | None]) -> None:
        for name, what in changes:
            if what is None:
                directory.entries.pop(name, None)
            else:
                directory.entries[name] = what
        directory.unsynced.append(list(changes))

    def _inode(self, path: str) -> Inode:
        found = self._find(path)
        if isinstance(found, Directory):
            raise IsADirectoryError(errno.EISDIR, "a directory", path)
        return found

    # files

    def open(self, path: str, mode: str, *, direct: bool = False) -> int:
        self._call("open", path)
        parent, name = self._dir(path)
        if mode == "create":
            if name in parent.entries:
                raise FileExistsError(errno.EEXIST, "exists", path)
            self._change(parent, (name, Inode()))
        fd = next(self._next)
        self._fds[fd] = (self._inode(path), path, set())
        return fd

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        inode, path, _ = self._fds[fd]
        self._call("write", path)
        count = max(1, len(data) // 2) if len(data) > 8192 else len(data)  # short writes happen
        self._write(inode, offset, bytes(data[:count]))
        inode.unsynced.append(("write", offset, bytes(data[:count])))
        return count

    @staticmethod
    def _write(inode: Inode, offset: int, data: bytes) -> None:
        if len(inode.data) < offset:
            inode.data.extend(bytes(offset - len(inode.data)))
        inode.data[offset : offset + len(data)] = data

    def pread(self, fd: int, buffer: memoryview, offset: int, *, cached: bool = False) -> int:
        inode, path, _ = self._fds[fd]
        self._call("read", path)
        if cached:
            raise OSError(errno.EAGAIN, "not in the page cache")
        data = inode.data[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def truncate(self, fd: int, size: int) -> None:
        inode, path, _ = self._fds[fd]
        self._call("truncate", path)
        del inode.data[size:]
        inode.data.extend(bytes(size - len(inode.data)))
        inode.unsynced.append(("truncate", size, b""))

    def _left_out(self) -> bool:
        frame = sys._getframe(2)
        above = frame.f_back.f_code.co_name if frame.f_back is not None else ""
        self.syncs.append(f"{above} > {frame.f_code.co_name}:{frame.f_lineno}")
        return self.left_out == self.syncs[-1]

    def fsync(self, fd: int) -> None:
        inode, path, _ = self._fds[fd]
        self._call("fsync", path)
        if not self._left_out():
            inode.durable, inode.unsynced = bytes(inode.data), []

    def close(self, fd: int) -> None:
        if self.dead:
            return
        inode, _, held = self._fds.pop(fd)
        if held:
            inode.locks = 0 if "exclusive" in held else max(0, inode.locks - 1)

    # names

    def size(self, path: str) -> int | None:
        try:
            found = self._find(path)
        except FileNotFoundError:
            return None
        return len(found.data) if isinstance(found, Inode) else 0

    def names(self, path: str) -> list[str]:
        try:
            found = self._find(path)
        except FileNotFoundError:
            return []
        return sorted(found.entries) if isinstance(found, Directory) else []

    def mkdir(self, path: str) -> bool:
        self._call("mkdir", path)
        parent, name = self._dir(path)
        if not name or name in parent.entries:
            return False
        self._change(parent, (name, Directory()))
        return True

    def rename(self, source: str, target: str) -> None:
        self._call("rename", source)
        here, old = self._dir(source)
        there, new = self._dir(target)
        if old not in here.entries:
            raise FileNotFoundError(errno.ENOENT, "no such file", source)
        moved = here.entries[old]
        if here is there:
            self._change(here, (old, None), (new, moved))
        else:  # two directories: either half may be lost
            self._change(there, (new, moved))
            self._change(here, (old, None))

    def link(self, source: str, target: str) -> None:
        self._call("link", target)
        inode = self._inode(source)
        parent, name = self._dir(target)
        if name in parent.entries:
            raise FileExistsError(errno.EEXIST, "exists", target)
        self._change(parent, (name, inode))

    def unlink(self, path: str) -> None:
        self._call("unlink", path)
        self._find(path)
        parent, name = self._dir(path)
        self._change(parent, (name, None))

    def sync_dir(self, path: str) -> None:
        self._call("sync_dir", path)
        found = self._find(path)
        assert isinstance(found, Directory)
        if not self._left_out():
            found.durable, found.unsynced = dict(found.entries), []

    def lock(self, fd: int, *, exclusive: bool) -> bool:
        inode, _, held = self._fds[fd]
        self._call("lock")
        if inode.locks < 0 or (exclusive and inode.locks > 0):
            return False
        inode.locks = -1 if exclusive else inode.locks + 1
        held.add("exclusive" if exclusive else "shared")
        return True

    def is_at(self, fd: int, path: str) -> bool:
        try:
            return self._fds[fd][0] is self._find(path)
        except FileNotFoundError:
            return False

    def is_only_ours(self, fd: int) -> bool:
        def names(directory: Directory) -> int:
            inner = (names(kid) for kid in directory.entries.values() if isinstance(kid, Directory))
            return sum(kid is inode for kid in directory.entries.values()) + sum(inner)

        inode = self._fds[fd][0]
        return names(self.root) == 1 and sum(held is inode for held, *_ in self._fds.values()) == 1

    # the crash

    def crashed(self, choose: random.Random | bool) -> CrashFs:
        """The disk after the power came back. `choose`: True keeps, False loses all that was not synced."""

        def kept() -> bool:
            return choose if isinstance(choose, bool) else choose.random() < 0.5

        inodes: dict[int, Inode] = {}

        def copy_inode(old: Inode) -> Inode:
            if id(old) not in inodes:
                new = inodes[id(old)] = Inode()
                new.data = bytearray(old.durable)
                for kind, at, data in old.unsynced:
                    if not kept():
                        continue
                    if kind == "write":
                        # A write may also be torn: only its first blocks reach the disk.
                        part = data if isinstance(choose, bool) or kept() else data[: choose.randrange(len(data) + 1)]
                        self._write(new, at, part)
                    else:
                        del new.data[at:]
                        new.data.extend(bytes(at - len(new.data)))
                new.durable = bytes(new.data)
            return inodes[id(old)]

        def copy_dir(old: Directory) -> Directory:
            entries = dict(old.durable)
            for change in old.unsynced:
                if kept():
                    for name, what in change:
                        if what is None:
                            entries.pop(name, None)
                        else:
                            entries[name] = what
            new = Directory()
            for name, what in entries.items():
                new.entries[name] = copy_dir(what) if isinstance(what, Directory) else copy_inode(what)
            new.durable = dict(new.entries)
            return new

        after = CrashFs()
        after.root = copy_dir(self.root)
        return after
