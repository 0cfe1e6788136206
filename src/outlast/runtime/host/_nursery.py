"""Where an agent's ranks come from: a process beside it that has loaded torch and is forked for each (`_preloaded.py`).

Loading torch and an optimizer takes seconds of processor time, and minutes from a busy network file system. A
replacement pays neither, and takes no core from the survivors. This is the agent's end; it loads no torch. Ranks are
the agent's own children as if it had started them: it adopts them (PR_SET_CHILD_SUBREAPER), and they die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from outlast.runtime.host._children import Child, start

__all__ = ["Nursery", "Preloading"]

_libc = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER = 36
_PROGRAM = str(Path(__file__).with_name("_preloaded.py"))
_FORK_S = 2.0  # to fork; who takes longer is stopped or stuck, and the rank is started without it
_END_S = 0.5  # for one that was killed to be gone; longer only if a disk holds it
_MOST = 8  # of these processes in an agent's life: whatever ends them ends the next one too


class Nursery:
    """One such process. `fd` becomes readable when it is ready, or has ended: then `hear`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int]) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_FORK_S)
        self.fd = self._sock.fileno()
        self.ready = False
        python, *script = command
        with theirs:
            self._child = start(
                [python, _PROGRAM, *script],
                environ={**environ, "OUTLAST_NURSERY_FD": str(theirs.fileno()), "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno(), *pass_fds],
            )
        self.pid = self._child.pid

    def hear(self) -> bool:
        """Whether it is there. After True it is `ready`."""
        try:
            self.ready = bool(self._sock.recv(16))
        except OSError:
            self.ready = False
        return self.ready

    def start(self, environ: Mapping[str, str], log: Path, progress_fd: int) -> Child:
        """Fork a rank: `environ` is added to its own. TimeoutError or ConnectionError: it is no good any more; any
        other OSError would have met a start without it, too."""
        with log.open("ab") as out:
            go_r, go_w = os.pipe2(os.O_CLOEXEC)
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                request = msgspec.msgpack.encode(dict(environ))
                socket.send_fds(self._sock, [request], [out.fileno(), progress_fd, go_r])
                child = self._adopt(self._sock.recv(16))
                os.write(go_w, b"g")  # without it, a rank whose number never came would train beside its successor
                return child
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # what a rank leaves behind is not the agent's
                os.close(go_r)
                os.close(go_w)

    def _adopt(self, said: bytes) -> Child:
        if not said:
            raise ConnectionError("the process that replicas are forked from has ended")
        if not int(said):
            raise BlockingIOError(errno.EAGAIN, "no process to be had for a replica")
        status = Path(f"/proc/{int(said)}/stat").read_text().rpartition(")")[2].split()
        if int(status[1]) != os.getpid():
            raise ConnectionError("this system does not let an agent adopt its replicas")
        return Child(int(said))

    def wake(self) -> None:
        self._child.send(signal.SIGCONT)

    def close(self) -> None:
        """End it, with what it has forked that is no rank yet (such a one may be stopped); ranks live on. Who cannot be
        ended, since a disk holds it, is not waited for."""
        self._sock.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._child.send(signal.SIGKILL)
        poll = select.poll()
        poll.register(self._child.fd, select.POLLIN)
        if poll.poll(_END_S * 1000.0):
            self._child.wait()


class Preloading:
    """An agent's nursery: another one when it dies, none after a few. `wanted` false: never any. `patience_s`: how long
    ranks wait for one that loads."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        pass_fds: Sequence[int],
        wanted: bool,
        patience_s: float,
    ) -> None:
        self._begin = functools.partial(Nursery, command, environ, pass_fds)
        self._left = _MOST if wanted else 0
        self._patience_s, self._since_s = patience_s, 0.0
        self._nursery: Nursery | None = None

    @property
    def fd(self) -> int:
        """-1: there is none."""
        return self._nursery.fd if self._nursery is not None else -1

    @property
    def pid(self) -> int:
        return self._nursery.pid if self._nursery is not None else -1

    @property
    def loading(self) -> bool:
        """Whether a rank that is due had better wait."""
        young = time.monotonic() - self._since_s < self._patience_s
        return self._nursery is not None and not self._nursery.ready and young

    def begin(self) -> None:
        if self._nursery is None and self._left:
            self._left -= 1
            self._since_s = time.monotonic()
            with contextlib.suppress(OSError):
                self._nursery = self._begin()

    def hear(self) -> None:
        """`fd` is readable. One that ends before it was ever ready is not tried again: the script's start tells why."""
        if self._nursery is not None:
            was = self._nursery.ready
            if not self._nursery.hear():
                self._left = self._left if was else 0
                self.close()
                self.begin()

    def start(self, environ: Mapping[str, str], log: Path, progress_fd: int) -> Child | None:
        """None: there is none that could, now. OSError: nothing can be started."""
        if self._nursery is None or not self._nursery.ready:
            return None
        try:
            return self._nursery.start(environ, log, progress_fd)
        except (ConnectionError, TimeoutError):  # killed, stopped, or stuck
            self.close()
            self.begin()
            return None

    def wake(self) -> None:
        """Continue one that was stopped."""
        if self._nursery is not None:
            self._nursery.wake()

    def close(self) -> None:
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.close()
