"""One process of outlast's on a node of a Ray cluster, around which there is an actor: what it starts ends with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from outlast.runtime.transport.endpoints import listen_on, shown

__all__ = ["ASKED", "HostActor"]

ASKED = 143
"""Exit code of who ends because it was asked to."""
_PR_SET_PDEATHSIG = 1


class HostActor:
    """One process of outlast's on this node. Ray calls its methods in threads that last as long as the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False

    def where(self) -> tuple[str, str]:
        """(node, HOST:PORT that is free there just now)."""
        import ray

        with listen_on(ray.util.get_node_ip_address()) as sock:
            return ray.get_runtime_context().get_node_id(), shown(*sock.getsockname()[:2])

    def run(self, words: Sequence[str], secret: str, log: str) -> int:
        """`python -m outlast` with these words, to its end; the exit code."""
        if self._asked:
            return ASKED
        libc, parent = ctypes.CDLL(None), os.getpid()
        prctl = libc.prctl

        def die_with_me() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outlast", *words], env=os.environ | {"OUTLAST_SECRET": secret},
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, preexec_fn=die_with_me,
            )  # fmt: skip
        if self._asked:  # while it was being started; twice changes nothing
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def ask(self) -> None:
        """Ask it to end in order, also where it is only about to be started."""
        self._asked = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
