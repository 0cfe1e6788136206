"""How members learn where the coordinator is that has taken over: by a file of their host, and by its own call."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.core.protocol import Coordinator, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.roster import Settings
from outlast.errors import WireRefusal
from outlast.runtime.coordinator._absent_members import call_in
from outlast.runtime.transport.connections import Listener
from outlast.runtime.transport.coordinator_place import CoordinatorPlace, keep_place
from outlast.runtime.transport.endpoints import caller_for, lanes_address
from outlast.runtime.transport.handshake import FOLLOWED, OTHER_RUN, Caller, PeerClaim

SECRET, RUN = b"s" * 32, "run"
FIRST, SECOND, THIRD = (("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3))


class Host:
    """A member's socket, and the folder of its host. `own` is the member's, `others` another process's there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own, self.others = CoordinatorPlace(FIRST, folder, RUN), CoordinatorPlace(FIRST, folder, RUN)
        self.listener = Listener(RUN, "r0.1", SECRET, network="127.0.0.1")
        self.listener.followed = self.own.followed
        unix, _, address, port = self.listener.address.split(" ")
        self.address = f"{unix} elsewhere {address} {port}"

    def call(self, claim: PeerClaim, secret: bytes = SECRET) -> list[bytes]:
        """Somebody calls, and is hung up on: what was sent."""
        caller, sent = Caller(secret, "r0.1", claim), []
        with caller_for(self.address)[0] as sock:
            sock.settimeout(20)
            sock.connect(caller_for(self.address)[1])  # type: ignore[arg-type]
            sent.append(caller.knock)
            sock.sendall(sent[-1])
            reply = sock.recv(caller.wanted, socket.MSG_WAITALL)
            if reply:
                sent.append(caller.prove(reply))
                sock.sendall(sent[-1])
                assert sock.recv(1) == b""
        return sent

    def replay(self, sent: list[bytes]) -> None:
        """The same bytes once more."""
        with caller_for(self.address)[0] as sock:
            sock.settimeout(20)
            sock.connect(caller_for(self.address)[1])  # type: ignore[arg-type]
            sock.sendall(sent[0])
            assert sock.recv(56, socket.MSG_WAITALL)
            sock.sendall(sent[1])
            assert sock.recv(1) == b""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.listener.close()


def said(epoch: int, address: str = "10.0.0.2:2", run: str = RUN) -> PeerClaim:
    return PeerClaim("coordinator", address, (epoch, 0), run)


def until(test: Callable[[], bool], absent: dict[str, str]) -> Callable[[], dict[str, str]]:
    return lambda: {} if test() else absent


def test_all_of_a_host_turn_to_the_one_that_calls_while_the_member_computes(host: Host) -> None:
    """Nobody looks after the member's mesh; another member that is called is gone."""
    keep_place(host.folder, "10.0.0.1:1", 1, RUN)
    assert host.others.now() == FIRST
    gone = Listener(RUN, "r1.1", SECRET, network="127.0.0.1")
    gone.close()
    nowhere = gone.address.replace(gone.address.split(" ")[1], "elsewhere")
    absent = until(lambda: host.others.now() == SECOND, {"r1.1": nowhere, "r2.1": "nonsense !", "r0.1": host.address})
    asyncio.run(call_in(SECRET, RUN, "10.0.0.2:2", 2, absent))
    assert host.own.now() == host.others.now() == SECOND
    assert host.listener.refused == {}


def test_of_a_replica_of_several_ranks_the_lead_is_called(host: Host) -> None:
    """On another host, whose place is not this one's."""
    rank = Listener(RUN, "r0.1", SECRET, network="127.0.0.1")
    other = rank.address.replace(rank.address.split(" ")[1], "elsewhere")
    absent = until(lambda: host.others.now() == SECOND, {"r0.1": lanes_address([host.address, other])})
    asyncio.run(asyncio.wait_for(call_in(SECRET, RUN, "10.0.0.2:2", 2, absent), 20))
    rank.close()
    assert host.others.now() == SECOND
    assert rank.refused == {}


NO_ADDRESSES = [
    "x elsewhere 127.0.0.1 65536", "x elsewhere 127.0.0.1 99999999999999999999", "x elsewhere 127.0.0.1 \u00b2",
    "x elsewhere 127.0.0.1 \u0663", "x elsewhere 127.0.0.1 -1", "x elsewhere 127.0.0.1 ", "x elsewhere localhost 1",
    "x elsewhere \udc80 1", "x elsewhere " + "a" * 64 + ".b 1", "x elsewhere fe80::1%\u00e9 1", "x elsewhere  1",
    "x elsewhere 127.1 1", "|", "x elsewhere 127.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("said", NO_ADDRESSES)
def test_what_is_no_address_of_a_member_is_called_by_nobody(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no name is looked up for it: that takes long, and the loop would stand meanwhile."""
    asked: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, target: asked.append(target))
    with contextlib.suppress(OSError):
        caller_for(said)[0].close()
        assert len(said.split(" ")) == 1, "a socket of this machine"
    assert asked == []


def test_one_strange_address_keeps_no_other_member_from_being_called(host: Host) -> None:
    strange = {f"r{index}.1": said for index, said in enumerate([*NO_ADDRESSES, "\udc80", "a" * 200], 1)}
    absent = until(lambda: host.others.now() == SECOND, strange | {"r0.1": host.address})
    asyncio.run(asyncio.wait_for(call_in(SECRET, RUN, "10.0.0.2:2", 2, absent), 20))
    assert host.others.now() == SECOND


def test_nobody_is_called_who_has_come(host: Host) -> None:
    asyncio.run(call_in(SECRET, RUN, "10.0.0.2:2", 2, dict))
    assert host.own.now() == FIRST


def test_one_that_was_followed_is_refused_and_so_is_another_of_the_same_epoch(host: Host) -> None:
    host.call(said(3, "10.0.0.3:3"))
    assert host.others.now() == THIRD
    host.call(said(3, "10.0.0.3:3"))  # it calls until it is heard
    assert host.listener.refused == {}
    for stale in (said(2), said(3)):
        host.call(stale)
    assert host.listener.refused == {FOLLOWED: (2, "10.0.0.2:2")}
    assert host.own.now() == host.others.now() == THIRD
    host.call(said(4))
    assert host.others.now() == SECOND


@pytest.mark.parametrize("address", ["", "nowhere", "10.0.0.2", "10.0.0.2:x", "10.0 .0.2:2", "\u00e9:2"])
def test_what_is_no_address_is_refused(host: Host, address: str) -> None:
    host.call(said(2, address))
    assert host.listener.refused == {FOLLOWED: (1, address)}
    assert host.own.now() == host.others.now() == FIRST
    host.call(said(2))
    assert host.others.now() == SECOND


def test_strangers_other_runs_and_recordings_are_refused(host: Host) -> None:
    sent = host.call(said(2))
    assert host.others.now() == SECOND
    keep_place(host.folder, "10.0.0.3:3", 3, RUN)
    with pytest.raises(WireRefusal, match="does not know this secret"):
        host.call(said(9), secret=b"o" * 32)
    host.call(said(9, run="other"))
    host.replay(sent)
    host.call(said(3, "10.0.0.3:3"))  # by when all before is counted
    reasons = {reason.partition(":")[0]: count for reason, (count, _) in host.listener.refused.items()}
    assert reasons == {"a wrongly signed greeting": 1, OTHER_RUN: 1, "a wrongly signed proof": 1}
    assert host.own.now() == host.others.now() == THIRD


def test_nobody_else_is_asked_where_the_coordinator_stays(tmp_path: Path) -> None:
    """With a record of one host, and at the socket of a rank that is not its replica's lead."""
    place = CoordinatorPlace(FIRST, None, RUN)
    assert not place.followed("10.0.0.2:2", 9)
    assert place.now() == FIRST
    listener = Listener(RUN, "r0.1", SECRET, network="127.0.0.1")
    assert not listener.followed("10.0.0.2:2", 9)
    listener.close()


def test_the_file_never_goes_back_and_who_knows_better_puts_it_right(tmp_path: Path) -> None:
    place = CoordinatorPlace(FIRST, tmp_path, RUN)
    keep_place(tmp_path, "10.0.0.9:9", 7, "earlier")  # the folder has had another run
    assert place.now() == FIRST
    keep_place(tmp_path, "10.0.0.2:2", 2, RUN)
    assert place.now() == SECOND
    keep_place(tmp_path, "10.0.0.1:1", 1, RUN)
    assert (tmp_path / "coordinator").read_text() == f"10.0.0.2:2 2 {RUN}\n"
    (tmp_path / "coordinator").write_text(f"10.0.0.1:1 1 {RUN}\n")  # of two that wrote at once
    assert place.now() == SECOND
    assert CoordinatorPlace(FIRST, tmp_path, RUN).now() == SECOND
    (tmp_path / "coordinator").write_text("nonsense")
    assert place.now() == SECOND
    assert [path.name for path in tmp_path.iterdir()] == ["coordinator"]


def test_who_takes_over_knows_where_the_living_of_the_last_view_are_called() -> None:
    first = Coordinator(Settings(num_replicas=2), 1)
    told: list[Any] = []
    for agent, member in (("a0", "r0.1"), ("a1", "r1.1")):
        told += first.handle(0.0, m.AgentHello(agent=agent, pid=1, members=(), epoch=0, number=1))
        told += first.handle(0.0, m.Spawned(member=member, agent=agent, pid=2))
    for member, agent in (("r0.1", "a0"), ("r1.1", "a1")):
        hello = m.Hello(member=member, agent=agent, epoch=0, address=f"at {member}")
        told += first.handle(1.0, hello)
    told += first.handle(2.0, m.Exited(member="r1.1", cause="signal"))
    record = [action.record for action in told if isinstance(action, m.Persist)][-1]
    stored = msgspec.msgpack.encode(record)
    second = Coordinator(Settings(num_replicas=2), 2, msgspec.msgpack.decode(stored, type=m.FleetRecord))
    assert second.callable_at == {"r0.1": "at r0.1"}


def test_who_finds_the_run_ended_tells_agents_with_which_code() -> None:
    record = m.FleetRecord(view=None, placement={"r0.1": "a0"}, outcome="finished", exit_code=10, detail="unsaved")
    told = Coordinator(Settings(num_replicas=1), 2, record).handle(0.0, m.AgentHello(agent="a0", pid=1))
    assert m.Tell(to=("a0",), message=m.Stop(epoch=2, reason="finished", exit_code=10)) in told
    assert told[-1] == m.Finish(outcome="finished", exit_code=10, steps=0, detail="unsaved")


def test_a_record_of_before_says_nothing_of_addresses() -> None:
    view = View(id=ViewId(1, 1), members=("r0.1",), start=True)
    kept = msgspec.to_builtins(m.FleetRecord(view=view, placement={"r0.1": "a0"}))
    del kept["addresses"]
    record = msgspec.convert(kept, m.FleetRecord)
    assert Coordinator(Settings(num_replicas=1), 2, record).callable_at == {}
