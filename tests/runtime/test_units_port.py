"""Strangers at the coordinator's port, and members that speak for others: refused, counted, and without effect."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.protocol import View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.host_messages import Awaited, HostHere
from outlast.errors import WireRefusal
from outlast.journal import Journal
from outlast.runtime.coordinator import _port
from outlast.runtime.coordinator._authority import check_speaker
from outlast.runtime.coordinator._port import Port
from outlast.runtime.coordinator._refusals import Refusals
from outlast.runtime.coordinator._tls_transport import streams_over
from outlast.runtime.coordinator.server import Server
from outlast.runtime.transport.door import ROOM, Door
from outlast.runtime.transport.frames import MAX_FRAME, Heartbeat, Link, frame, frame_length
from outlast.runtime.transport.handshake import PeerClaim, Role
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.save_messages import FROM_MEMBER, SaveAsked, SaveCertified
from outlast.runtime.transport.seal import CODE_BYTES, FORGED, LENGTH_CODE_BYTES
from outlast.runtime.transport.tls import Tls

SECRET = b"s" * 32
TWO = RunConfig(replicas=2)
Address = tuple[str, int]


def with_server(
    tmp_path: Path,
    play: Callable[[Server, Address], Awaitable[None]],
    config: RunConfig = TWO,
    tls: Tls | None = None,
) -> list[ev.AnyEvent]:
    """A coordinator's port in this process while `play` runs; returns the journal of a run that was then stopped."""

    async def whole() -> None:
        journal = Journal.create(tmp_path)
        progress = Progress(Region(Progress.SIZE))
        server = Server(journal, config, SECRET, progress, 0.0)
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        server.port.open(listening, tls)
        async with asyncio.timeout(100):
            await play(server, listening.getsockname())
            server.handle(m.Stop(reason="enough"))
            await server.finished
        await server.port.close()
        for timer in server._timers.values():
            timer.cancel()
        journal.close()

    asyncio.run(whole())
    with Journal.open_reader(tmp_path) as reader:
        return [entry.event for entry in reader.events()]


def refusals(events: list[ev.AnyEvent]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, ev.Refused):
            found.setdefault(event.reason, []).append(event.count)
    return found


async def throw(address: Address, data: bytes) -> bytes:
    """Send bytes, and wait until the other end has closed."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    try:
        await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def joined(address: Address, role: Role, name: str, secret: bytes = SECRET) -> Link:
    """Tries again, as every client does: on a machine that is busy elsewhere the challenge may time out."""
    for _ in range(5):
        try:
            return await asyncio.to_thread(Link, address, secret, role, name, 10.0)
        except OSError as error:
            failure = error
            if secret != SECRET:
                break
    raise failure


def spoken(link: Link) -> bytes:
    """Everything until the other end closes the connection."""
    link.sock.settimeout(10.0)
    data = b""
    try:
        while more := link.sock.recv(65536):
            data += more
    except ConnectionError:
        pass
    return data


class Short(socket.socket):
    """A connection for which the system has no memory to keep it alive by."""

    def setsockopt(self, *_: Any) -> None:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


async def no_watch(sock: socket.socket) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("watched", [True, False])
def test_a_caller_for_whom_the_system_has_no_room_ends_no_coordinator(
    monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    sock: socket.socket = Short(fileno=near.detach())
    if not watched:
        monkeypatch.setattr(_port, "streams_over", no_watch)
        monkeypatch.setattr(Short, "setsockopt", lambda *_: None)

    async def called() -> None:
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        port = Port(
            SECRET, "x", 1, Refusals(print), receive=lambda *_: None, hung_up=lambda _: None,
            unsound=ended.set_result, idle_s=5.0,
        )  # fmt: skip
        port._admit(sock, PeerClaim("member", "r0.1", (1, 0), "x"), (b"", b""))
        assert await asyncio.wait_for(ended, 20) is None

    asyncio.run(called())
    assert far.recv(1) == b"", "it knows that it has to call again"
    far.close()


def test_a_watch_that_the_system_does_not_have_is_missed_where_the_caller_is_let_go() -> None:
    """asyncio would ask for it in a callback of its own, whose failure is the coordinator's end."""
    near, far = socket.socketpair()
    loop: Any = asyncio.SelectorEventLoop()
    failed, register, short = list[Any](), loop._selector.register, [True]

    def registered(fd: Any, *how: Any) -> Any:
        if fd == near.fileno() and short:
            raise OSError(short.pop() and errno.ENOSPC, os.strerror(errno.ENOSPC))
        return register(fd, *how)

    async def called() -> bytes:
        with pytest.raises(OSError, match="No space left"):
            await streams_over(near)
        reader, writer = await streams_over(near)  # there is one again
        far.sendall(b"?")
        heard = await reader.readexactly(1)
        writer.close()
        await writer.wait_closed()
        return heard

    near.setblocking(False)
    loop._selector.register = registered
    loop.set_exception_handler(lambda _, context: failed.append(context))
    assert loop.run_until_complete(asyncio.wait_for(called(), 20)) == b"?"
    assert failed == []
    loop.close()
    far.close()


def test_random_bytes_are_refused_and_counted_once_a_kind(tmp_path: Path) -> None:
    draw = __import__("random").Random(3)

    async def play(server: Server, address: Address) -> None:
        for size in (1, 3, 7, 40, 5000, 70000):
            for _ in range(3):
                body = bytes(draw.randrange(256) for _ in range(min(size, 300))) * (size // 300 + 1)
                await throw(address, struct.pack(">I", min(size, 4096)) + body)
        await throw(address, frame(("member", "r0.1", b"n", b"p")))
        assert not server.port.writers

    events = with_server(tmp_path, play)
    found = refusals(events)
    assert set(found) <= {
        "bytes that are no greeting of an outlast run of this version",
        "a connection that ended before it proved anything",
    }
    assert sum(max(counts) for counts in found.values()) == 19
    assert all(len(counts) <= 3 for counts in found.values())


def test_oversized_frames_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    async def play(server: Server, address: Address) -> None:
        await throw(address, b"outlast3" + bytes(16) + b"\xff\xff")
        for size in (MAX_FRAME + 1, 0xFFFFFFFF):
            link = await joined(address, "agent", "a0")
            head = struct.pack(">I", size)
            link.sock.sendall(head + link._mine.length_code(head))
            await asyncio.to_thread(spoken, link)
            link.close()

    found = refusals(with_server(tmp_path, play))
    assert max(found[f"a frame announces more than the limit of {MAX_FRAME} bytes"]) == 2
    assert max(found["bytes that are no greeting of an outlast run of this version"]) == 1


def test_a_replayed_handshake_and_a_wrong_secret_are_refused(tmp_path: Path) -> None:
    recorded = b""

    async def play(server: Server, address: Address) -> None:
        nonlocal recorded
        whole = asyncio.Event()

        async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal recorded
            up_reader, up_writer = await asyncio.open_connection(*address)
            recorded = await reader.read(4096)
            up_writer.write(recorded)
            writer.write(await up_reader.read(200))
            proof = await reader.readexactly(32)
            up_writer.write(proof)
            recorded += proof
            whole.set()
            up_writer.close()
            writer.close()

        middle = await asyncio.start_server(tap, "127.0.0.1", 0)
        (await joined(middle.sockets[0].getsockname(), "member", "r0.1")).close()
        await whole.wait()
        middle.close()
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(recorded[:-32])
            await reader.readexactly(56)
            writer.write(recorded[-32:])
            assert await reader.read() == b""
            writer.close()
        await throw(address, recorded)
        with pytest.raises((WireRefusal, OSError)):
            await joined(address, "member", "r0.1", b"another run's secret")

    found = refusals(with_server(tmp_path, play))
    assert max(found["a wrongly signed proof: another run's secret, or a replay"]) == 3
    assert max(found["bytes that are no greeting of an outlast run of this version"]) == 1
    assert max(found["a wrongly signed greeting: another run's secret, or another listener's"]) == 1


def test_garbage_after_a_valid_handshake_ends_that_connection_alone(tmp_path: Path) -> None:
    async def play(server: Server, address: Address) -> None:
        other = await joined(address, "agent", "a1")
        for garbage in (b"\xc1", msgspec.msgpack.encode({"type": "NoSuch"}), msgspec.msgpack.encode(17)):
            link = await joined(address, "agent", "a0")
            data = struct.pack(">I", len(garbage)) + garbage
            link.sock.sendall(link._mine.sealed(data[:4], data[4:]))
            await asyncio.to_thread(spoken, link)
            link.close()
        other.send(m.AgentHello(agent="a1", pid=7))
        decoder = msgspec.msgpack.Decoder(m.FromCoordinator)
        assert isinstance(await asyncio.to_thread(other.receive, decoder), m.Welcome)
        other.close()

    events = with_server(tmp_path, play)
    assert max(refusals(events)["a message that is not of this protocol"]) == 3
    assert [(e.agent, e.pid) for e in events if isinstance(e, ev.AgentStarted)] == [("a1", 7)]


@pytest.mark.parametrize("how", ["changed", "repeated", "lengthened", "without a code", "without codes"])
def test_a_frame_that_was_tampered_with_is_not_obeyed_and_ends_the_connection(tmp_path: Path, how: str) -> None:
    """By somebody on the path, who has let the handshake pass."""

    async def play(server: Server, address: Address) -> None:
        link = await joined(address, "agent", "a0")
        data = frame(m.AgentHello(agent="a0", pid=7))
        whole = link._mine.sealed(data[:4], data[4:])
        sent = {
            "changed": whole[: -CODE_BYTES - 1] + b"\x08" + whole[-CODE_BYTES:],
            "repeated": 2 * whole,
            "lengthened": whole[:2] + b"\x01" + whole[3:],
            "without a code": whole[:-CODE_BYTES] + bytes(CODE_BYTES),
            "without codes": data + bytes(LENGTH_CODE_BYTES + CODE_BYTES),
        }
        link.sock.sendall(sent[how])
        await asyncio.to_thread(spoken, link)  # to the end
        link.close()
        assert server.coordinator.roster.agents == ({"a0"} if how == "repeated" else set())

    events = with_server(tmp_path, play)
    assert refusals(events) == {FORGED: [1]}
    [refused] = [event for event in events if isinstance(event, ev.Refused)]
    assert (refused.peer, refused.stranger) == ("a0", False)


def test_what_an_agent_repeats_is_written_down_once(tmp_path: Path) -> None:
    """After each reconnection it says whom it runs: a coordinator may have died before that was on the disk."""

    async def play(server: Server, address: Address) -> None:
        for _ in range(2):
            link = await joined(address, "agent", "a0")
            link.send(m.AgentHello(agent="a0", pid=7, members=("r0.1",)))
            link.send(m.Spawned(member="r0.1", agent="a0", pid=8))
            link.sock.shutdown(socket.SHUT_WR)
            await asyncio.to_thread(spoken, link)
            link.close()

    started = [e for e in with_server(tmp_path, play) if isinstance(e, ev.ReplicaStarted)]
    assert [(e.replica, e.agent, e.pid) for e in started] == [("r0.1", "a0", 8)]


def test_a_crowd_of_idle_connections_keeps_nobody_out(tmp_path: Path) -> None:
    async def play(server: Server, address: Address) -> None:
        idle = [socket.create_connection(address) for _ in range(ROOM + 40)]
        link = await joined(address, "agent", "a0")
        link.send(m.AgentHello(agent="a0", pid=7))
        await asyncio.to_thread(link.receive, msgspec.msgpack.Decoder(m.FromCoordinator))
        assert "a0" in server.port.writers
        assert server.port.door is not None
        assert len(server.port.door._silent) <= ROOM
        link.close()
        for sock in idle:
            sock.close()

    found = refusals(with_server(tmp_path, play))
    assert max(found["too many connections that prove nothing"]) >= 40


def test_a_member_speaks_for_itself_alone(tmp_path: Path) -> None:
    async def play(server: Server, address: Address) -> None:
        link = await joined(address, "member", "r1.1")
        link.send(m.Left(member="r0.1", view=ViewId(1, 1)))
        await asyncio.to_thread(spoken, link)
        link.close()

    assert refusals(with_server(tmp_path, play)) == {"a message in another's name": [1]}


V = ViewId(1, 1)
GONE = m.Exited(member="r1.1", cause="signal")
ALLOWED = [
    ("member", "r1.1", m.Left(member="r1.1", view=V)),
    ("member", "r1.1", Heartbeat(sender="r1.1", sent_s=0.0)),
    ("agent", "a0", Heartbeat(sender="a0", sent_s=0.0)),
    ("member", "r1.1", SaveCertified(member="r1.1", step=3)),
    ("agent", "a0", m.AgentHello(agent="a0", pid=1)),
    ("agent", "a0", GONE),
    ("agent", "a1", m.Exited(member="r9.1", cause="signal")),
    ("launcher", "launcher", m.AgentGone(agent="a0")),
    ("launcher", "launcher", m.Stop(reason="interrupt")),
    ("launcher", "launcher", SaveAsked(reason="somebody asked")),
]
REFUSED = [
    ("member", "r1.1", m.Hello(member="r2.1", agent="a0", epoch=0)),
    ("member", "r1.1", Heartbeat(sender="r0.1", sent_s=0.0)),
    ("member", "r1.1", GONE),
    ("member", "r1.1", m.Stop()),
    ("member", "a0", m.AgentHello(agent="a0", pid=1)),
    ("agent", "a1", GONE),
    ("agent", "a0", m.AgentHello(agent="a1", pid=1)),
    ("agent", "a0", m.Spawned(member="r1.1", agent="a1", pid=1)),
    ("agent", "r1.1", m.Left(member="r1.1", view=V)),
    ("agent", "a0", m.AgentGone(agent="a1")),
    ("launcher", "launcher", m.Done(member="r1.1", view=V, steps=1)),
    ("launcher", "launcher", Heartbeat(sender="launcher", sent_s=0.0)),
    ("member", "r1.1", SaveCertified(member="r2.1", step=3)),
    ("agent", "a0", SaveCertified(member="a0", step=3)),
    ("agent", "a0", SaveAsked(reason="an agent wants one")),
]


def agent_of(member: str) -> str:
    return "a0" if member == "r1.1" else ""


@pytest.mark.parametrize(("role", "name", "message"), ALLOWED)
def test_what_each_role_may_say(role: str, name: str, message: Any) -> None:
    check_speaker(role, name, message, agent_of)


@pytest.mark.parametrize(("role", "name", "message"), REFUSED)
def test_what_it_may_not(role: str, name: str, message: Any) -> None:
    with pytest.raises(WireRefusal):
        check_speaker(role, name, message, agent_of)


def test_every_message_to_the_coordinator_has_a_speaker() -> None:
    """A new message that nobody may send would be refused in every run: say here who may."""
    import typing

    known = {type(message) for _, _, message in (*ALLOWED, *REFUSED)}
    from outlast.runtime.coordinator import _authority as _speaker

    named = {*_speaker._MEMBER, *_speaker._AGENT, *_speaker._OF_ITS_RANKS, *_speaker._EITHER, *_speaker._LAUNCHER}
    assert {*typing.get_args(m.ToCoordinator), *FROM_MEMBER, SaveAsked, HostHere, Awaited} == named
    assert known - {Heartbeat} <= named


def test_frames_are_limited() -> None:
    with pytest.raises(WireRefusal, match="limit"):
        frame_length(struct.pack(">I", MAX_FRAME + 1))
    with pytest.raises(ValueError, match="over the limit"):
        frame(b"x" * (MAX_FRAME + 1))


def test_the_end_of_a_run_is_told_whole(tmp_path: Path) -> None:
    """Steps that heartbeats told of, the last losses, and an account that sums to the wall time."""

    async def play(server: Server, address: Address) -> None:
        server.coordinator.view = View(id=V, members=("r0.1",))
        server.coordinator.roster.add("r0.1", "a0", "member")
        server.coordinator.roster.add("r1.1", "a0", "member")
        server._beat("r1.1", Heartbeat(sender="r1.1", sent_s=0.0, view=(1, 1), committed=4, losses=((3, 0.5),)))

    events = with_server(tmp_path, play)
    progress, end = events[-2:]
    assert isinstance(progress, ev.ProgressMade)
    assert progress.losses == [(3, 0.5)]
    assert isinstance(end, ev.RunFinished)
    assert end.steps == 4
    parts = {name: s for name, s in end.seconds.items() if name != "wall"}
    assert sum(parts.values()) == pytest.approx(end.seconds["wall"], abs=1e-6)


def test_a_record_that_is_stored_is_written_again_while_the_claim_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another may have followed: then the record's being what it was is no reason to tell a view."""

    async def play(server: Server, address: Address) -> None:
        record = m.FleetRecord(view=View(id=ViewId(1, 1), members=("r0.1",)))
        server._persist(record)
        server.journal.claim("another")
        server._persist(record)  # on one host the next write says so
        assert not server.finished.done()
        monkeypatch.setattr(Journal, "held", property(lambda self: False))
        server._persist(record)
        assert server.finished.done()

    with_server(tmp_path, play)


def test_who_gave_up_before_anybody_listened_again_is_called_no_stranger() -> None:
    """The run's own callers wait at the socket that a coordinator's successor inherits, and hang up in time."""
    listening = socket.socket(socket.AF_UNIX)
    refused: list[str] = []
    listening.bind("")  # the kernel gives it a name
    listening.listen()
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(listening.getsockname())
            caller.send(b"outlast3")
    door = Door(listening, SECRET, "coordinator", lambda *_: None, lambda reason, _: refused.append(reason))
    door.turn()
    assert refused == []
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(listening.getsockname())
        door.turn()
        caller.send(b"outlast3")
    door.turn()
    assert refused == ["a connection that ended before it proved anything"]
    door.close()
