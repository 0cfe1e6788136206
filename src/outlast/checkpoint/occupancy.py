"""One run at a time saves in a local directory. No torch.

Role: two live runs in one directory would sweep each other's unpublished files, so a second one is refused. Every
process of a run holds a lock on a file of its own under `.live/`, which the kernel releases when the process ends,
however it ends: nothing has to be cleaned up after a crash. Invariants: processes of one run never refuse each other,
readers need no lock, and a place without locks (an object store, a file system that has none, a directory that cannot
be written) refuses nobody. Does not see runs on other hosts where the file system keeps locks to one host.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from outlast.checkpoint._local import make_directory
from outlast.checkpoint.fs import Disk
from outlast.checkpoint.threads import Threads
from outlast.errors import ConfigError

__all__ = ["Occupancy", "Occupant", "occupants", "occupy"]

_LIVE = ".live"
_NAME = re.compile(r"run-[0-9a-f]{16}\.lock")  # whatever else lies there is not ours to touch
_LOOK_S = 0.05
_WAIT_S = 10.0
"""How long the processes of a run that was killed may take to end: the kernel ends them one after the other."""


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """A live process that saves there."""

    run: str
    pid: int
    host: str


class Occupancy:
    """Held until `leave`, until nobody refers to it any more, or until the process ends."""

    def __init__(self, held: _Held | None = None) -> None:
        self.leave = weakref.finalize(self, _let_go, held)


class _Held(NamedTuple):
    fd: int
    path: str
    pid: int


def _let_go(held: _Held | None) -> None:
    if held is not None and held.pid == os.getpid():  # a fork of ours ends without us
        with contextlib.suppress(OSError):
            os.unlink(held.path)
        with contextlib.suppress(OSError):
            os.close(held.fd)


def occupy(target: str, run: str, *, wait_s: float | None = None, limit_s: float = 600.0) -> Occupancy:
    """Say that `run` saves at `target`. Waits `wait_s` (10 s) for another one that is just
    ending.

    Raises `ConfigError` if another run's process is alive there. A disk that does not answer for `limit_s` refuses
    nobody.
    """
    path = local_path(target)
    if path is None:
        return Occupancy()
    wait_s = _WAIT_S if wait_s is None else wait_s
    coming = Threads(1, "outlast-occupy", limit_s=0.0).submit(_occupy, path, run, wait_s)
    if not concurrent.futures.wait([coming], wait_s + limit_s).done:
        return Occupancy()
    return coming.result()


def _occupy(path: str, run: str, wait_s: float) -> Occupancy:
    try:
        for directory in (path, os.path.join(path, _LIVE)):
            make_directory(Disk(), directory)
        found = _come_in(path, run, wait_s)
    except OSError:  # a directory that cannot be written, or has no locks: the saves say what is wrong with it
        return Occupancy()
    if isinstance(found, Occupant):
        raise _refusal(path, found)
    return Occupancy(found)


def _come_in(path: str, run: str, wait_s: float) -> _Held | Occupant | None:
    """What is held then; or who is there still; or None if somebody stopped with the gate in hand."""
    end_s, other = time.monotonic() + wait_s, None
    for mine in _tries(path, end_s):
        if mine:
            here = (os.getpid(), socket.gethostname())
            other = next((o for o in _living(path) if o.run != run and (o.pid, o.host) != here), None)
            if other is None:
                return _hold(path, run)
    return other


def _refusal(target: str, other: Occupant) -> ConfigError:
    return ConfigError(
        f"another run saves at {target}: run {other.run or '(without a name)'}, process {other.pid} on {other.host}",
        did="nothing was trained, and nothing there was touched",
        remedy="give each run its own --checkpoint-dir (Checkpoint(dir=…)), or stop the other run first",
    )


def occupants(target: str) -> list[Occupant]:
    """The live processes that save there; looks only, and makes nothing. Empty where that cannot be known."""
    path = local_path(target)
    if path is None:
        return []
    with contextlib.suppress(OSError):
        for mine in _tries(path, time.monotonic() + 1.0):
            if mine:
                return _living(path)
    return []


def _tries(path: str, end_s: float) -> Iterator[bool]:
    """Again and again until then, at least once: whether the gate is ours, for the time of one turn."""
    pause = threading.Event()
    while True:
        with _gate(path) as mine:
            yield mine
        if time.monotonic() >= end_s:
            return
        pause.wait(_LOOK_S)


def local_path(target: str) -> str | None:
    scheme, separator, rest = target.partition("://")
    return target if not separator else rest if scheme == "file" else None


@contextlib.contextmanager
def _gate(path: str) -> Iterator[bool]:
    """One process at a time looks and comes in. False if another is at it."""
    fd = os.open(os.path.join(path, _LIVE), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


def _hold(path: str, run: str) -> _Held:
    """Behind the gate, so that nobody takes a file that is not locked yet for a dead one's."""
    mine = os.path.join(path, _LIVE, f"run-{secrets.token_hex(8)}.lock")
    # Held for reading: a file open for writing would keep the file system from being made read-only.
    fd = os.open(mine, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    held = _Held(fd, mine, os.getpid())
    try:
        _lock(fd)
        with open(mine, "wb") as file:
            file.write(msgspec.json.encode(Occupant(run=run, pid=os.getpid(), host=socket.gethostname())))
    except OSError:
        _let_go(held)
        raise
    return held


def _living(path: str) -> list[Occupant]:
    found = []
    for name in sorted(filter(_NAME.fullmatch, os.listdir(os.path.join(path, _LIVE)))):
        with contextlib.suppress(FileNotFoundError):
            occupant = _look(os.path.join(path, _LIVE, name))
            found += [occupant] if occupant is not None else []
    return found


def _look(path: str) -> Occupant | None:
    """Who holds this file; the file of a dead process is removed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _lock(fd):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        return msgspec.json.decode(os.read(fd, 4096), type=Occupant)
    except msgspec.MsgspecError:
        return Occupant(run="?", pid=0, host="?")
    finally:
        os.close(fd)
