"""What a launcher and an agent ask of the system they run on: the time, which descriptors are ready, its processes.

It is passed in, so that what they do about deaths, silence and signals can be tried in one process and in a time that
jumps. It decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from outlast.runtime.host._children import Child, start
from outlast.runtime.host.silence import cpu_s, is_full, kernel_state

__all__ = ["HERE", "HostSystem"]


class HostSystem:
    """The system of this host itself."""

    def now_s(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def now_ns(self) -> int:
        """The same clock, in nanoseconds."""
        return time.monotonic_ns()

    def ready(self, fds: Iterable[int], within_s: float) -> list[int]:
        """Those of the descriptors that are readable or at their end, as soon as there is one; none after that time."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(within_s * 1000.0)]

    def start(
        self, command: Sequence[str], *, environ: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> Child:
        """Start a child that dies with this process; its output goes to `log`. OSError."""
        return start(command, environ=environ, log=log, pass_fds=pass_fds)

    def state(self, pid: int) -> tuple[str, bool]:
        """(the kernel's state letter of a process, X for gone; whether a debugger is attached)."""
        return kernel_state(pid)

    def cpu_s(self, pid: int) -> float:
        """Processor time of all the process's threads, in seconds."""
        return cpu_s(pid)

    def is_full(self, pid: int) -> bool:
        """Whether a process has no descriptor left."""
        return is_full(pid)

    def reap_strangers(self, known: Collection[int]) -> None:
        """Have done with children that nobody here started and that have ended, up to the first that is `known`: that
        one is dealt with where it is waited for, and the others when it has been."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in known:
                    return
                os.waitpid(ended.si_pid, 0)


HERE = HostSystem()
"""It holds nothing."""
