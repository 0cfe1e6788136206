"""Where an agent's ranks come from: a process beside it that has loaded torch and is forked for each (`_preloaded.py`).

Loading torch and an optimizer takes seconds of processor time, and minutes from a busy network file system. A
replacement pays neither, and takes no core from the survivors. This is the agent's end; it loads no torch. Ranks are
the agent's own children as if it had started them: it adopts them (PR_SET_CHILD_SUBREAPER), and they die with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from outlast.runtime._supervise import Child, start

__all__ = ["Nursery"]

_libc = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER = 36
_FORK_S = 2.0  # to fork; who takes longer is stopped or stuck, and the rank is started without it


class Nursery:
    """See the module. `fd` becomes readable when it is ready, or has ended: then `hear`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int]) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_FORK_S)
        self.fd = self._sock.fileno()
        self.ready = False
        python, *script = command
        with theirs:
            self._child = start(
                [python, "-P", "-m", "outlast.runtime._preloaded", *script],
                environ={**environ, "OUTLAST_NURSERY_FD": str(theirs.fileno()), "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno(), *pass_fds],
            )

    def hear(self) -> bool:
        """Whether it is there. After True it is `ready`."""
        try:
            self.ready = bool(self._sock.recv(16))
        except OSError:
            self.ready = False
        return self.ready

    def start(self, environ: Mapping[str, str], log: Path, progress_fd: int) -> Child:
        """Fork a rank: `environ` is added to the nursery's own. Raises OSError if there is none after 2 s."""
        go_r, go_w = os.pipe2(os.O_CLOEXEC)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            with log.open("ab") as out:
                request = msgspec.msgpack.encode(dict(environ))
                socket.send_fds(self._sock, [request], [out.fileno(), progress_fd, go_r])
            pid = int(self._sock.recv(16) or b"0")
            if not pid:
                raise ConnectionError("the process that replicas are forked from has none to give")
            child = Child(pid)
            os.write(go_w, b"g")  # without it, a rank whose number never came would train beside its successor
            return child
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # what a rank leaves behind is not the agent's
            os.close(go_r)
            os.close(go_w)

    def close(self) -> None:
        """End it; ranks live on."""
        self._child.send(signal.SIGKILL)
        self._child.wait()
        self._sock.close()
