"""Memory shared between the processes of a host, without names: memfds passed over sockets or inherited.

A region has one writer, so a late write into somebody else's buffer cannot happen (protocol, 14); it vanishes with the
last process that maps it, so nothing is left behind after any crash.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import time

import msgspec

from outlast.core.phases import Phase
from outlast.core.protocol import StepTime

__all__ = ["Progress", "Region", "receive_fd", "send_fd"]


class Region:
    """A memfd mapped shared. `size` bytes, sparse until touched."""

    def __init__(self, size: int, fd: int | None = None, name: str = "outlast") -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, max(size, mmap.PAGESIZE))
        self.size = os.fstat(self.fd).st_size
        self.map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Forget the descriptor; the mapping lives as long as a tensor views it."""
        os.close(self.fd)


def send_fd(sock: socket.socket, fd: int) -> None:
    """Pass a descriptor over a unix socket, with one byte."""
    sock.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def receive_fd(sock: socket.socket) -> int:
    """The descriptor that `send_fd` passed. ConnectionError if the stream ended."""
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_LEN(fds.itemsize))
    if not data:
        raise ConnectionError("the connection ended")
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: fds.itemsize])
            return int(fds[0])
    raise ConnectionError("no descriptor came with the byte")


_WORDS = 16  # before the times of steps
_KEPT = 1024  # of the newest steps
_FIELDS = len(StepTime.__struct_fields__)


class Progress:
    """Where a rank is, in memory that its agent can read while user code holds the GIL (protocol, 19), and when it is
    dead: what it had committed is known to the step.

    Words: count of changes, phase, step, microbatch, bucket, since (monotonic ns), allowed (ns, 0 for no deadline),
    last sign of life (monotonic ns), count of commits; after them the times of the newest steps, in a ring.
    """

    SIZE = 8 * (_WORDS + _KEPT * _FIELDS)

    def __init__(self, region: Region) -> None:
        self.region = region
        self._words = memoryview(region.map).cast("q")

    def enter(self, phase: Phase, step: int = -1, microbatch: int = -1, bucket: int = -1, allowed_s: float = 0) -> int:
        """Publish the phase; returns the monotonic time in ns."""
        words, now = self._words, time.monotonic_ns()
        words[1], words[2], words[3], words[4] = phase, step, microbatch, bucket
        words[5] = words[7] = now
        words[6] = int(allowed_s * 1e9)
        words[0] += 1
        return now

    @property
    def changes(self) -> int:
        """How often a phase was entered: 0 until the process has reached `protect`."""
        return self._words[0]

    @property
    def joined(self) -> bool:
        """Whether the process has called `outlast.join`."""
        return self._words[7] != 0

    def alive(self, ahead_s: float = 0.0) -> None:
        """A sign of life inside a phase; `ahead_s`: for so long from now no other is owed."""
        self._words[7] = time.monotonic_ns() + int(ahead_s * 1e9)

    def read(self) -> tuple[Phase, int, int, float, float]:
        """(phase, step, microbatch, monotonic s of the last sign of life, allowed s or inf)."""
        words = self._words
        allowed = words[6] / 1e9 if words[6] else float("inf")
        return Phase(words[1]), words[2], words[3], max(words[5], words[7]) / 1e9, allowed

    def commit(self, time: StepTime) -> None:
        """A step was committed. It counts once the whole entry is written."""
        words, count = self._words, self._words[8]
        at = _WORDS + count % _KEPT * _FIELDS
        for index, value in enumerate(msgspec.structs.astuple(time)):
            words[at + index] = round(value * 1e9) if isinstance(value, float) else int(value)
        words[8] = count + 1

    @property
    def num_commits(self) -> int:
        """By this process; steps that it was given by others are not among them."""
        return self._words[8]

    def commits(self, since: int = 0) -> tuple[StepTime, ...]:
        """The times of commits number `since` and later, as far as they are kept."""
        count = self.num_commits
        return tuple(self._entry(number) for number in range(max(since, count - _KEPT), count))

    def _entry(self, number: int) -> StepTime:
        at = _WORDS + number % _KEPT * _FIELDS
        step, *nanoseconds, phase, first = self._words[at : at + _FIELDS]
        return msgspec.convert([step, *(ns / 1e9 for ns in nanoseconds), phase, bool(first)], StepTime)
