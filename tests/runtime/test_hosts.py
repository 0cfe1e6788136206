"""Runs over several hosts (network namespaces on a bridge): a host fails as a host, and the bits are those of one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.prove.host_namespaces import HostNetwork, unavailable

pytestmark = [pytest.mark.process, pytest.mark.campaign]
PORT = 29400


class Hosts:
    """A run whose coordinator is on host 0, with an agent on every host."""

    def __init__(self, net: HostNetwork, base: Path, fleet: Callable[..., Any], slots: int, **shape: Any) -> None:
        self.net, self.base, self.slots = net, base, slots
        self.secret = secrets.token_hex(32)
        self.endpoint = f"{net.address(0)}:{PORT}"
        self.run = fleet(
            prefix=net.entering(0), environ={"OUTLAST_SECRET": self.secret}, endpoint=self.endpoint,
            nnodes=str(net.num), slots=slots, **shape,
        )  # fmt: skip
        self.agents = {host: self.agent(host) for host in range(1, net.num)}

    def agent(self, host: int, **environ: str) -> subprocess.Popen[bytes]:
        command = ["-m", "outlast", "agent", "--join", self.endpoint, "--host", f"h{host}", "--slots", str(self.slots)]
        command += ["--run-dir", str(self.base / f"h{host}")]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
        with (self.base / f"agent{host}.log").open("ab") as log:
            told = clean | {"OUTLAST_SECRET": self.secret} | environ
            return self.net.start(host, [sys.executable, *command], told, log)

    def on(self, host: int) -> list[str]:
        """Replicas that were started there."""
        mine = {e.agent for e in self.agents_started() if e.host == f"h{host}"}
        return [e.replica for e in self.run.driven.events if isinstance(e, ev.ReplicaStarted) and e.agent in mine]

    def agents_started(self) -> list[ev.AgentStarted]:
        return [e for e in self.run.driven.events if isinstance(e, ev.AgentStarted)]

    def lost(self) -> list[ev.AgentLost]:
        return [e for e in self.run.driven.events if isinstance(e, ev.AgentLost)]

    def ended(self, host: int) -> int:
        """The exit code of the agent there."""
        return self.agents[host].wait(30.0)


@pytest.fixture
def hosts(tmp_path: Path, fleet: Callable[..., Any]) -> Iterator[Callable[..., Hosts]]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with HostNetwork(3, [tmp_path]) as net:
        yield lambda slots=2, **shape: Hosts(net, tmp_path, fleet, slots, **shape)


def test_a_cable_is_pulled_and_put_back_and_an_agent_is_killed(hosts: Callable[..., Hosts]) -> None:
    """A host that is cut off is given up whole, and joins again by itself; one whose agent dies is given up at once."""
    on = hosts(replicas=3, slots=1, steps=200, gates=(5, 6, 60, 120, 121, 190))
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    [first], [other] = on.on(1), on.on(2)
    on.net.cut(1)
    run.gate(6, "it was cut", lambda: True)
    run.until("the host was given up", lambda: bool(on.lost()))
    on.net.mend(1)
    run.gate(60, "it was back, with another replica", lambda: any(name != first for name in on.on(1)))
    run.gate(120, "which is a member", lambda: len(run.driven.members) == 3 and first not in run.driven.members)
    assert run.state(first) == "X"
    on.agents[2].send_signal(signal.SIGKILL)
    run.gate(121, "it was killed", lambda: on.agents[2].wait() == -signal.SIGKILL)
    run.until("its host was given up", lambda: other in {name for lost in on.lost() for name in lost.replicas})
    on.agents[2] = on.agent(2)
    run.gate(190, "a new agent has its replica", lambda: len(run.driven.members) == 3)
    run.assert_unchanged()
    assert len(run.results()) == 3
    assert [on.ended(host) for host in (1, 2)] == [0, 0]


def test_a_host_loses_its_power(hosts: Callable[..., Hosts]) -> None:
    """All of it goes at once, and no connection ends: survivors go on in one view without it, the spare among them."""
    on = hosts(replicas=4, spares=1, steps=20, gates=(4, 9))
    run = on.run
    run.gate(4, "the spare had caught up", lambda: run.caught_up("r4.1"))
    dead = set(on.on(2))
    assert len(dead) >= 1
    run.until("all wait at the gate", lambda: run.driven.step >= 8)
    on.net.power_off(2)
    run.gate(9, "it was off", lambda: True)
    run.until("the host was given up", lambda: bool(on.lost()))
    run.assert_unchanged()
    assert set(run.results()).isdisjoint(dead)
    [lost] = on.lost()
    assert set(lost.replicas) == dead
    assert "while others wait" in lost.cause
    assert on.ended(1) == 0


def test_a_path_breaks_between_two_hosts_and_a_machine_hangs(hosts: Callable[..., Hosts]) -> None:
    """Of two that no longer reach each other one goes; a machine that wakes up finds that it was given up."""
    on = hosts(replicas=3, slots=1, steps=160, gates=(6, 7, 60, 100, 101, 150))
    run = on.run
    run.gate(6, "all were there", lambda: len(run.driven.members) == 3)
    there = {*on.on(1), *on.on(2)}
    on.net.part(1, 2)
    run.gate(7, "it was broken", lambda: True)
    run.until("one of the two was put out", lambda: bool(there.intersection(e.replica for e in run.exits())))
    on.net.join(1, 2)
    run.gate(60, "it was back", lambda: len(run.driven.members) == 3)
    hung = on.on(2)[-1]
    run.gate(100, "all were there", lambda: run.driven.step >= 98)
    on.net.signal_all(2, signal.SIGSTOP)
    run.gate(101, "it hung", lambda: True)
    run.until("the host was given up", lambda: bool(on.lost()))
    on.net.signal_all(2, signal.SIGCONT)
    run.gate(150, "it was back", lambda: len(run.driven.members) == 3 and hung not in run.driven.members)
    run.assert_unchanged()
    assert len(run.results()) == 3


def test_a_host_is_asked_to_go_and_strangers_are_not_heard(hosts: Callable[..., Hosts]) -> None:
    """SIGTERM to its agent: its replicas leave between two steps, others take their places, and nothing is lost."""
    on = hosts(replicas=3, slots=2, steps=120, gates=(5, 6, 90))
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    stranger = on.net.start(2, [sys.executable, "-c", _STRANGER, on.net.address(0), str(PORT)])
    assert stranger.wait(30) == 0
    others = [on.agent(1, OUTLAST_SECRET="ab" * 32), on.agent(2)]
    assert [other.wait(60) for other in others] == [4, 4]  # not of this run; of a name that is there already
    gone = set(on.on(1))
    on.agents[1].send_signal(signal.SIGTERM)
    run.gate(6, "it was asked", lambda: True)
    run.gate(90, "others took its places", lambda: len(run.driven.members) == 3 and gone.isdisjoint(run.driven.members))
    assert on.ended(1) == 143
    run.assert_unchanged()
    assert [e.cause for e in run.exits() if e.replica in gone] == ["left"]
    assert any(isinstance(e, ev.Refused) and e.stranger for e in run.driven.events)
    for folder in (run.driven.run_dir, on.base / "h1", on.base / "h2"):
        for path in folder.rglob("*"):
            assert not path.is_file() or on.secret.encode() not in path.read_bytes(), path


_STRANGER = """
import os, socket, sys
for data in (os.urandom(400), b"GET / HTTP/1.1\\r\\n\\r\\n", b"outlast2" + bytes(90)):
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as sock:
        sock.sendall(data)
        try:
            assert sock.recv(1) == b""  # hung up on, and told nothing
        except ConnectionError:
            pass
"""
