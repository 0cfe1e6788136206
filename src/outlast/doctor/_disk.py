"""Whether a directory can hold a journal or checkpoints: its file system, room, durability, O_DIRECT."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from outlast.doctor._finding import Finding
from outlast.journal import find_mount, is_network

__all__ = ["look_at_disk"]

_GIB = 2**30
_PAGE = 4096
_SLOW_SYNC_S = 0.1


def look_at_disk(name: str, place: Path) -> Iterator[Finding]:
    """Findings about the directory `place`, or about the nearest one above it that exists; what is written to try it
    is removed. `name`: what it is for ("run directory")."""
    there = _nearest(place)
    if there is None or not there.is_dir():
        yield Finding(check=name, level="error", what=f"{place} is no directory", remedy="give a directory")
        return
    yield from _kind(name, there)
    free = shutil.disk_usage(there).free
    if free < _GIB:
        yield Finding(
            check=name,
            level="warning",
            what=f"{free / _GIB:.2f} GiB free under {there}",
            remedy="free space, or another place: journals go on in memory, checkpoints fail",
            figures={"free_bytes": free},
        )
    yield from _tried(name, there, free)


def _nearest(place: Path) -> Path | None:
    for folder in (place.absolute(), *place.absolute().parents):
        if folder.exists():
            return folder
    return None


def _kind(name: str, there: Path) -> Iterator[Finding]:
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    except OSError:
        return
    mount = find_mount(PurePosixPath(there.resolve()), mounts)
    if mount is not None and is_network(mount.fstype) and name == "run directory":
        yield Finding(
            check=name,
            level="error",
            what=f"{there} lies on {mount.fstype}, a network file system",
            remedy="--run-dir on a local disk; checkpoints may lie on this one",
        )
    elif mount is not None and mount.fstype == "tmpfs":
        yield Finding(
            check=name,
            level="note",
            what=f"{there} lies in memory (tmpfs): it is gone with the machine",
            remedy="a disk, if what is kept here shall survive a power cut",
        )


def _tried(name: str, there: Path, free: int) -> Iterator[Finding]:
    """One page written and made durable, then one past the page cache."""
    path = there / f".outlast-doctor-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        yield Finding(
            check=name,
            level="error",
            what=f"{there} cannot be written: {error.strerror}",
            remedy="mend its rights, or give another directory",
        )
        return
    try:
        begin = time.perf_counter()
        os.write(fd, bytes(_PAGE))
        os.fdatasync(fd)
        took_s = time.perf_counter() - begin
        direct = _takes_direct(path)
    except OSError as error:
        yield Finding(
            check=name,
            level="error",
            what=f"a page could not be made durable in {there}: {error.strerror}",
            remedy="see dmesg; give another disk",
        )
        return
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
    figures: dict[str, float | int | str] = {"sync_s": took_s, "free_bytes": free, "direct": int(direct)}
    if took_s > _SLOW_SYNC_S:
        yield Finding(
            check=name,
            level="warning",
            what=f"a page took {took_s * 1e3:.0f} ms to be durable in {there}",
            remedy="a disk that is not shared: each change of the view waits for this once",
            figures=figures,
        )
    else:
        how = "" if direct else "; no O_DIRECT there, so saves go through the page cache"
        yield Finding(
            check=name,
            level="ok" if direct else "note",
            what=f"{there}: {free / _GIB:.1f} GiB free, durable in {took_s * 1e3:.1f} ms{how}",
            remedy="" if direct else "ext4 or xfs, if saves slow the machine down",
            figures=figures,
        )


def _takes_direct(path: Path) -> bool:
    """Whether a page can be written past the page cache."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        with mmap.mmap(-1, _PAGE) as page:
            os.write(fd, page)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        os.close(fd)
    return True
