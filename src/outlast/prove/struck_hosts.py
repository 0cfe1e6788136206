"""A struck run's hosts: network namespaces on this machine that lose their power, their cable, or hang.

The first host has the launcher and the coordinator, and is not struck: what it loses, the run loses, as
`how-to/hosts` says. A host comes back under its name, and its agent is started again if it had to end.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from outlast.prove.host_namespaces import HostNetwork

__all__ = ["StruckHosts"]

_PORT = 29400
_SHAPES = {
    "slowlink": ("rate", "4mbit", "burst", "16kb", "latency", "2s"),
    "lossy": ("rate", "40mbit", "burst", "4kb", "latency", "1ms"),
}
_ENDED_S = 20.0  # for the agents of hosts that nobody struck, once the run is over


class StruckHosts:
    """`num` hosts with `slots` replicas each, in `folder`, which all of them see. A context manager; `environ`: what
    the first host's launcher must know as well."""

    def __init__(self, folder: Path, num: int, slots: int) -> None:
        self._folder, self.num, self._slots = folder, num, slots
        self.environ = {"OUTLAST_SECRET": secrets.token_hex(32)}
        source = Path(__file__).resolve().parents[2]
        self._net = HostNetwork(num, [folder, source, Path(sys.prefix)])
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []
        self._down: dict[int, str] = {}
        self.struck: set[int] = set()

    def __enter__(self) -> StruckHosts:
        self._net.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._net.__exit__()
        for log in self._logs:
            log.close()

    # --- for the run ---------------------------------------------------------------------------------------------
    @property
    def entering(self) -> list[str]:
        """What to put before a command to have it run on the first host."""
        return self._net.entering(0)

    @property
    def options(self) -> list[str]:
        """What `outlast run` is told on the first host."""
        place = f"{self._net.address(0)}:{_PORT}"
        return ["--endpoint", place, "--nnodes", str(self.num), "--host", "h0", "--slots", str(self._slots)]

    def start_agents(self, environ: Mapping[str, str]) -> None:
        """One on each other host, with `environ` beside its own; they wait for the launcher."""
        self.environ |= environ
        for host in range(1, self.num):
            self._start(host)

    def _start(self, host: int) -> None:
        command = [sys.executable, "-m", "outlast", "agent", "--join", f"{self._net.address(0)}:{_PORT}"]
        command += ["--host", f"h{host}", "--slots", str(self._slots), "--run-dir", str(self._folder / f"h{host}")]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
        self._logs.append((self._folder / f"h{host}.log").open("ab"))
        self._agents[host] = self._net.start(host, command, environ | self.environ, self._logs[-1])

    @property
    def pids(self) -> list[int]:
        """Under which the processes of the other hosts are found."""
        return [agent.pid for agent in self._agents.values() if agent.poll() is None]

    def over(self) -> list[str]:
        """Once the run has ended: what still runs on hosts that nobody struck, and what ran elsewhere is ended."""
        deadline = time.monotonic() + _ENDED_S
        left = []
        for host, agent in self._agents.items():
            if host in self.struck:
                continue
            try:
                agent.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                left.append(f"the agent of host h{host}, process {agent.pid}")
            while (pids := self._net.processes(host)) and time.monotonic() < deadline:
                os.sched_yield()
            left += [f"process {pid} on host h{host}" for pid in pids if pid != agent.pid]
        for host in range(1, self.num):
            self._net.signal_all(host, signal.SIGKILL)
        return left

    # --- strikes -------------------------------------------------------------------------------------------------
    def strike(self, kind: str, pick: float) -> str:
        """The host's name; "" if it is down already, or a path that was broken before. `pick`: which of those that may
        be struck."""
        host = self.picked(pick)
        if host in self._down or (kind == "path" and kind in self._down.values()):
            return ""
        if kind == "power":
            self._net.power_off(host)
        elif kind == "cable":
            self._net.cut(host)
        elif kind == "hang":
            self._net.signal_all(host, signal.SIGSTOP)
        elif kind == "path":
            self._net.part(host, self._other(host))
        else:
            self._net.shape(host, *_SHAPES[kind])
        self._down[host] = kind
        self.struck.add(host)
        return f"h{host}"

    def mend(self, kind: str, name: str) -> bool:
        """Bring back the host of this name, which is down in this way."""
        host = int(name[1:])
        del self._down[host]
        if kind == "hang":
            self._net.signal_all(host, signal.SIGCONT)
        elif kind == "path":
            self._net.join(host, self._other(host))
        elif kind in _SHAPES:
            self._net.unshape(host)
        else:
            self._net.mend(host)
        return True

    def look(self) -> None:
        """Bring hosts back in whose agents had to end."""
        for host, agent in list(self._agents.items()):
            if host not in self._down and host in self.struck and agent.poll() is not None:
                self._start(host)

    def picked(self, pick: float) -> int:
        """The host that a share stands for: never the first."""
        return 1 + int(pick * (self.num - 1))

    def _other(self, host: int) -> int:
        """Whom a broken path leads to: another one that is not the first, if there is one."""
        return host % (self.num - 1) + 1 if self.num > 2 else 0
