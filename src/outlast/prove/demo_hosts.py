"""The demonstration on several hosts, which are network namespaces on this machine: they fail as hosts do.

One host loses its power, and comes back under its name; the cable of another is pulled, and put back; the coordinator's
host is lost for good, where an etcd can keep the record on three of them and another host trains as well, else its
process is killed. The same training undisturbed, on one host, is what the bits are compared with.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import outlast
from outlast.core import events as ev
from outlast.errors import EnvironmentFault, ProveError
from outlast.prove._demo import Demo
from outlast.prove._drive import Driven
from outlast.prove._patience import HANG_S
from outlast.prove.host_namespaces import HostNetwork, unavailable

__all__ = ["HostsDemo"]

_PORT = 29400
_SLOTS = 2
_MEMBERS, _CLIENTS, _PEERS = range(3), 2379, 2380  # of etcd


class HostsDemo(Demo):
    """Shows a run on several hosts, which are network namespaces here. EnvironmentFault where no hosts can be made."""

    def __init__(self, base: Path, steps: int, seed: int, watch: Callable[[str, Driven], None], num_hosts: int) -> None:
        super().__init__(base, steps, seed, watch)
        self.num_hosts, self._keeps_etcd = num_hosts, shutil.which("etcd") is not None
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
            if self._keeps_etcd:
                options += ["--record", "etcd://" + ",".join(f"{net.address(host)}:{_CLIENTS}" for host in _MEMBERS)]
            script, prefix = self._command("disturbed"), net.entering(0)
            agents: dict[int, subprocess.Popen[bytes]] = {}
            run = Driven(self.base / "disturbed", options, script, environ=told, prefix=prefix, other_agents=agents)
            with run as driven:
                self._strike(_Struck(net, driven, agents, secret, self.base, lambda: self._watch("disturbed", driven)))
        return driven

    def _strike(self, struck: _Struck) -> None:
        driven, steps, off, cut = struck.driven, self.steps, self.num_hosts - 1, 1
        for host in _MEMBERS if self._keeps_etcd else ():
            struck.etcd(host)
        for host in range(1, self.num_hosts):
            struck.agent(host)
        struck.until("the moment to cut the power", lambda: driven.step >= steps // 8)
        struck.net.power_off(off)
        struck.until("the host without power was given up", lambda: struck.lost(off) == 1)
        struck.net.mend(off)
        if self._keeps_etcd and off in _MEMBERS:
            struck.etcd(off)
        struck.agent(off)
        late = steps * 7 // 8
        struck.until("it had replicas again", lambda: struck.trained(off) or driven.step >= late)
        struck.until("the moment to pull a cable", lambda: driven.step >= steps // 2)
        struck.net.cut(cut)
        struck.until("the host without a path was given up", lambda: struck.lost(cut) == 1)
        struck.net.mend(cut)
        struck.until("the coordinator's moment", lambda: driven.step >= steps * 3 // 4)
        if self._keeps_etcd and struck.others_train():
            struck.net.power_off(0)
            struck.follow_from(cut)
            return
        os.kill(driven.coordinator_pid, signal.SIGKILL)
        self._end(driven, struck.watch)


class _Struck:
    """The run on its hosts."""

    def __init__(
        self, net: HostNetwork, driven: Driven, agents: dict[int, subprocess.Popen[bytes]], secret: str, base: Path,
        watch: Callable[[], None],
    ) -> None:  # fmt: skip
        self.net, self.driven, self.watch = net, driven, watch
        self._agent_of, self._secret, self._base = agents, secret, base

    def agent(self, host: int) -> None:
        """Bring this host in."""
        command = [sys.executable, "-m", "outlast", "agent", "--join", f"{self.net.address(0)}:{_PORT}"]
        command += ["--host", f"h{host}", "--slots", str(_SLOTS), "--run-dir", str(self._base / f"h{host}")]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
        with (self._base / f"h{host}.log").open("ab") as log:
            self._agent_of[host] = self.net.start(host, command, environ | {"OUTLAST_SECRET": self._secret}, log)

    def etcd(self, host: int) -> None:
        """A member of an etcd on this host; with what it had, where it was there before."""
        at, peers = f"http://{self.net.address(host)}", [f"http://{self.net.address(other)}" for other in _MEMBERS]
        command = ["etcd", "--name", f"m{host}", "--data-dir", str(self._base / f"etcd{host}")]
        command += ["--initial-cluster", ",".join(f"m{n}={peer}:{_PEERS}" for n, peer in enumerate(peers))]
        for option, port in (("client", _CLIENTS), ("peer", _PEERS)):
            command += [f"--listen-{option}-urls", f"{at}:{port}"]
        command += ["--advertise-client-urls", f"{at}:{_CLIENTS}", "--initial-advertise-peer-urls", f"{at}:{_PEERS}"]
        with (self._base / f"etcd{host}.log").open("ab") as log:
            self.net.start(host, command, out=log)

    def follow_from(self, host: int) -> None:
        """To the end of the run, by the journal that this host keeps. ProveError if that is no good one."""
        self.driven.follow(self._base / f"h{host}", self._agent_of[host])
        code = self.driven.finish(HANG_S, self.watch)
        if code != 0:
            raise ProveError(
                f"the agent of host h{host} ended with code {code} after the coordinator's host was lost",
                remedy=f"outlast why {self._base / f'h{host}'}",
            )

    def until(self, what: str, test: Callable[[], bool]) -> None:
        self.driven.until(what, test, HANG_S, self.watch)

    def _agents(self, host: int) -> list[str]:
        started = [e for e in self.driven.events if isinstance(e, ev.AgentStarted)]
        return [event.agent for event in started if event.host == f"h{host}"]

    def lost(self, host: int) -> int:
        """How often this host was given up."""
        mine = set(self._agents(host))
        return sum(isinstance(e, ev.AgentLost) and e.agent in mine for e in self.driven.events)

    def others_train(self) -> bool:
        """Whether the state is on another host than the first: without it, the run would be lost with that one. On a
        busy machine the hosts that come back may not have caught up yet."""
        gone = {replica for e in self.driven.events if isinstance(e, ev.AgentLost) for replica in e.replicas}
        first = set(self._agents(0))
        started = {e.replica: e.agent for e in self.driven.events if isinstance(e, ev.ReplicaStarted)}
        return any(started.get(name, "") not in first for name in self.driven.members if name not in gone)

    def trained(self, host: int) -> bool:
        """Whether the newest agent there has a replica that has caught up."""
        newest = self._agents(host)[-1:]
        started = {e.replica for e in self.driven.events if isinstance(e, ev.ReplicaStarted) and [e.agent] == newest}
        return len(self._agents(host)) > 1 and any(
            isinstance(e, ev.JoinerCaughtUp) and e.replica in started for e in self.driven.events
        )
