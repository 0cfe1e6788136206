"""Whether a directory can take checkpoints, asked before anything is trained. No torch.

Role: a small file is written, fsynced and removed; what is free is held against what a generation takes. Only for
places on this machine: an object store answers for itself. Changes nothing but that it makes the directory.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import secrets
from typing import Protocol

from outlast.checkpoint._local import make_directory
from outlast.checkpoint._open import open_store
from outlast.checkpoint._publish import heads
from outlast.checkpoint.fs import Disk
from outlast.checkpoint.occupancy import local_path
from outlast.checkpoint.retention import PruneResult, Retention, fewer
from outlast.checkpoint.store import Store
from outlast.checkpoint.threads import Threads
from outlast.core.protocol.saves.commit import SaveId
from outlast.errors import CheckpointError, EnvironmentFault

__all__ = ["check_writable", "give_back", "is_full", "make_room", "tried"]

_LOOK_BACK = 8  # newest generations
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PROBE = b"outlast looks whether it can write here\n" * 100


def is_full(error: BaseException | None) -> bool:
    """Whether a file system without room is at the bottom of this."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


class Prunes(Protocol):
    """What publishes and prunes in one place: an engine without a coordinator."""

    store: Store
    retention: Retention

    def prune(self) -> PruneResult: ...


def make_room(engine: Prunes) -> None:
    """The place is full: older generations go at once, and fewer are kept from here on. What refuses that will refuse
    the save as well, with a word."""
    with contextlib.suppress(OSError, CheckpointError):
        engine.retention = fewer(engine.retention, len(engine.store.generations()))
        engine.prune()


def give_back(store: Store, save: SaveId) -> None:
    """The save will never be a generation: its files go, which else stay until a newer one is published. Where there is
    no room, that is never."""
    with contextlib.suppress(OSError, CheckpointError):
        good, bad = heads(store, newest=_LOOK_BACK)
        if not bad and all(head.save != save.token for head in good):
            store.discard([name for name in store.names() if name.startswith(f"{save.token}-w")])


def tried(target: str, need_bytes: int, limit_s: float) -> str:
    """`check_writable`, then `lacking`; a disk that has not answered for so long is told by who loads from it."""
    asked = Threads(1, "outlast-try", limit_s=0.0).submit(_both, target, need_bytes)
    return asked.result() if concurrent.futures.wait([asked], limit_s).done else ""


def _both(target: str, need_bytes: int) -> str:
    check_writable(target)
    return lacking(target, need_bytes)


def check_writable(target: str) -> None:
    """Raises EnvironmentFault if nothing can be saved there. A disk that is full may have room later: see `lacking`."""
    path = local_path(target)
    if path is None:
        return
    try:
        _try(path)
    except OSError as error:
        if error.errno not in _FULL:
            raise EnvironmentFault(
                f"checkpoints cannot be written to {target}: {error.strerror}",
                did="nothing was trained",
                remedy="another --checkpoint-dir (Checkpoint(dir=…)); to go on from a place that is read only: "
                f"--resume {target} and another --checkpoint-dir",
            ) from error


def lacking(target: str, need_bytes: int) -> str:
    """Why a generation of so many bytes would find no room there, also after all but the newest had gone; or ""."""
    path = local_path(target)
    if path is None:
        return ""
    try:
        stat = os.statvfs(path)
        free, reusable = stat.f_bavail * stat.f_frsize, _reusable(path)
    except OSError:
        return ""
    if free + reusable >= need_bytes:
        return ""
    mib = 1 << 20
    return (
        f"{target} has {free / mib:.1f} MiB free and {reusable / mib:.1f} in older generations; "
        f"a generation takes at least {need_bytes / mib:.1f}"
    )


def _try(path: str) -> None:
    make_directory(Disk(), path)
    name = os.path.join(path, f".probe-{secrets.token_hex(8)}")
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, _PROBE)
        os.fsync(fd)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name)


def _reusable(path: str) -> int:
    found = heads(open_store(path), newest=1)[0]
    held = 0
    for directory in ("data", "spare"):
        with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(path, directory)) as entries:
            held += sum(entry.stat().st_size for entry in entries)
    return max(0, held - (found[0].bytes if found else 0))
