"""A joiner's end of a stream: what comes in pieces is whole, and strangers cannot make it take anything."""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outlast.core.protocol import ViewId
from outlast.runtime.joining import _feeds
from outlast.runtime.joining._feeds import Flushed, Rest, Share, Stream, Streams, _Incoming, _send
from outlast.runtime.training.frozen import OutcomeShare
from outlast.runtime.transport import calls
from outlast.runtime.transport.calls import reach
from outlast.runtime.transport.connections import Listener
from outlast.runtime.transport.door import ROOM
from outlast.runtime.transport.handshake import PeerClaim

SECRET = b"of this run"
PAYLOAD = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
SHARE = Share(3, 0, len(PAYLOAD), len(PAYLOAD))


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("streams-test", "r9.1", SECRET)
    yield made
    made.close()


@pytest.fixture
def streams(listener: Listener) -> Iterator[Streams]:
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    made = Streams(listener.feeds, wake)
    yield made
    made.close()
    os.close(wake)


@pytest.fixture
def donor(listener: Listener) -> Iterator[socket.socket]:
    with reach(listener.address, SECRET, "r9.1", PeerClaim("feed", "r0.1", (1, 1), "streams-test"), 20) as sock:
        yield sock


class Sink:
    """Where a donor sends."""

    def __init__(self) -> None:
        self.data = b""

    def sendall(self, data: bytes) -> None:
        self.data += data


def encoded(head: object, payload: list[torch.Tensor]) -> bytes:
    sink = Sink()
    _send(sink, head, payload)  # type: ignore[arg-type]
    return sink.data


def test_a_payload_in_pieces_comes_whole_and_can_be_written_where_it_is() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        stream = _Incoming(there, "r0.1", (1, 1))
        data = encoded(SHARE, [PAYLOAD]) + encoded(Flushed(ViewId(1, 2)), [])
        edges = [0, 5, 12, 20, 70_000, len(data) - 3, len(data)]
        found = []
        for lo, hi in itertools.pairwise(edges):
            at = lo
            while at < hi:
                at += here.send(data[at : min(hi, at + 50_000)])
                found += stream.read()
        assert [type(head) for head, _ in found] == [Share, Flushed]
        payload = torch.frombuffer(found[0][1], dtype=torch.uint8)
        assert torch.equal(payload, PAYLOAD)
        assert not found[0][1].readonly
        assert len(found[1][1]) == 0


def test_a_stream_is_who_was_proved(streams: Streams, donor: socket.socket) -> None:
    donor.sendall(encoded(Flushed(ViewId(1, 2)), []))
    [(stream, head, _)] = said_in(streams, 1)
    assert isinstance(head, Flushed)
    assert (stream.member, stream.serve, stream.flushed) == ("r0.1", (1, 1), ViewId(1, 2))


def said_in(streams: Streams, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += streams.wait(5.0)
    return found


def test_a_joiner_is_told_what_still_waits_for_it(streams: Streams, listener: Listener) -> None:
    """Three outcomes are queued before the donor's thread can send: the joiner that has the first has two to come."""
    held = threading.Event()
    frozen: Any = SimpleNamespace(ready=lambda: (held.wait(30.0), PAYLOAD)[1])
    stream = Stream("streams-test", "r0.1", "r9.1", listener.address, SECRET, (1, 1))
    stream.put(SHARE, None, frozen)
    for step in (3, 4):
        stream.put(OutcomeShare(step, b"", ()))
    held.set()
    said: list[Any] = []
    while sum(isinstance(head, Rest) for head in said) < 3:
        said += [head for _, head, _ in streams.wait(5.0)]
    assert [type(head) for head in said] == [Share, Rest, OutcomeShare, Rest, OutcomeShare, Rest]
    assert [head.count for head in said if isinstance(head, Rest)] == [2, 1, 0]
    assert not streams.incoming[0].coming
    stream.close()


def test_a_donor_that_does_not_reach_a_joiner_that_lives_calls_again(
    streams: Streams, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is the only one nobody else would ever serve the joiner, which cannot know that it was called."""
    crowd, prove = list[socket.socket](), calls._proved

    def late(sock: socket.socket, *known: Any) -> Any:
        if not crowd:
            for _ in range(ROOM + 1):
                crowd.append(socket.socket(socket.AF_UNIX))
                crowd[-1].connect("\0" + listener.address)
            assert ended(sock)
        return prove(sock, *known)

    monkeypatch.setattr(calls, "_proved", late)
    monkeypatch.setattr(calls, "_TRIES", 1)
    stream = Stream("streams-test", "r0.1", "r9.1", listener.address, SECRET, (1, 1))
    stream.put(SHARE, [PAYLOAD])
    said: list[Any] = []
    while not said:
        assert not stream.broken
        said += [head for _, head, _ in streams.wait(1.0)]
    assert said[0] == SHARE
    stream.close()
    for idle in crowd:
        idle.close()


def test_a_stream_that_is_closed_with_a_full_queue_ends_when_all_of_it_was_sent(listener: Listener) -> None:
    """Else its thread and its connection stay, and wait for more."""
    begun, held, byte = threading.Event(), threading.Event(), torch.zeros(1, dtype=torch.uint8)
    frozen: Any = SimpleNamespace(ready=lambda: (begun.set(), held.wait(60.0), byte)[2])
    stream = Stream("streams-test", "r0.1", "r9.1", listener.address, SECRET, (1, 1))
    stream.put(SHARE, None, frozen)
    assert begun.wait(60)
    for step in range(3, 19):
        stream.put(OutcomeShare(step, b"", ()))
    assert stream._queue.full()
    stream.close()
    held.set()
    stream._thread.join(60)
    assert (stream._thread.is_alive(), stream.broken) == (False, False)


def ended(sock: socket.socket) -> bool:
    """Whether the other end lets go of this one."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(20_000))


def test_a_donor_whose_joiner_is_gone_calls_it_no_more(listener: Listener) -> None:
    stream = Stream("streams-test", "r0.1", "r9.1", listener.address + "gone", SECRET, (1, 1))
    stream._thread.join(20)
    assert stream.broken
    assert not stream._thread.is_alive()


def test_a_donor_that_has_no_thread_for_a_joiner_trains_on_and_feeds_it_when_there_is_one(
    streams: Streams,
    listener: Listener,
    refuse: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_feeds, "_THREAD_S", 0.0)
    refuse.add("outlast-feed-")
    stream = Stream("streams-test", "r0.1", "r9.1", listener.address, SECRET, (1, 1))
    stream.put(SHARE, [PAYLOAD])
    refuse.clear()
    stream.put(OutcomeShare(3, b"", ()))
    said: list[Any] = []
    while len(said) < 4:
        said += [head for _, head, _ in streams.wait(5.0)]
    assert [type(head) for head in said] == [Share, Rest, OutcomeShare, Rest]
    assert capfd.readouterr().err.count("no thread to feed r9.1 from: can't start new thread") == 1
    stream.close()


def test_a_joiner_that_no_thread_could_feed_in_time_is_reached_and_may_ask_again(
    streams: Streams, listener: Listener, refuse: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only donor may be this one: who was never called waits for ever. What it has missed is not kept for it."""
    monkeypatch.setattr(_feeds, "_THREAD_S", 0.0)
    refuse.add("outlast-feed-")
    stream = Stream("streams-test", "r0.1", "r9.1", listener.address, SECRET, (1, 1))
    for step in range(3, 50):
        stream.put(OutcomeShare(step, b"", ()))
        assert not stream.broken
        assert stream._queue.qsize() <= 16
    refuse.clear()
    stream.put(OutcomeShare(50, b"", ()))
    while not any(found.ended for found in streams.incoming):
        assert streams.wait(5.0) == []


def test_after_a_thread_was_not_to_be_had_the_next_step_does_not_try_again(
    listener: Listener, refuse: set[str]
) -> None:
    """A try may take seconds where there is no memory for a thread's first frames."""
    refuse.add("outlast-feed-")
    stream = Stream("streams-test", "r0.1", "r9.1", listener.address, SECRET, (1, 1))
    refuse.clear()
    tried = stream._thread
    stream.put(SHARE, [PAYLOAD])
    assert stream._thread is tried


def test_what_is_half_here_is_on_its_way(streams: Streams, donor: socket.socket) -> None:
    """A joiner that loads its state does not read: what its donor said before is old when it looks again."""
    whole = encoded(OutcomeShare(3, b"", ()), [PAYLOAD[:1000]])
    donor.sendall(encoded(Rest(0), []) + whole[:20])
    [(stream, _, _)] = said_in(streams, 1)
    assert (stream.behind, stream.coming) == (0, True)
    donor.sendall(whole[20:] + encoded(Rest(0), []))
    said_in(streams, 2)
    assert not stream.coming


@pytest.mark.parametrize(
    "data",
    [
        (20).to_bytes(4, "big") + (1 << 60).to_bytes(8, "big"),
        bytes(12),
        (3).to_bytes(4, "big") + bytes(8) + b"\xc1\xc1\xc1",
    ],
    ids=["more than the host holds", "nothing", "no message"],
)
def test_a_donor_that_cannot_be_understood_is_no_donor(streams: Streams, donor: socket.socket, data: bytes) -> None:
    donor.sendall(data)
    while not any(stream.ended for stream in streams.incoming):
        assert streams.wait(5.0) == []
