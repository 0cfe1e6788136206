"""Runs over several hosts (network namespaces on a bridge): a host fails as a host, and the bits are those of one."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PATIENCE_S

from outlast.core import events as ev
from outlast.prove.host_namespaces import HostNetwork, unavailable
from outlast.runtime.transport.seal import FORGED

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.timeout(300)]
PORT = 29400


class Hosts:
    """A run whose coordinator is on host 0, with an agent on every host, or on the first `num`; with agents=0 not on
    host 0. `told`: variables of all agents; or of each host by its number, of the first too."""

    def __init__(
        self, net: HostNetwork, base: Path, fleet: Callable[..., Any], slots: int, through: str = "", num: int = 0,
        told: dict[str, str] | Callable[[int], dict[str, str]] | None = None, **shape: Any,
    ) -> None:  # fmt: skip
        self.net, self.base, self.slots, self.through = net, base, slots, through
        self.told = told if callable(told) else lambda host: (told or {}) if host else {}
        num = num or net.num
        self.record = shape.get("record", "")
        self.secret = secrets.token_hex(32)
        self.endpoint = f"{net.address(0)}:{PORT}"
        self.run = fleet(
            prefix=net.entering(0), environ={"OUTLAST_SECRET": self.secret} | self.told(0), endpoint=self.endpoint,
            nnodes=str(num if shape.get("agents", 1) else num - 1), slots=slots, **shape,
        )  # fmt: skip
        self.agents = {host: self.agent(host) for host in range(1, num)}

    def agent(
        self, host: int, to: str = "", only: dict[str, str] | None = None, **environ: str
    ) -> subprocess.Popen[bytes]:
        """`only`: what it is told in place of what all are."""
        to = to or (self.through if self.through and host == 1 else self.endpoint)
        command = ["-m", "outlast", "agent", "--join", to, "--slots", str(self.slots)]
        command += ["--host", f"h{host}", "--address", self.net.address(host), "--run-dir", str(self.base / f"h{host}")]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
        with (self.base / f"agent{host}.log").open("ab") as log:
            told = clean | {"OUTLAST_SECRET": self.secret} | (self.told(host) if only is None else only) | environ
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
        return self.agents[host].wait(PATIENCE_S)

    def end(self, *others: int) -> None:
        """The run ends well, and then the agents of these other hosts do: only now have all their scripts ended too."""
        assert self.run.finish() == 0, self.run.logs()
        assert [self.ended(host) for host in others] == [0] * len(others)


@pytest.fixture
def hosts(tmp_path: Path, fleet: Callable[..., Any]) -> Iterator[Callable[..., Hosts]]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with HostNetwork(3, [tmp_path]) as net:
        yield lambda slots=2, **shape: Hosts(net, tmp_path, fleet, slots, **shape)


def on_its_own(script: Path, steps: int) -> Any:
    """What the script finds in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.executable, script, "--steps", str(steps), "--out", out], check=True, timeout=300)
        (file,) = Path(out).glob("*.json")
        return json.loads(file.read_text())


def _whole(run: Any, *gone: str) -> bool:
    """Whether the view is whole again, without these."""
    return len(run.driven.members) == 3 and set(gone).isdisjoint(run.driven.members)


def _comes_back(on: Hosts, host: int, gone: str, first: int) -> str:
    """A replica of this host is a member in the place of `gone`; gates from `first` on, ten steps apart."""
    run = on.run

    def new() -> list[str]:
        return [name for name in on.on(host)[-1:] if name != gone]

    run.gate(first, "another replica was started there", lambda: bool(new()))
    run.gate(first + 10, "it was served", lambda: any(map(run.served, new())))
    run.gate(first + 20, "it had caught up", lambda: any(map(run.caught_up, new())))
    run.gate(first + 30, "it was a member", lambda: _whole(run, gone) and set(new()) <= set(run.driven.members))
    return new()[0]


def _back(first: int) -> tuple[int, ...]:
    return (first, first + 10, first + 20, first + 30)


def test_a_cable_is_pulled_and_put_back_and_an_agent_is_killed(hosts: Callable[..., Hosts]) -> None:
    """A host that is cut off is given up whole, and joins again by itself; one whose agent dies is given up at once."""
    on = hosts(replicas=3, slots=1, steps=140, gates=(5, 6, *_back(20), 60, 61, *_back(80)))
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    [first], [other] = on.on(1), on.on(2)
    on.net.cut(1)
    run.gate(6, "it was cut", lambda: True)
    run.until("the host was given up", lambda: bool(on.lost()))
    on.net.mend(1)
    _comes_back(on, 1, first, 20)
    assert run.state(first) == "X"
    run.gate(60, "the others train", lambda: run.driven.step >= 58)
    on.agents[2].send_signal(signal.SIGKILL)
    run.gate(61, "it was killed", lambda: on.agents[2].wait() == -signal.SIGKILL)
    run.until("its host was given up", lambda: other in {name for lost in on.lost() for name in lost.replicas})
    on.agents[2] = on.agent(2)
    _comes_back(on, 2, other, 80)
    on.end(1, 2)
    run.assert_unchanged()
    assert len(run.results()) == 3


def test_a_host_loses_its_power(hosts: Callable[..., Hosts]) -> None:
    """All of it goes at once, and no connection ends: survivors go on in one view without it, the spare among them."""
    on = hosts(replicas=4, spares=1, steps=20, gates=(2, 4, 9), host_silence_s=60)  # somebody waits long before
    run = on.run
    run.gate(2, "the spare was served", lambda: run.served("r4.1"))
    run.gate(4, "the spare had caught up", lambda: run.caught_up("r4.1"))
    dead = set(on.on(2))
    assert len(dead) >= 1
    run.until("all wait at the gate", lambda: run.driven.step >= 8)
    on.net.power_off(2)
    run.gate(9, "it was off", lambda: True)
    run.until("the host was given up", lambda: bool(on.lost()))
    on.end(1)
    run.assert_unchanged()
    assert set(run.results()).isdisjoint(dead)
    [lost] = on.lost()
    assert set(lost.replicas) == dead
    assert "while others wait" in lost.cause


def test_replicas_of_two_ranks_on_three_hosts(hosts: Callable[..., Hosts]) -> None:
    """Each on a host of its own; lanes go between hosts. One host loses its power, the others go on with the bits of
    one process."""
    script = Path(__file__).with_name("sharded.py")
    alone = on_its_own(script, 12)
    on = hosts(slots=1, replicas=3, ranks=2, steps=12, script=[script], gates=(4, 9), host_silence_s=60)
    run = on.run
    run.gate(4, "all were there", lambda: len(run.driven.members) == 3)
    dead = set(on.on(2))
    run.until("all wait at the gate", lambda: run.driven.step >= 8)
    on.net.power_off(2)
    run.gate(9, "it was off", lambda: True)
    run.until("the host was given up", lambda: bool(on.lost()))
    on.end(1)
    results = run.results()
    assert len(results) == 4, run.logs()
    assert {name.partition("-")[0] for name in results}.isdisjoint(dead)
    assert all(found == alone for found in results.values()), run.logs()


def test_a_host_loses_its_power_before_anything_is_known_of_its_pace(hosts: Callable[..., Hosts]) -> None:
    """In the first step, with every fixed patience far too long: that others wait is said all the same."""
    on = hosts(replicas=3, slots=1, steps=12, gates=(1,), host_silence_s=3600, formation_s=600, stall_floor_s=5)
    run = on.run
    run.until("all were there", lambda: len(run.driven.members) == 3)
    dead = on.on(2)
    on.net.power_off(2)
    run.gate(1, "it was off", lambda: True)
    run.until("the host was given up", lambda: bool(on.lost()))
    lost = on.lost()[0]
    assert lost.agent in {e.agent for e in on.agents_started() if e.host == "h2"}
    assert "while others wait" in lost.cause
    on.end(1)
    run.assert_unchanged()
    assert set(run.results()).isdisjoint(dead)


def test_a_path_breaks_between_two_hosts_and_a_machine_hangs(hosts: Callable[..., Hosts]) -> None:
    """Of two that no longer reach each other one goes; a machine that wakes up finds that it was given up."""
    on = hosts(replicas=3, slots=1, steps=140, gates=(6, 7, *_back(20), 60, 61, *_back(80)))
    run = on.run
    run.gate(6, "all were there", lambda: len(run.driven.members) == 3)
    there = {on.on(1)[0]: 1, on.on(2)[0]: 2}
    on.net.part(1, 2)
    run.gate(7, "it was broken", lambda: True)
    run.until("one of the two was put out", lambda: any(e.replica in there for e in run.exits()))
    on.net.join(1, 2)
    out = next(e.replica for e in run.exits() if e.replica in there)
    _comes_back(on, there[out], out, 20)
    hung = on.on(2)[-1]
    run.gate(60, "the others train", lambda: run.driven.step >= 58)
    on.net.signal_all(2, signal.SIGSTOP)
    run.gate(61, "it hung", lambda: True)
    run.until("the host was given up", lambda: bool(on.lost()))
    on.net.signal_all(2, signal.SIGCONT)
    _comes_back(on, 2, hung, 80)
    on.end(1, 2)
    run.assert_unchanged()
    assert len(run.results()) == 3


def test_a_host_is_asked_to_go_and_strangers_are_not_heard(hosts: Callable[..., Hosts]) -> None:
    """SIGTERM to its agent: its replicas leave between two steps, others take their places, and nothing is lost."""
    on = hosts(replicas=3, slots=2, steps=80, gates=(5, 6, 20, 30, 40, 50))
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    stranger = on.net.start(2, [sys.executable, "-c", _STRANGER, on.net.address(0), str(PORT)])
    assert stranger.wait(30) == 0
    others = [on.agent(1, OUTLAST_SECRET="ab" * 32), on.agent(2)]
    assert [other.wait(60) for other in others] == [4, 4]  # not of this run; of a name that is there already
    gone = set(on.on(1))
    on.agents[1].send_signal(signal.SIGTERM)
    run.gate(6, "it was asked", lambda: True)
    run.gate(20, "another was started elsewhere", lambda: run.started("r1.2"))
    run.gate(30, "it was served", lambda: run.served("r1.2"))
    run.gate(40, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(50, "it had taken its place", lambda: _whole(run, *gone))
    assert on.ended(1) == 143
    on.end(2)
    run.assert_unchanged()
    assert [e.cause for e in run.exits() if e.replica in gone] == ["left"]
    assert any(isinstance(e, ev.Refused) and e.stranger for e in run.driven.events)
    for folder in (run.driven.run_dir, on.base / "h1", on.base / "h2"):
        for path in folder.rglob("*"):
            assert not path.is_file() or on.secret.encode() not in path.read_bytes(), path


_STRANGER = """
import os, socket, sys
for data in (os.urandom(400), b"GET / HTTP/1.1\\r\\n\\r\\n", b"outlast3" + bytes(90)):
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as sock:
        sock.sendall(data)
        try:
            assert sock.recv(1) == b""  # hung up on, and told nothing
        except ConnectionError:
            pass
"""


def test_what_somebody_on_the_path_does_to_frames_is_refused_and_named(hosts: Callable[..., Hosts]) -> None:
    """All that one host says to the coordinator passes somebody who lets each handshake be, and then changes, repeats,
    reorders or lengthens a frame: four connections of the host's are ended so, and the run is none the worse."""
    on = hosts(replicas=3, slots=1, steps=12, gates=(6,), through="127.0.0.1:29401")
    struck = on.base / "struck"
    words = [sys.executable, str(Path(__file__).with_name("on_the_path.py")), on.endpoint, "29401", str(struck)]
    with (on.base / "on_the_path.log").open("wb") as log:
        between = on.net.start(1, words, None, log)
    on.run.gate(6, "four connections were struck", lambda: len(_lines(struck)) == 4)
    on.end(1, 2)
    on.run.assert_unchanged()
    assert sorted(_lines(struck)) == ["changed", "lengthened", "reordered", "repeated"]
    refused = [e for e in on.run.driven.events if isinstance(e, ev.Refused) and e.reason == FORGED]
    assert refused[-1].count == 4
    assert refused[-1].peer.startswith(("h1:", "r"))
    assert not any(e.stranger for e in refused)
    assert between.poll() is None


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
