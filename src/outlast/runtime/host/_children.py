"""Starting, watching and killing child processes, one by one, through pidfds.

A child gets PR_SET_PDEATHSIG before it executes anything and compares its parent, so it never outlives the thread that
started it: start children from a main thread only (protocol, 22). It decides nothing about who should live.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.runtime.host.silence import kernel_state

__all__ = ["Child", "Exit", "start"]

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_BEGIN_S = 0.25  # for a child to become its program


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a child ended: `signal` or `code`, whichever applies."""

    signal: int | None
    code: int | None

    def __str__(self) -> str:
        if self.signal is not None:
            return signal.Signals(self.signal).name if self.signal in set(signal.Signals) else f"signal {self.signal}"
        return f"exit code {self.code}"


class Child:
    """A running child of this process. `fd` becomes readable when it ends; then `reap` tells how."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        self._reaped = False

    def send(self, number: signal.Signals) -> None:
        """A signal to exactly this process, whatever its number is reused for; nothing once it was reaped."""
        if self._reaped:  # its descriptor is closed, and may be another's by now
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def wait(self) -> None:
        """Until a child that was killed is gone."""
        if not self._reaped:
            self._collect()

    def reap(self, sweep: bool = False) -> Exit | None:
        """None while it lives. Call it after `fd` was readable. What it forked into its session is killed with it,
        unless it ended well and `sweep` is false."""
        ended = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if sweep or ended.si_code != os.CLD_EXITED or ended.si_status:  # until it is reaped the number is its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        code = self._collect()
        return Exit(signal=-code, code=None) if code < 0 else Exit(signal=None, code=code)

    def _collect(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self._reaped = True
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


class _Begun(subprocess.Popen[bytes]):
    """A child that has become its program. Until then the parent waits for it and does nothing else, so one that is
    stopped on the way is continued, as often as it is stopped: nobody else could. `options`: as of `Popen`."""

    pid = 0

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        left = signal.setitimer(signal.ITIMER_REAL, 0.0)  # no alarm comes to a handler that it is not for
        before = signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, _BEGIN_S, _BEGIN_S)
        try:
            super().__init__(command, **options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, *left)

    def _look(self, *_: object) -> None:
        if self.pid and kernel_state(self.pid) == ("T", False):
            os.kill(self.pid, signal.SIGCONT)


def start(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    log: Path | None = None,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
) -> Child:
    """Start a child in a session of its own (a terminal's Ctrl-C is for the launcher), output to `log`. OSError."""
    parent = os.getpid()

    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("ab")) if log is not None else None
        try:
            process = _Begun(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(pass_fds),
                preexec_fn=before_exec,
                start_new_session=True,
                cwd=cwd,
            )
        except subprocess.SubprocessError as error:  # the child had no memory to begin
            raise OSError(errno.ENOMEM, str(error)) from error
    process.returncode = 0  # it is ours to reap, not subprocess's
    try:
        return Child(process.pid)
    except OSError:  # no descriptor for it: nobody could watch or end it
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        raise
