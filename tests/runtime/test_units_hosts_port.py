"""Hosts at the coordinator's port: of which run they are, who is turned away, and what an earlier coordinator knew."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.runtime.test_units_port import SECRET, with_server
from tests.runtime.virtual_host import Puppet, VirtualRun

from outlast.cli import _run
from outlast.config import RunConfig, encoded, resolve
from outlast.core import events as ev
from outlast.core.protocol import messages as m
from outlast.core.protocol.host_messages import Briefing, HostHere, Turned
from outlast.runtime.coordinator._hosts import CUT_OFF, last_heard_of, of_another_run
from outlast.runtime.coordinator.server import Server
from outlast.runtime.host._host_lease import HostLease
from outlast.runtime.host.agent import Agent
from outlast.runtime.host.launcher import Launcher
from outlast.runtime.host.silence import excused
from outlast.runtime.transport.frames import Link, frame
from outlast.runtime.transport.handshake import PeerClaim, Role
from outlast.runtime.transport.seal import CODE_BYTES, FORGED, Seal

KEY = b"k" * 32
CONFIG = RunConfig(replicas=2, endpoint="127.0.0.1:1", nnodes="2")
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(m.FromCoordinator | Briefing | Turned)


def with_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Callable[[Server, tuple[str, int]], Awaitable[None]]
) -> None:  # fmt: skip
    """The port of run "new", started on host "head", while `play` runs."""
    told = {"RUN": "new", "COMMAND": '["python", "train.py"]', "FOLDER": "/", "CONFIG": "{}", "OWN_HOSTS": "head"}
    for key, value in told.items():
        monkeypatch.setenv(f"OUTLAST_{key}", value)
    with_server(tmp_path, play, CONFIG)


def here(agent: str, host: str = "") -> HostHere:
    host = host or agent.partition(":")[0]
    return HostHere(agent=agent, host=host, place="there", pid=7, address="10.0.0.2", sent_s=time.monotonic())


async def calls(address: tuple[str, int], role: Role, name: str, run: str, *said: Any) -> list[Any]:
    """Everything that a caller is told who says this and waits for the end, or for the first ten seconds' answer."""

    def call() -> list[Any]:
        link, told = Link(address, SECRET, role, name, 30.0, run), []
        for message in said:
            link.send(message)
        try:
            while not any(isinstance(each, Turned | m.Welcome) for each in told):
                told.append(link.receive(_decoder))
            if isinstance(told[-1], Turned):
                with pytest.raises(ConnectionError):
                    told.append(link.receive(_decoder))
        finally:
            link.close()
        return told

    return await asyncio.to_thread(call)


def test_what_is_left_of_another_run_is_heard_by_no_run_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(server: Server, address: tuple[str, int]) -> None:
        hello = m.AgentHello(agent="h1:aa", pid=7, members=("r0.1",))
        member = m.Hello(member="r0.1", agent="h1:aa", epoch=0, state="member", committed=43)
        for run in ("old", ""):
            if run:
                [turned] = await calls(address, "agent", "h1:aa", run, here("h1:aa"), hello)
                assert (turned.run, "no longer old" in turned.reason) == ("new", True)
            [turned] = await calls(address, "member", "r0.1", run, member)
            assert isinstance(turned, Turned)
            [turned] = await calls(address, "launcher", "launcher", run, m.Stop(reason="interrupt"))
            assert isinstance(turned, Turned)
        roster = server.coordinator.roster
        assert (roster.agents, roster.peers, roster.slots, server.port.writers) == (set(), {}, {}, {})
        told = await calls(address, "agent", "h2:bb", "", here("h2:bb"), m.AgentHello(agent="h2:bb", pid=7))
        assert [type(each) for each in told] == [Briefing, m.Welcome]  # who joins does not know the run yet
        told = await calls(address, "agent", "h2:bb", "new", m.AgentHello(agent="h2:bb", pid=7, number=2))
        assert roster.agents == {"h2:bb"}

    with_hosts(tmp_path, monkeypatch, play)


def test_who_is_turned_away_is_hung_up_on_and_nothing_more_of_it_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(server: Server, address: tuple[str, int]) -> None:
        hello = m.AgentHello(agent="head:aa", pid=7)
        [turned] = await calls(address, "agent", "head:aa", "", here("head:aa"), hello)
        assert "that started the run is called head" in turned.reason
        assert server.coordinator.roster.agents == set()
        told = await calls(address, "agent", "a0", "new", here("a0", "head"), m.AgentHello(agent="a0", pid=8))
        assert isinstance(told[-1], m.Welcome)
        assert server.coordinator.roster.agents == {"a0"}

    with_hosts(tmp_path, monkeypatch, play)


def test_connections_outlast_a_path_that_is_cut_for_as_long_as_no_host_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end of a host's connections is a word about it, and the kernel's patience is none."""

    async def play(server: Server, address: tuple[str, int]) -> None:
        link = await asyncio.to_thread(Link, address, SECRET, "agent", "h1:aa", 30.0, "new")
        link.send(here("h1:aa"))
        assert isinstance(await asyncio.to_thread(link.receive, _decoder), Briefing)
        sock = server.port.writers["h1:aa"]._writer.get_extra_info("socket")
        idle_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert idle_s > CUT_OFF * CONFIG.host_silence_s
        link.close()

    with_hosts(tmp_path, monkeypatch, play)


def test_only_an_agent_may_not_know_its_run() -> None:
    assert of_another_run("new", 1, PeerClaim("agent", "h1:aa")) is None
    for role in ("member", "launcher"):
        assert of_another_run("new", 1, PeerClaim(role, "r0.1")) is not None  # type: ignore[arg-type]
        assert of_another_run("new", 1, PeerClaim(role, "r0.1", run="new")) is None  # type: ignore[arg-type]


# --- the agent's side -----------------------------------------------------------------------------------------------
def agent(tmp_path: Path) -> tuple[Agent, socket.socket]:
    """One of run "old", at epoch 9, and the coordinator's end of its connection."""
    environ = {
        "OUTLAST_COORDINATOR": "127.0.0.1:1", "OUTLAST_SECRET": SECRET.hex(), "OUTLAST_RUN_DIR": str(tmp_path),
        "OUTLAST_CONFIG": encoded(CONFIG), "OUTLAST_RUN": "old", "OUTLAST_ADDRESS": "10.0.0.2", "OUTLAST_HOST": "h1",
    }  # fmt: skip
    far, near = socket.socketpair()
    link = object.__new__(Link)
    link.sock, link._mine, link._theirs, link._sending = near, Seal(KEY), Seal(KEY), threading.Lock()
    made = Agent("h1:aa", environ, [sys.executable, "train.py"])
    made.line.link, made.epoch = link, 9
    made.pending.add("r0.1")
    return made, far


def test_an_agent_obeys_no_order_that_was_changed_on_its_way_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, far = agent(tmp_path)
    data = frame(m.Spawn(epoch=10, member="r1.1", after_s=0.0))
    whole = bytearray(Seal(KEY).sealed(data[:4], data[4:]))
    whole[-CODE_BYTES - 1] ^= 1
    far.sendall(whole)
    mine._receive()
    assert (mine.line.link, mine.pending, mine.epoch) == (None, {"r0.1"}, 9)
    assert f"from the coordinator: {FORGED}" in capsys.readouterr().err
    far.close()


@pytest.mark.parametrize(
    ("said", "how"),
    [
        (Turned(epoch=1, reason="this is run new", remedy="", run="new"), "left alone"),
        (Briefing(epoch=1, run_id="new", command=(), folder="", config="", hash_seed="0"), "left alone"),
        (Turned(epoch=1, reason="a host of the name is here", remedy=""), "turned away"),
    ],
)
def test_an_agent_ends_where_another_run_is_and_takes_no_order_of_it(
    tmp_path: Path, said: Any, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, far = agent(tmp_path)
    theirs = Seal(KEY)
    for data in (frame(said), frame(m.Spawn(epoch=10, member="r1.1", after_s=0.0))):
        far.sendall(theirs.sealed(data[:4], data[4:]))
    mine._receive()
    mine._receive()
    assert (mine.stopping, mine.pending, mine.exits["r0.1"].cause) == (how, set(), "evicted")
    assert "outlast:" in capsys.readouterr().err
    mine._disconnected()
    mine._connect()
    assert mine.line.link is None
    far.close()


def test_an_agent_that_is_told_of_its_own_run_goes_on(tmp_path: Path) -> None:
    mine, far = agent(tmp_path)
    data = frame(Briefing(epoch=9, run_id="old", command=(), folder="", config="", hash_seed="0"))
    far.sendall(Seal(KEY).sealed(data[:4], data[4:]))
    mine._receive()
    assert (mine.stopping, mine.pending) == ("", {"r0.1"})
    far.close()
    mine._disconnected()


def test_an_agent_that_was_stopped_asks_before_it_ends_its_replicas() -> None:
    assert excused(100.0, 0.2, 101.0, 60.0) == 100.0
    assert excused(100.0, 500.0, 600.0, 60.0) == 542.0  # two seconds are left of the lease, and no whole one
    assert excused(599.0, 500.0, 600.0, 60.0) == 599.0


def test_an_answer_from_before_an_agent_was_stopped_takes_nothing_of_its_time_to_ask() -> None:
    """It lay there unread, and is read after the look that has excused the pause."""
    lease = HostLease(resolve(cli={"lease_s": 60.0}, environ={}).config, 100.0)
    assert lease.alone_s(600.0) == 58.0
    lease.answered(100.0)
    assert lease.alone_s(600.2) == pytest.approx(58.2)
    lease.answered(600.1)
    assert lease.alone_s(600.3) == pytest.approx(0.2)


# --- the launcher's side --------------------------------------------------------------------------------------------
def launcher(tmp_path: Path, **given: Any) -> Launcher:
    return Launcher(resolve(cli=given, environ={}), ["python", "train.py"], tmp_path, host="head")


@pytest.mark.parametrize("code", [4, 1])
def test_a_run_that_does_not_take_its_own_agent_ends_with_the_reason(tmp_path: Path, code: int) -> None:
    def ends(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 1:
            run.host.after(1.0, lambda: child.end(code))

    run = VirtualRun(tmp_path, lambda run, child, _: run.host.after(3.0, lambda: run.finish(child, code)), ends)
    assert run.goes() == code
    if code == 4:
        [stop] = run.calls.all(m.Stop)
        assert (stop.exit_code, len(run.agents)) == (4, 1)
        assert "agent-a0.log" in stop.reason
    else:
        assert (run.calls.all(m.Stop), len(run.agents)) == ([], 2)


def test_a_run_inside_a_replica_of_several_hosts_is_none_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"ADDRESS": "10.0.0.2", "HOST": "h1", "HOST_SLOTS": "2", "OWN_HOSTS": "head"}.items():
        monkeypatch.setenv(f"OUTLAST_{key}", value)
    monkeypatch.setenv("OUTLAST_SECRET", "ab" * 32)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        environ = launcher(tmp_path)._environ(listening)
        assert not {"OUTLAST_ADDRESS", "OUTLAST_HOST", "OUTLAST_HOST_SLOTS", "OUTLAST_OWN_HOSTS"} & set(environ)
        environ = launcher(tmp_path, endpoint="127.0.0.1:1", agents=2)._environ(listening)
        assert environ["OUTLAST_OWN_HOSTS"] == "head-a0,head-a1"
    alone = resolve(cli={}, environ={})
    assert _run._secret(None, tmp_path, alone) is None
    spans = resolve(cli={"endpoint": "127.0.0.1:1"}, environ={})
    assert _run._secret(None, tmp_path, spans) == bytes.fromhex("ab" * 32)


# --- after a coordinator's end --------------------------------------------------------------------------------------
def began(agent: str) -> ev.AgentStarted:
    return ev.AgentStarted(at_s=0.0, agent=agent, pid=1, host=agent.partition(":")[0])


def lost(agent: str) -> ev.AgentLost:
    return ev.AgentLost(at_s=0.0, agent=agent, cause="silent", replicas=[])


def test_only_hosts_that_were_there_at_the_end_are_expected_back() -> None:
    story = [
        began("h1:aa"), began("h2:aa"), lost("h1:aa"), began("h3:aa"), lost("h2:aa"), began("h2:bb"), lost("a0"),
        began("h3:aa"), lost("h4:aa"), began("h4:aa"),
    ]  # fmt: skip
    there, gone = last_heard_of(story)
    assert sorted(event.agent for event in there) == ["h2:bb", "h3:aa", "h4:aa"]
    assert gone == ["h1:aa", "a0"]  # not h2:aa: its host has come anew
