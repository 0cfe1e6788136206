"""TLS under the run's handshake: who is let in, what each end says of a wrong certificate, what strangers can hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.runtime.certificates import NAME, Authority
from tests.runtime.conftest import readable
from tests.runtime.far_members import Far
from tests.runtime.test_units_port import SECRET, with_server

from outlast.config import RunConfig, resolve
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.core.protocol import messages as m
from outlast.errors import ConfigError, WireRefusal
from outlast.journal import _renewed
from outlast.runtime.coordinator._absent_members import call_in
from outlast.runtime.coordinator.server import Server
from outlast.runtime.joining._feeds import Share, Stream, Streams
from outlast.runtime.transport import door as _door
from outlast.runtime.transport.calls import Call
from outlast.runtime.transport.connections import Listener, PeersLost
from outlast.runtime.transport.door import ROOM, Door
from outlast.runtime.transport.frames import COORDINATOR, HeartbeatReply, Link, frame
from outlast.runtime.transport.handshake import Caller, PeerClaim
from outlast.runtime.transport.peer_messages import Final, Hand
from outlast.runtime.transport.seal import FORGED
from outlast.runtime.transport.tls import Tls, _read_by_others
from outlast.runtime.transport.tls_socket import TlsSocket

Address = tuple[str, int]
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(m.FromCoordinator | HeartbeatReply)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


class Entry:
    """A door on the network, in a thread of its own."""

    def __init__(self, tls: Tls | None) -> None:
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address: Address = listening.getsockname()
        self.let_in: list[tuple[socket.socket, PeerClaim]] = []
        self.refused: Counter[str] = Counter()
        self.door = Door(listening, SECRET, COORDINATOR, self._admit, self._refuse, tls)
        self.turns = 0
        self._changed, self._over = threading.Condition(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _admit(self, sock: socket.socket, claim: PeerClaim, _: Any) -> None:
        self.let_in.append((sock, claim))

    def _refuse(self, reason: str, who: str) -> None:
        self.refused[reason] += 1

    def _watch(self) -> None:
        while not self._over:
            if readable(self.door.fileno(), min(0.05, self.door.patience_s)):
                pass
            with self._changed:
                self.door.turn()
                self.turns += 1
                self._changed.notify_all()

    def until(self, test: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(test, 30), (self.refused, self.let_in)

    def call(self, tls: Tls | None, secret: bytes = SECRET) -> Link:
        return Link(self.address, secret, "agent", "h1", 20.0, tls=tls)

    def close(self) -> None:
        self._over = True
        self._thread.join(30)
        self.door.close()
        for sock, _ in self.let_in:
            sock.close()


@pytest.fixture
def opened() -> Iterator[Callable[[Tls | None], Entry]]:
    made: list[Entry] = []

    def open_one(tls: Tls | None) -> Entry:
        made.append(Entry(tls))
        return made[-1]

    yield open_one
    for entry in made:
        entry.close()


# --- who is let in, and who is told what ----------------------------------------------------------------------------
def test_two_ends_with_certificates_of_one_authority_meet_and_nobody_reads_them(
    authority: Authority, opened: Callable[[Tls | None], Entry]
) -> None:
    for tls in (authority.tls(), authority.tls(NAME)):
        entry = opened(tls)
        link = entry.call(tls)
        entry.until(lambda entry=entry: entry.let_in)
        assert isinstance(link.sock, TlsSocket)
        assert (link.sock.version(), entry.let_in[0][1].name) == ("TLSv1.3", "h1")
        link.close()


@pytest.mark.parametrize(
    ("kind", "says"),
    [("expired", "has expired"), ("authority", "is of another authority"), ("use", "is not for this use")],
)
def test_a_wrong_certificate_of_either_end_is_named_by_both(
    authority: Authority, opened: Callable[[Tls | None], Entry], kind: str, says: str
) -> None:
    right, wrong = authority.tls(), authority.wrong(kind)
    entry = opened(right)
    with pytest.raises(WireRefusal, match=f"this host's certificate is refused there: it {says}") as told:
        entry.call(wrong)
    assert told.value.remedy
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith(f"TLS: its certificate {says}")
    entry = opened(wrong)
    with pytest.raises(WireRefusal, match=f"TLS: its certificate {says}"):
        entry.call(right)
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith(f"TLS: this host's certificate is refused there: it {says}")
    assert not entry.let_in


def test_a_revoked_certificate_is_named_by_both_once_the_list_is_there(
    tmp_path: Path, opened: Callable[[Tls | None], Entry]
) -> None:
    """Without a restart: the list is put into the file of the authority. Others go on as before."""
    authority = Authority(tmp_path / "revoking")
    head, stolen, right = (Tls(authority.files(kind)) for kind in ("head", "stolen", "right"))
    entry = opened(head)
    entry.call(stolen).close()
    entry.until(lambda: entry.let_in)
    authority.revoke(authority.files("stolen"))
    _read_again(head)
    with pytest.raises(WireRefusal, match="this host's certificate is refused there: it has been revoked") as told:
        entry.call(stolen)
    assert "a key of its own" in told.value.remedy
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith("TLS: its certificate has been revoked")
    entry.call(right).close()
    entry.until(lambda: len(entry.let_in) == 2)
    entry = opened(stolen)
    with pytest.raises(WireRefusal, match="TLS: its certificate has been revoked"):
        entry.call(Tls(authority.files("right")))


@pytest.mark.parametrize("between", [("20200101000000Z", "20200102000000Z"), ("20990101000000Z", "20990102000000Z")])
def test_a_list_that_is_not_valid_now_lets_nobody_in(
    tmp_path: Path, opened: Callable[[Tls | None], Entry], between: tuple[str, str]
) -> None:
    """The run that would start with it is told so before anything starts."""
    authority = Authority(tmp_path / "old")
    without = tmp_path / "without.pem"
    without.write_text((tmp_path / "old" / "ca.pem").read_text())
    right = Tls(authority.files("before")._replace(ca=str(without)))
    authority.revoke(between=between)
    late = Tls(authority.files("after"))
    with pytest.raises(ConfigError, match="list of revoked ones in tls_ca is not valid now"):
        late.check_own("127.0.0.1")
    with pytest.raises(WireRefusal, match="this host's certificate is refused there"):
        opened(late).call(right)


def test_each_authority_has_a_list_where_one_has(tmp_path: Path, opened: Callable[[Tls | None], Entry]) -> None:
    one, other = Authority(tmp_path / "one", "one"), Authority(tmp_path / "other", "other")
    one.revoke()
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "one" / "ca.pem").read_text() + (tmp_path / "other" / "ca.pem").read_text())
    entry = opened(Tls(one.files()._replace(ca=str(both))))
    with pytest.raises(WireRefusal, match="refused there"):
        entry.call(Tls(other.files()._replace(ca=one.files().ca)))
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith("TLS: its certificate cannot be checked: tls_ca has no list")
    other.revoke()
    both.write_text((tmp_path / "one" / "ca.pem").read_text() + (tmp_path / "other" / "ca.pem").read_text())
    entry = opened(Tls(one.files()._replace(ca=str(both))))
    entry.call(Tls(other.files()._replace(ca=one.files().ca))).close()
    entry.until(lambda: entry.let_in)


def _read_again(tls: Tls) -> None:
    """Have renewed files read now, as a connection does on a thread of its own."""
    tls._look()


def test_a_wrong_name_is_named_by_both(authority: Authority, opened: Callable[[Tls | None], Entry]) -> None:
    """The listener's is for another address than was called; the caller's does not bear the run's name."""
    elsewhere = authority.wrong("name")
    entry = opened(elsewhere)
    with pytest.raises(WireRefusal, match="its certificate is for another name or address"):
        entry.call(authority.tls())
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith("TLS: this host's certificate is refused there: it is for another name")
    entry = opened(authority.tls(NAME))
    named = Tls(authority.files("name", names="DNS:else.where")._replace(name=NAME))
    with pytest.raises(WireRefusal, match="it does not bear their tls_name"):
        entry.call(named)
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith("TLS: its certificate does not bear this run's tls_name")


def test_who_shows_no_certificate_is_told_so(authority: Authority, opened: Callable[[Tls | None], Entry]) -> None:
    entry = opened(authority.tls())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.files().ca)
    with (
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
        socket.create_connection(entry.address, timeout=20) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as tls,
    ):
        tls.recv(1)
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith("TLS: its certificate is missing")


def test_a_run_with_certificates_refuses_a_plain_end_and_the_other_way_round(
    authority: Authority, opened: Callable[[Tls | None], Entry]
) -> None:
    entry = opened(authority.tls())
    with pytest.raises(WireRefusal, match="its run has TLS, and this end has no certificates"):
        entry.call(None)
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith("no TLS, which this run has, but the run's secret")
    entry = opened(None)
    with pytest.raises(WireRefusal, match="its run has no TLS, and this end has"):
        entry.call(authority.tls())
    entry.until(lambda: entry.refused)
    assert next(iter(entry.refused)).startswith("TLS, which this run does not have")


def test_a_certificate_alone_lets_nobody_in(authority: Authority, opened: Callable[[Tls | None], Entry]) -> None:
    entry = opened(authority.tls())
    with pytest.raises((WireRefusal, ConnectionError)):
        entry.call(authority.tls(), b"o" * 32)
    entry.until(lambda: entry.refused)
    assert list(entry.refused) == ["a wrongly signed greeting: another run's secret, or another listener's"]


def test_who_sits_between_with_a_certificate_cannot_pass_the_proofs_on(
    authority: Authority, opened: Callable[[Tls | None], Entry]
) -> None:
    """It speaks TLS with both, and gives each the other's words: they are of another connection."""
    tls = authority.tls()
    entry, between = opened(tls), socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        here = tls.answering(between.accept()[0])
        here.settimeout(20)
        here.greet_within(20)
        there = tls.calling(socket.create_connection(entry.address), "127.0.0.1")
        there.settimeout(20)
        there.greet_within(20)
        with here, there, contextlib.suppress(ConnectionError):
            there.sendall(here.recv(4096))
            here.sendall(there.recv(4096))

    thread = threading.Thread(target=relay)
    thread.start()
    with between, pytest.raises((WireRefusal, ConnectionError)):
        Link(between.getsockname(), SECRET, "agent", "h1", 20.0, tls=tls)
    thread.join(30)
    entry.until(lambda: entry.refused)
    assert list(entry.refused) == ["a wrongly signed greeting: another run's secret, or another listener's"]
    assert not entry.let_in


def test_a_recorded_handshake_is_worth_nothing(authority: Authority, opened: Callable[[Tls | None], Entry]) -> None:
    """Said again over another connection, or reflected to who said it."""
    tls = authority.tls()
    entry = opened(tls)
    plain = Caller(SECRET, COORDINATOR, PeerClaim("agent", "h1"))
    of_another = Caller(SECRET, COORDINATOR, PeerClaim("agent", "h1"), b"another connection")
    for knock in (plain.knock, of_another.knock):
        sock = tls.calling(socket.create_connection(entry.address), "127.0.0.1")
        sock.settimeout(20)
        sock.greet_within(20)
        with sock:
            sock.sendall(knock)
            with pytest.raises(WireRefusal, match="it does not know this secret"):
                plain.prove(sock.recv(plain.wanted))
            assert sock.recv(1) == b""
    entry.until(lambda: sum(entry.refused.values()) == 2)
    assert list(entry.refused) == ["a wrongly signed greeting: another run's secret, or another listener's"]
    with pytest.raises(WireRefusal, match="does not know this run's secret"):
        plain.prove(plain.knock[: plain.wanted])


# --- strangers ------------------------------------------------------------------------------------------------------
def test_strangers_at_a_listener_with_tls_hold_next_to_nothing_and_a_friend_comes_in(
    authority: Authority, opened: Callable[[Tls | None], Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence, junk, half a ClientHello, a whole one and then nothing, junk after it: as many as there are places."""
    monkeypatch.setattr(_door, "PROVE_S", 3600.0)
    tls = authority.tls()
    entry = opened(tls)
    hello = client_hello()
    words = [b"", b"\x16", hello[: len(hello) // 2], hello, hello + os.urandom(400), b"\x16" + os.urandom(500),
             b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), b"\x16\x03\x01\xff\xff" + bytes(400)]  # fmt: skip
    held = []
    for index in range(5 * ROOM):
        held.append(socket.create_connection(entry.address, timeout=20))
        with contextlib.suppress(ConnectionError):
            held[-1].sendall(words[index % len(words)])
    entry.until(lambda: sum(entry.refused.values()) >= 2 * ROOM)
    assert len(entry.door._silent) <= ROOM
    assert len(entry.door._answered) <= ROOM
    assert not entry.door._knocked
    link = entry.call(tls)
    entry.until(lambda: entry.let_in)
    link.close()
    for sock in held:
        sock.close()
    assert all(len(reason) < 200 for reason in entry.refused)
    assert len(entry.refused) < 12


@pytest.mark.parametrize("greets", [True, False])
def test_a_flood_keeps_none_of_the_run_s_own_out(authority: Authority, greets: bool) -> None:
    """Sixteen come in each turn and greet, which takes the hearings of two turns; or four, and all say a byte more in
    each turn."""
    listening, let_in = socket.create_server(("127.0.0.1", 0), backlog=1024), list[str]()
    address, tls, crowd, hello = listening.getsockname(), authority.tls(), list[socket.socket](), client_hello()

    def admit(sock: socket.socket, claim: PeerClaim, _: Any) -> None:
        let_in.append(claim.name)
        sock.close()

    def flood(num: int) -> None:
        for _ in range(num):
            crowd.append(socket.create_connection(address, timeout=20))
            crowd[-1].sendall(hello if greets else hello[:5])
        for sock in [] if greets else crowd:
            with contextlib.suppress(OSError):
                sock.sendall(b"?")

    door = Door(listening, SECRET, "r0.1", admit, lambda *_: None, tls)
    flood(ROOM)
    own = Call("x elsewhere {} {}".format(*address), SECRET, "r0.1", PeerClaim("mesh", "r1.1", (1, 2)), tls)
    with contextlib.closing(own.sock), contextlib.closing(door):
        poll = select.poll()
        poll.register(own.sock, own.events)
        assert poll.poll(20_000)
        own.connected()
        assert not own.proved()  # it greets
        for _ in range(40 if greets else 120):
            flood(16 if greets else 4)
            door.turn()
            if readable(own.sock.fileno(), 0.0) and own.proved():
                break
        while not let_in:
            assert readable(door.fileno(), 20)
            door.turn()
    for sock in crowd:
        sock.close()
    assert let_in == ["r1.1"]


@pytest.mark.parametrize("name", [NAME, "another.example"])
def test_a_greeting_that_is_answered_at_once_goes_on(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The caller's thread is put aside between what it sends and what it reads, and the answer is there already: it
    waits for nothing that was never asked for. Nor is a certificate that is refused then taken for a death."""
    listening, let_in, greet = socket.create_server(("127.0.0.1", 0)), list[str](), TlsSocket.greet

    def admit(sock: socket.socket, claim: PeerClaim, _: Any) -> None:
        let_in.append(claim.name)
        sock.close()

    def slowly(sock: TlsSocket) -> bool:
        done = greet(sock)
        while not done and not sock.server_side:
            door.turn()
            done = greet(sock)
        return done

    monkeypatch.setattr(TlsSocket, "greet", slowly)
    door = Door(listening, SECRET, "r0.1", admit, lambda *_: None, authority.tls(name=NAME))
    place, claim = "x elsewhere {} {}".format(*listening.getsockname()), PeerClaim("mesh", "r1.1", (1, 2))
    call = Call(place, SECRET, "r0.1", claim, authority.tls(name=name))
    poll, fd, proved = select.poll(), call.sock.fileno(), False
    poll.register(door.fileno(), select.POLLIN)
    refused = contextlib.nullcontext() if name == NAME else pytest.raises(WireRefusal, match="certificate")
    with contextlib.closing(door), refused:
        while not let_in:
            poll.register(fd, 0 if proved else call.events)
            ready = dict(poll.poll(20_000))
            assert ready, "both wait for the other"
            if door.fileno() in ready:
                door.turn()
            if fd in ready and call.connecting:
                call.connected()
            elif fd in ready and not proved:
                proved = call.proved()
    call.sock.close()
    assert let_in == (["r1.1"] if name == NAME else [])


def test_who_begins_tls_and_is_gone_is_forgotten(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection was reset before the listener came to it: there is nothing to make a TLS socket of."""
    monkeypatch.setattr(_door, "PROVE_S", 0.0)
    listening, refused = socket.create_server(("127.0.0.1", 0)), list[str]()
    door = Door(listening, SECRET, COORDINATOR, lambda *_: None, lambda why, who: refused.append(why), authority.tls())
    caller = socket.create_connection(listening.getsockname(), timeout=20)
    with monkeypatch.context() as patched:
        patched.setattr(_door, "PROVE_S", 3600.0)
        assert readable(door.fileno(), 20)
        door.turn()
    caller.sendall(b"\x16\x03\x01")
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()
    while not (refused or door._silent == {}):
        assert readable(door.fileno(), 20)
        door.turn()
    door.turn()
    assert (door._silent, door._knocked, len(refused)) == ({}, {}, 1)
    door.close()


def test_who_begins_tls_and_says_nothing_more_is_sent_away_in_time(
    authority: Authority, opened: Callable[[Tls | None], Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_door, "PROVE_S", 0.2)
    entry = opened(authority.tls())
    with socket.create_connection(entry.address, timeout=20) as sock:
        sock.sendall(client_hello()[:100])
        entry.until(lambda: entry.refused)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    assert list(entry.refused) == ["a connection that proved nothing in time"]


def client_hello() -> bytes:
    out = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="127.0.0.1").do_handshake()
    return out.read()


# --- the coordinator ------------------------------------------------------------------------------------------------
def test_the_coordinator_answers_over_tls_and_tells_of_who_it_refused(authority: Authority, tmp_path: Path) -> None:
    files = authority.files()
    config = RunConfig(replicas=2, endpoint="127.0.0.1:1", tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
    tls, wrong = authority.tls(), authority.wrong("expired")

    async def play(server: Server, address: Address) -> None:
        with pytest.raises(WireRefusal):
            await asyncio.to_thread(Link, address, SECRET, "agent", "a0", 20.0, "", wrong)
        link = await asyncio.to_thread(Link, address, SECRET, "agent", "a0", 20.0, "", tls)
        link.send(m.AgentHello(agent="a0", pid=8))
        welcome = await asyncio.to_thread(link.receive, _decoder)
        assert isinstance(welcome, m.Welcome)
        for text in ("x" * (3 << 20), "y", "z"):
            server.port.send(["a0"], frame(m.Stop(epoch=1, reason=text)))
        said: list[Any] = []
        while sum(isinstance(each, m.Stop) for each in said) < 3:
            said.append(await asyncio.to_thread(link.receive, _decoder))
        assert [len(each.reason) for each in said if isinstance(each, m.Stop)] == [3 << 20, 1, 1]
        server.port.hang_up(["a0"])
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(link.receive, _decoder)
        link.close()

    events = with_server(tmp_path / "run", play, config, tls)
    [refused] = [event for event in events if isinstance(event, ev.Refused)]
    assert refused.reason == "TLS: its certificate has expired (a new one: tls_cert)"
    assert not refused.stranger


# --- members --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("by_tls", [True, False])
def test_a_view_forms_between_hosts_and_large_frames_cross_to_who_says_nothing(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, by_tls: bool
) -> None:
    tls = authority.tls() if by_tls else None
    far = Far(monkeypatch, (tls, tls))
    meshes = far.formed()
    assert all(isinstance(mesh.conns[mesh.peers[0]].sock, TlsSocket) is by_tls for mesh in meshes)
    there = threading.Thread(target=lambda: meshes[0].collect(Final, 8, 0, Phase.CONNECT))  # sends what is left, too
    for step in (5, 6):
        meshes[0].broadcast(Hand(step, bytes([step]) * (5 << 20)))
    there.start()
    for step in (5, 6):
        assert meshes[1].collect(Hand, step, 0, Phase.CONNECT)["r0.1"].meta == bytes([step]) * (5 << 20)
    meshes[1].broadcast(Final(8))
    there.join(30)
    assert not there.is_alive()
    for mesh in meshes:
        mesh.close()
    far.close()


def test_members_whose_certificates_differ_lose_each_other_and_both_say_why(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Far(monkeypatch, (authority.tls(), authority.wrong("expired")))
    with pytest.raises(PeersLost):
        far.mesh(1).form()
    assert any("this host's certificate is refused there: it has expired" in why for why in far.listeners[1].refused)
    far.close()
    assert any("its certificate has expired" in why for why in far.listeners[0].refused)


def test_a_joiner_is_fed_over_tls_and_what_was_changed_on_the_way_is_not_taken(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of many records arrives whole; of another one a byte is changed between the two hosts."""
    tls, payload = authority.tls(), torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    listener = Listener("far", "r9.1", SECRET, network="127.0.0.1", tls=tls)
    monkeypatch.setattr("outlast.runtime.transport.endpoints.place_here", lambda: "elsewhere")
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    streams = Streams(listener.feeds, wake)
    good = Stream("far", "r0.1", "r9.1", listener.address, SECRET, (1, 1), tls)
    for step in (3, 4):
        good.put(Share(step, 0, len(payload), len(payload)), [payload])
    good.close()
    found: list[Any] = []
    while sum(isinstance(head, Share) for head, _ in found) < 2:
        found += [(head, bytes(data)) for _, head, data in streams.wait(20.0)]
    assert all(isinstance(stream.sock, TlsSocket) for stream in streams.incoming)
    assert [data == payload.numpy().tobytes() for head, data in found if isinstance(head, Share)] == [True, True]
    with Between(listener.address, struck=1 << 20) as between:
        bad = Stream("far", "r1.1", "r9.1", between.address, SECRET, (1, 1), tls)
        bad.put(Share(5, 0, len(payload), len(payload)), [payload])
        while FORGED not in listener.refused:
            assert not [head for _, head, _ in streams.wait(20.0) if isinstance(head, Share)]
        bad.close()
    streams.close()
    listener.close()
    os.close(wake)


class Between:
    """Somebody on the path to a member, who writes all down, and changes one byte once so many have passed."""

    def __init__(self, address: str, struck: int) -> None:
        self.seen = bytearray()
        *self._rest, host, port = address.split(" ")
        self._to, self._struck = (host, int(port)), struck
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = " ".join([*self._rest, *map(str, self._listening.getsockname())])
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Between:
        self._threads.append(threading.Thread(target=self._serve, daemon=True))
        self._threads[0].start()
        return self

    def _serve(self) -> None:
        here, there = self._listening.accept()[0], socket.create_connection(self._to)
        back = threading.Thread(target=self._pump, args=(there, here, 1 << 60), daemon=True)
        back.start()
        self._pump(here, there, self._struck)
        back.join(30)
        here.close()
        there.close()

    def _pump(self, source: socket.socket, target: socket.socket, struck: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if passed <= struck < passed + len(data):
                    data[struck - passed] ^= 1
                passed += len(data)
                self.seen += data
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self._threads[0].join(30)


@pytest.mark.parametrize("by_tls", [True, False])
def test_who_sits_on_the_path_reads_nothing_of_what_is_said_by_tls(
    authority: Authority, opened: Callable[[Tls | None], Entry], by_tls: bool
) -> None:
    tls = authority.tls() if by_tls else None
    entry = opened(tls)
    with Between("unix there {} {}".format(*entry.address), struck=1 << 60) as between:
        host, port = between.address.split(" ")[2:]
        link = Link((host, int(port)), SECRET, "agent", "readable", 20.0, tls=tls)
        link.send(m.Stop(epoch=1, reason="a word that nobody else may read"))
        entry.until(lambda: entry.let_in)
        with entry.let_in[0][0] as sock:
            sock.settimeout(20)
            while b"a word" not in (data := sock.recv(4096)):
                assert data
        link.close()
    for word in (b"a word that", b"readable"):
        assert (word in between.seen) is not by_tls


def test_a_coordinator_that_has_taken_over_calls_by_tls(authority: Authority) -> None:
    """And is refused, by name, where it has another authority's certificate."""
    listener, heard = Listener("far", "r0.1", SECRET, network="127.0.0.1", tls=authority.tls()), list[str]()
    listener.followed = lambda address, epoch: heard.append(address) or True  # type: ignore[func-returns-value]
    unix, _, *place = listener.address.split(" ")
    at, wrong = " ".join([unix, "elsewhere", *place]), authority.wrong("authority")
    asyncio.run(call_in(SECRET, "far", "x:1", 2, lambda: {} if listener.refused else {"r0.1": at}, wrong))
    asyncio.run(call_in(SECRET, "far", "10.0.0.2:2", 2, lambda: {} if heard else {"r0.1": at}, authority.tls()))
    listener.close()
    assert heard[0] == "10.0.0.2:2"
    assert next(iter(listener.refused)).startswith("TLS: its certificate is of another authority")


# --- settings -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "owner", "refused"),
    [(0o600, 0, False), (0o440, 0, False), (0o640, 7, True), (0o444, 0, True), (0o460, 0, True), (0o400, 7, False)],
)
def test_a_key_of_root_s_may_be_lent_to_a_group(mode: int, owner: int, refused: bool) -> None:
    """As a Secret is that a pod's own user reads, be that root or another."""
    assert _read_by_others(os.stat_result((mode, 1, 1, 1, owner, 0, 1, 0, 0, 0))) == refused


def test_settings_are_whole_and_keys_are_nobody_elses(authority: Authority, tmp_path: Path) -> None:
    files = authority.files()
    given = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}
    config = resolve(
        cli={"endpoint": "127.0.0.1:0"}, environ={f"OUTLAST_{k.upper()}": v for k, v in given.items()}
    ).config
    assert config.tls == files
    toml = tmp_path / "run.toml"
    toml.write_text(
        '[run]\nendpoint = "127.0.0.1:0"\n' + "".join(f'{key} = "{value}"\n' for key, value in given.items())
    )
    assert resolve(cli={}, environ={}, file=toml).config.tls == files
    for missing in given:
        with pytest.raises(ConfigError, match=f"{missing} is not given"):
            resolve(cli={"endpoint": "127.0.0.1:0", **given, missing: None}, environ={})
    with pytest.raises(ConfigError, match="tls_cert and tls_key and tls_ca are not given"):
        resolve(cli={"endpoint": "127.0.0.1:0", "tls_name": "x"}, environ={})
    with pytest.raises(ConfigError, match="nothing leaves this machine"):
        resolve(cli=given, environ={})
    Path(files.key).chmod(0o604)
    with pytest.raises(ConfigError, match="can be read by others"):
        Tls(files)
    Path(files.key).chmod(0o600)
    with pytest.raises(ConfigError, match="no certificate or key can be read"):
        Tls(files._replace(ca=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="do not go together"):
        Tls(files._replace(key=authority.files("other").key))
    with pytest.raises(ConfigError, match="holds no certificate"):
        Tls(files._replace(ca=files.key))


@pytest.mark.parametrize("kind", ["expired", "authority", "name", "use"])
def test_a_host_whose_own_certificate_is_wrong_starts_nothing(authority: Authority, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"would be refused by this host itself, at 127\.0\.0\.1: it "):
        authority.wrong(kind).check_own("127.0.0.1")
    authority.tls().check_own("127.0.0.1")
    authority.tls(NAME).check_own("10.1.1.1")


def test_renewed_files_that_cannot_be_used_are_told_of_once(
    authority: Authority, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old ones would hold in silence until they have expired."""
    monkeypatch.setattr(_renewed, "_APART_S", 0.0)
    files, renewed = authority.files("old"), authority.files("renewed")
    tls = Tls(files)
    before = tls._now
    Path(renewed.key).chmod(0o644)
    for old, new in ((files.cert, renewed.cert), (files.key, renewed.key)):
        Path(new).replace(old)
    for _ in range(5):
        _read_again(tls)
    told = capfd.readouterr().err
    assert told.count("renewed files are not taken") == 1
    assert f"the key in {files.key} can be read by others" in told
    assert tls._now is before
    Path(files.key).chmod(0o600)
    _read_again(tls)
    assert (tls._now is before, capfd.readouterr().err) == (False, "")


def test_renewed_files_are_read_while_a_process_goes_on(
    authority: Authority, opened: Callable[[Tls | None], Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has expired is replaced; half of the renewal changes nothing."""
    monkeypatch.setattr("outlast.runtime.transport.tls._LOOK_S", 0.0)
    expired, renewed = authority.files("expired", days=-1), authority.files("renewed")
    entry, calling = opened(authority.tls()), Tls(expired)
    with pytest.raises(WireRefusal, match="has expired"):
        entry.call(calling)
    Path(renewed.cert).replace(expired.cert)
    with pytest.raises(WireRefusal, match="has expired"):
        entry.call(calling)
    Path(renewed.key).replace(expired.key)
    link = None
    while link is None:  # each call has the files looked at for those that follow
        with contextlib.suppress(WireRefusal):
            link = entry.call(calling)
    link.close()
