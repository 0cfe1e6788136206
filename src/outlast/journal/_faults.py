"""What the disk can do to a journal, told as one EnvironmentFault with its remedy.

Role: translate SQLite's and the operating system's errors. Pure: looks at nothing but the error and the path.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from outlast.errors import EnvironmentFault

__all__ = ["damaged", "is_transient", "newer", "os_fault", "sqlite_fault"]

_FULL_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# A full disk shows as FULL when a write fails, and as IOERR when delayed allocation fails at the sync or a size limit
# strikes; BUSY ends by itself. CANTOPEN: the log beside the file could not be created, as on a full disk.
_TRANSIENT = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
    }
)


def _primary(error: sqlite3.Error) -> int:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


def is_transient(error: sqlite3.Error) -> bool:
    """Whether the same write may succeed later, once somebody has made room or remounted the disk."""
    return _primary(error) in _TRANSIENT


def full(path: Path) -> EnvironmentFault:
    return EnvironmentFault(
        f"the disk under {path.parent} is full",
        did=f"{path.name} was not changed",
        remedy=f"free some space on it (df {path.parent}), or give --run-dir another disk",
    )


def damaged(path: Path, why: str, *, readable: bool = True) -> EnvironmentFault:
    """`readable`: whether some of it may be."""
    if not readable:
        return EnvironmentFault(f"{path} is damaged: {why}", did="nothing was changed", remedy="restore it from a copy")
    return EnvironmentFault(
        f"{path} is damaged: {why}",
        did="nothing was changed",
        remedy=f"restore it from a copy, or save what is readable: outlast export {path.parent} --salvage NEW-DIR",
    )


def newer(path: Path, found: int, known: int) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path} has format {found}; this outlast knows formats up to {known}",
        did="nothing was changed",
        remedy="use the outlast that wrote it, or a newer one",
    )


def read_only(path: Path) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path.parent} cannot be written",
        remedy="give --run-dir a directory you may write to, on a disk that is not mounted read-only",
    )


def unreadable(path: Path) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path} cannot be read", remedy="ask for permission to read it, or for a copy of its directory"
    )


def os_fault(error: OSError, path: Path) -> EnvironmentFault:
    """The operating system refused `path`."""
    if error.errno in _FULL_ERRNO:
        return full(path)
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return read_only(path)
    return EnvironmentFault(
        f"cannot open {path}: {error.strerror or error}", remedy=f"check that {path.parent} is a sound local directory"
    )


def sqlite_fault(error: sqlite3.Error, path: Path, *, reading: bool = False) -> EnvironmentFault:
    """SQLite refused `path`; `reading`: it was to be read only."""
    code = _primary(error)
    if code == sqlite3.SQLITE_FULL:
        return full(path)
    if code in _DAMAGED:
        return damaged(path, str(error))
    if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN}:
        return unreadable(path) if reading else read_only(path)
    if code == sqlite3.SQLITE_BUSY:
        return EnvironmentFault(
            f"{path} is held by another process in the middle of a write",
            did="nothing was changed",
            remedy="end the stopped or hanging coordinator of this run (outlast status names its process)",
        )
    return EnvironmentFault(
        f"{path}: {error}", did="the write was undone", remedy="check the disk (dmesg) and the space left on it (df)"
    )
