"""The demonstration on several hosts, which are network namespaces on this machine: they fail as hosts do.

One host loses its power, and comes back under its name; the cable of another is pulled, and put back; the coordinator's
process is killed. The same training undisturbed, on one host, is what the bits are compared with.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import outlast
from outlast.core import events as ev
from outlast.errors import EnvironmentFault
from outlast.prove._demo import PATIENCE_S, Demo
from outlast.prove._drive import Driven
from outlast.prove.host_namespaces import HostNetwork, unavailable

__all__ = ["HostsDemo"]

_PORT = 29400
_SLOTS = 2


class HostsDemo(Demo):
    """Shows a run on several hosts, which are network namespaces here. EnvironmentFault where no hosts can be made."""

    def __init__(self, base: Path, steps: int, seed: int, watch: Callable[[str, Driven], None], num_hosts: int) -> None:
        super().__init__(base, steps, seed, watch)
        self.num_hosts = num_hosts
        reason = unavailable()
        if reason:
            raise EnvironmentFault(
                f"no hosts can be made on this machine: {reason}",
                did="nothing was started",
                remedy="as root on Linux, with iproute2 and util-linux; or outlast demo, on one host",
            )

    def _disturbed(self) -> Driven:
        package = Path(str(outlast.__file__)).parents[1]
        with HostNetwork(self.num_hosts, [self.base, package, Path(sys.prefix)]) as net:
            secret = secrets.token_hex(32)
            options = ["--endpoint", f"{net.address(0)}:{_PORT}", "--nnodes", str(self.num_hosts), "--host", "h0"]
            options += ["--replicas", "4", "--spares", "1", "--slots", str(_SLOTS)]
            told = {"OUTLAST_SECRET": secret}
            run = Driven(
                self.base / "disturbed", options, self._command("disturbed"), environ=told, prefix=net.entering(0)
            )
            with run as driven:
                self._strike(_Struck(net, driven, secret, self.base, lambda: self._watch("disturbed", driven)))
        return driven

    def _strike(self, struck: _Struck) -> None:
        driven, steps, off, cut = struck.driven, self.steps, self.num_hosts - 1, 1
        for host in range(1, self.num_hosts):
            struck.agent(host)
        struck.until("the moment to cut the power", lambda: driven.step >= steps // 8)
        struck.net.power_off(off)
        struck.until("the host without power was given up", lambda: struck.lost(off) == 1)
        struck.net.mend(off)
        struck.agent(off)
        late = steps * 7 // 8
        struck.until("it had replicas again", lambda: struck.trained(off) or driven.step >= late)
        struck.until("the moment to pull a cable", lambda: driven.step >= steps // 2)
        struck.net.cut(cut)
        struck.until("the host without a path was given up", lambda: struck.lost(cut) == 1)
        struck.net.mend(cut)
        struck.until("the coordinator's moment", lambda: driven.step >= steps * 3 // 4)
        os.kill(driven.coordinator_pid, signal.SIGKILL)
        self._end(driven, struck.watch)


class _Struck:
    """The run on its hosts."""

    def __init__(self, net: HostNetwork, driven: Driven, secret: str, base: Path, watch: Callable[[], None]) -> None:
        self.net, self.driven, self.watch = net, driven, watch
        self._secret, self._base = secret, base

    def agent(self, host: int) -> None:
        """Bring this host in."""
        command = [sys.executable, "-m", "outlast", "agent", "--join", f"{self.net.address(0)}:{_PORT}"]
        command += ["--host", f"h{host}", "--slots", str(_SLOTS), "--run-dir", str(self._base / f"h{host}")]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
        with (self._base / f"h{host}.log").open("ab") as log:
            self.net.start(host, command, environ | {"OUTLAST_SECRET": self._secret}, log)

    def until(self, what: str, test: Callable[[], bool]) -> None:
        self.driven.until(what, test, PATIENCE_S, self.watch, renewed=True)

    def _agents(self, host: int) -> list[str]:
        started = [e for e in self.driven.events if isinstance(e, ev.AgentStarted)]
        return [event.agent for event in started if event.host == f"h{host}"]

    def lost(self, host: int) -> int:
        """How often this host was given up."""
        mine = set(self._agents(host))
        return sum(isinstance(e, ev.AgentLost) and e.agent in mine for e in self.driven.events)

    def trained(self, host: int) -> bool:
        """Whether the newest agent there has a replica that has caught up."""
        newest = self._agents(host)[-1:]
        started = {e.replica for e in self.driven.events if isinstance(e, ev.ReplicaStarted) and [e.agent] == newest}
        return len(self._agents(host)) > 1 and any(
            isinstance(e, ev.JoinerCaughtUp) and e.replica in started for e in self.driven.events
        )
