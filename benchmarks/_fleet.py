"""The harness's side of a measurement: starts one system's processes, hears their commits, hurts them, ends them.

Invariant: whatever a fleet started is dead when its `with` block ends, stopped processes and orphans of a killed
launcher included. It waits on sockets and process descriptors with deadlines; it never polls on a timer.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks._common import ROOT
from benchmarks._probe import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

__all__ = ["Commit", "Fleet", "FleetStuck", "Member"]


class FleetStuck(Exception):
    """A system did not do in time what the benchmark waits for. Carries the tail of its log."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One member committed one step. `at_s`: CLOCK_MONOTONIC; `compute_s`, `num_computed`: since the last one; `cpu_s`:
    of all its threads since it was started."""

    step: int
    at_s: float
    compute_s: float
    num_computed: int
    cpu_s: float = 0.0


@dataclasses.dataclass(kw_only=True, slots=True)
class Member:
    """One worker process, from its greeting on."""

    pid: int
    rank: int
    greeted_s: float
    link: socket.socket
    commits: list[Commit] = dataclasses.field(default_factory=list)
    numbers: dict[int, float] = dataclasses.field(default_factory=dict)
    peak_bytes: int = 0
    waiting: bool = False
    gone: bool = False
    _rest: bytes = b""


class Fleet:
    """One system under test. `commands`: what to start; workers find this harness by BENCH_SOCKET."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> None:
        self.name, self.members = name, list[Member]()
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self._commands = [list(map(str, command)) for command in commands]
        self._env = {**os.environ, **_QUIET, "BENCH_SOCKET": str(self.folder / "s"), **(env or {})}
        self._env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        self.processes: list[subprocess.Popen[bytes]] = []
        self.num_ended = 0

    def set_block(self, num_steps: int) -> None:
        """Workers started from now on wait after every `num_steps` steps for `release`."""
        self._env["BENCH_BLOCK"] = str(num_steps)

    def __enter__(self) -> Self:
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(self._env["BENCH_SOCKET"])
        listener.listen(64)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._log = self._stack.enter_context((self.folder / "log").open("w+b"))
        for command in self._commands:
            self.start(command)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self.processes:
            _signal_group(process.pid, signal.SIGKILL)
        for member in self.members:
            if not member.gone:
                _signal(member.pid, signal.SIGKILL)
            member.link.close()
        for process in self.processes:
            process.wait()
        self._stack.close()

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """One more process, in a session of its own."""
        process = subprocess.Popen(
            list(command), env=self._env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_harness,
        )  # fmt: skip
        self.processes.append(process)
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, self._mark_ended)
        return process

    def _mark_ended(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self.num_ended += 1

    def _accept(self, listener: socket.socket) -> None:
        link, _ = listener.accept()
        self._selector.register(link, selectors.EVENT_READ, self._greet)

    def _greet(self, link: socket.socket) -> None:
        data = link.recv(RECORD.size, socket.MSG_WAITALL)
        if len(data) < RECORD.size:
            self._selector.unregister(link)
            link.close()
            return
        _, rank, pid, greeted_s, *_ = RECORD.unpack(data)
        member = Member(pid=pid, rank=rank, greeted_s=greeted_s, link=link)
        self.members.append(member)
        self._selector.modify(link, selectors.EVENT_READ, lambda _: self._hear(member))

    def _hear(self, member: Member) -> None:
        try:
            data = member.link.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            member.gone = True
            self._selector.unregister(member.link)
            return
        data = member._rest + data
        whole = len(data) - len(data) % RECORD.size
        member._rest = data[whole:]
        for kind, _, step, at_s, cpu_s, value, count in RECORD.iter_unpack(data[:whole]):
            if kind == b"c":
                member.commits.append(Commit(step=step, at_s=at_s, compute_s=value, num_computed=count, cpu_s=cpu_s))
            elif kind == b"r":
                member.waiting, member.peak_bytes = True, count
            elif kind == b"n":
                member.numbers[step] = value

    def wait_for(self, what: str, ready: Callable[[], bool], timeout_s: float) -> None:
        """Hear members until `ready()`. Raises FleetStuck when `timeout_s` is over or every process has ended."""
        until = time.monotonic() + timeout_s
        while not ready():
            left = until - time.monotonic()
            if left <= 0 or self.num_ended == len(self.processes):
                raise FleetStuck(f"{self.name}: no {what} within {timeout_s - left:.0f} s\n{self.tail()}")
            self._turn(left)

    def listen(self, seconds: float) -> None:
        """Hear members for that long, whatever happens."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._turn(left)

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fileobj)

    @property
    def living(self) -> list[Member]:
        """Members whose connection is open (a stopped process keeps its own)."""
        return [member for member in self.members if not member.gone]

    def release(self) -> None:
        """Let every member that waits at the end of its block go on."""
        for member in self.living:
            if member.waiting:
                member.waiting = False
                with contextlib.suppress(ConnectionError):
                    member.link.send(b"g")

    def all_wait(self, num: int) -> bool:
        return sum(member.waiting for member in self.living) >= num

    def phase(self, member: Member) -> str:
        """Where the process is, or was when it died, as its own mapped byte says."""
        byte = Path(f"{self._env['BENCH_SOCKET']}.{member.pid}").read_bytes()[0]
        return ("other", "compute", "exchange")[byte]

    def tail(self, num_bytes: int = 3000) -> str:
        """The last of what the processes printed."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - num_bytes))
        return self._log.read().decode(errors="replace")


_QUIET = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


def _die_with_harness() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
