"""The worker's side of a measurement: says when a step was committed, how much of it was computing, and waits its turn.

Runs in every system's process, so it needs only the standard library. A commit costs one small `send`; the phase that
a process is in is a byte in a mapped file, so that it can be read after the process is dead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

__all__ = ["BITS", "COMPUTE", "EXCHANGE", "FINGERPRINTS_S", "OTHER", "RECORD", "SHARE_BYTES", "Probe", "in_turn"]

RECORD = struct.Struct("<cxxxiqdddq")
"""kind, rank, step, monotonic seconds, processor seconds of the process, value, count. Kinds: h hello (step = pid), c
commit (seconds and number of microbatches computed), r ready for the next block (count = peak bytes), n any number
(step = key)."""
OTHER, COMPUTE, EXCHANGE = 0, 1, 2
SHARE_BYTES = 1
"""Key of a number: resident memory, each page divided by how many processes map it (PSS), at a block's end."""
FINGERPRINTS_S = 2
"""Key of a number: processor seconds a step that fingerprints took, over a block."""
BITS = 1000
"""Key of a number, less the step's: 48 bits of the fingerprint of the state after it."""


class Probe:
    """One a process. Without BENCH_SOCKET in the environment it does nothing."""

    def __init__(self, rank: int) -> None:
        self.rank, self.compute_s, self.num_computed = rank, 0.0, 0
        self.block = int(os.environ.get("BENCH_BLOCK", "0"))
        where = os.environ.get("BENCH_SOCKET")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) if where else None
        if self._socket is None or where is None:
            self._phase: mmap.mmap | bytearray = bytearray(1)
            return
        self._phase = _map(Path(f"{where}.{os.getpid()}"))
        self._socket.connect(where)
        self._send(b"h", os.getpid())

    def _send(self, kind: bytes, step: int, value: float = 0.0, count: int = 0) -> None:
        if self._socket is not None:
            self._socket.sendall(RECORD.pack(
                kind, self.rank, step, time.monotonic(), time.process_time(), value, count
            ))  # fmt: skip

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around forward and backward of one microbatch. DDP's exchange hides in the last one's backward."""
        began = time.monotonic()
        self._phase[0] = COMPUTE
        yield
        self._phase[0] = EXCHANGE
        self.compute_s += time.monotonic() - began
        self.num_computed += 1

    def commit(self, step: int) -> None:
        """Step number `step` (from 0) is applied here. At a block's end, wait until the harness says go."""
        self._phase[0] = OTHER
        self._send(b"c", step, self.compute_s, self.num_computed)
        self.compute_s, self.num_computed = 0.0, 0
        if self.block and (step + 1) % self.block == 0:
            self.wait_turn(step)

    def wait_turn(self, step: int) -> None:
        """Ends when the harness has sent one byte. Raises SystemExit when it is gone."""
        self.number(SHARE_BYTES, _kib("/proc/self/smaps_rollup", "Pss:") * 1024)
        self._send(b"r", step, count=_kib("/proc/self/status", "VmHWM:") * 1024)
        if self._socket is not None and not self._socket.recv(1):
            raise SystemExit("the benchmark's harness is gone")

    def number(self, key: int, value: float) -> None:
        """Report any other figure under a key that the benchmark chooses."""
        self._send(b"n", key, value)


def in_turn(variants: Sequence[T], step: int) -> T:
    """Which of several variants this step is for: each once in every round, first another one each time."""
    return variants[(step + step // len(variants)) % len(variants)]


def _map(path: Path) -> mmap.mmap:
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), mmap.PAGESIZE)


def _kib(path: str, field: str) -> int:
    """A figure that the kernel keeps about this process, in KiB."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0
