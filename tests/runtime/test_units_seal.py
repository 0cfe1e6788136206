"""Frames between hosts: what somebody on the path changes, repeats or leaves out is seen, named, and not obeyed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from tests.runtime.far_members import SECRET, Far

from outlast.core.phases import Phase
from outlast.core.protocol import ViewId
from outlast.errors import WireRefusal
from outlast.runtime.joining import _feeds
from outlast.runtime.joining._feeds import Flushed, Share, _Incoming, _send
from outlast.runtime.transport.connections import PeersLost
from outlast.runtime.transport.frames import HeartbeatReply, Link, frame, read_frame
from outlast.runtime.transport.handshake import Caller, Doorkeeper, PeerClaim
from outlast.runtime.transport.mesh import Final
from outlast.runtime.transport.seal import CODE_BYTES, FORGED, Seal

KEY = b"k" * 32
SHARE = Share(3, 0, 300_000, 300_000)
PAYLOAD = torch.arange(300_000).to(torch.uint8)


def test_each_connection_and_each_direction_has_a_key_of_its_own() -> None:
    found = []
    for _ in range(2):
        caller = Caller(SECRET, "r0.1", PeerClaim("mesh", "r1.1", (1, 2), "run"))
        keeper = Doorkeeper(SECRET, "r0.1")
        keeper.hear(caller.prove(keeper.hear(caller.knock)))
        assert caller.keys == keeper.keys[::-1]
        found += caller.keys
    assert len(set(found)) == 4
    assert all(len(key) == 32 for key in found)


def test_a_code_is_of_one_frame_in_its_place() -> None:
    mine = Seal(KEY)
    codes = [mine.code(b"some", b"thing"), mine.code(b"some", b"thing"), mine.code(b"other")]
    assert len(set(codes)) == 3
    other = Seal(KEY)
    other.check(codes[0], b"something")  # however it is cut
    for code, data in ((codes[0], b"something"), (codes[2], b"other"), (b"", b"something")):  # repeated, left out, none
        late = Seal(KEY)
        late.code(b"something")
        with pytest.raises(WireRefusal, match="changed, repeated or left out"):
            late.check(code, data)


def test_a_coordinator_s_word_that_was_changed_is_not_heard() -> None:
    far, near = socket.socketpair()
    link = object.__new__(Link)
    link.sock, link._theirs = near, Seal(KEY)
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(HeartbeatReply)
    theirs, data = Seal(KEY), frame(HeartbeatReply(epoch=1, sent_s=0.5))
    with far, near:
        far.sendall(theirs.sealed(data[:4], data[4:]))
        assert link.receive(decoder).epoch == 1
        whole = theirs.sealed(data[:4], data[4:])
        far.sendall(whole[:-CODE_BYTES].replace(b"\x01", b"\x02") + whole[-CODE_BYTES:])
        with pytest.raises(WireRefusal, match="changed"):
            link.receive(decoder)


def test_a_coordinator_s_word_said_to_be_longer_is_not_waited_for() -> None:
    far, near = socket.socketpair()
    near.settimeout(30.0)
    with far, near:
        far.sendall(lengthened(Seal(KEY).sealed(bytes(3) + b"\x05", b"12345"), 2))
        with pytest.raises(WireRefusal, match="changed"):
            read_frame(near, Seal(KEY))


def lengthened(data: bytes, at: int) -> bytes:
    """As if it were longer by some power of two."""
    return data[:at] + bytes([data[at] + 1]) + data[at + 1 :]


@pytest.mark.parametrize("what", ["its words", "its length", "its length, beyond all"])
def test_a_peer_s_word_that_was_changed_is_a_lost_peer_s(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    far = Far(monkeypatch)
    first, second = far.formed()
    second.conns["r0.1"].send(Final(4))
    assert set(first.collect(Final, 4, 0, Phase.FINAL)) == {"r1.1"}
    conn, data = second.conns["r0.1"], frame(Final(5))
    assert conn._mine is not None
    whole = conn._mine.sealed(data[:4], data[4:])
    conn.sock.sendall({
        "its words": whole[:-CODE_BYTES] + bytes(CODE_BYTES),
        "its length": lengthened(whole, 1),  # by 64 KiB, which do not come
        "its length, beyond all": lengthened(whole, 0),
    }[what])  # fmt: skip
    with pytest.raises(PeersLost) as lost:
        first.collect(Final, 5, 0, Phase.FINAL)
    assert lost.value.suspects == ("r1.1",)
    assert far.listeners[0].refused == {FORGED: (1, "r1.1")}
    for mesh in (first, second):
        mesh.close()
    far.close()


# --- the state that a joiner gets -----------------------------------------------------------------------------------
@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The donor's end and the joiner's, of a connection between hosts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        donor = socket.create_connection(server.getsockname())
        joiner, _ = server.accept()
    with donor, joiner:
        yield donor, joiner


def received(stream: _Incoming, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count and not stream.ended:
        found += stream.read()
    return found


def test_a_snapshot_comes_with_its_code(pair: tuple[socket.socket, socket.socket]) -> None:
    donor, joiner = pair
    stream, mine = _Incoming(joiner, "r0.1", (1, 1), (b"other", KEY)), Seal(KEY)
    _send(donor, SHARE, [PAYLOAD[:100], PAYLOAD[100:]], mine)
    _send(donor, Flushed(ViewId(1, 2)), [], mine)
    [(share, payload), (flushed, nothing)] = received(stream, 2)
    assert (share, len(nothing), isinstance(flushed, Flushed)) == (SHARE, 0, True)
    assert torch.equal(torch.frombuffer(payload, dtype=torch.uint8), PAYLOAD)


@pytest.mark.parametrize("at", [0, 2, 6, 11, 12, 24, -CODE_BYTES - 1, -1])
def test_a_snapshot_of_which_a_byte_was_changed_is_not_taken(
    pair: tuple[socket.socket, socket.socket], at: int
) -> None:
    """In the message's lengths (larger than can be, or than is sent), in their code, in its head, in its payload, in
    its code. The donor's end stays open: nothing that was only announced is waited for."""
    donor, joiner = pair
    data = bytearray()

    class Sink:
        def sendall(self, part: Any) -> None:
            data.extend(part)

    small = PAYLOAD[:1000]
    _send(Sink(), SHARE, [small], Seal(KEY))  # type: ignore[arg-type]
    data[at] ^= 1
    stream = _Incoming(joiner, "r0.1", (1, 1), (b"other", KEY))
    donor.sendall(data)
    assert received(stream, 1) == []
    assert (stream.ended, stream.forged) == (True, True)


def test_a_snapshot_for_which_there_is_no_memory_ends_its_stream_and_not_the_joiner(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    donor, joiner = pair
    monkeypatch.setattr(_feeds, "_MOST_BYTES", 1 << 62)
    prefix = (1).to_bytes(4, "big") + (1 << 61).to_bytes(8, "big")
    donor.sendall(prefix + Seal(KEY).length_code(prefix))
    stream = _Incoming(joiner, "r0.1", (1, 1), (b"other", KEY))
    assert received(stream, 1) == []
    assert (stream.ended, stream.forged) == (True, False)
