"""One connection by TLS, both ends here: how long a slow end is waited for, and for what; what fails beside it."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait as ready
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.certificates import Authority

from outlast.runtime.coordinator._tls_transport import streams_over
from outlast.runtime.joining._feeds import Share, _send
from outlast.runtime.transport import tls_socket
from outlast.runtime.transport.calls import Call, passes
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.tls_socket import TlsSocket

Ends = tuple[TlsSocket, TlsSocket]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def ends(authority: Authority) -> Iterator[Ends]:
    """Little is on its way between them at a time; neither waits."""
    tls, near = authority.tls(), socket.socket()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        near.connect(listening.getsockname())
        far = listening.accept()[0]
    one, other = tls.calling(near, "127.0.0.1"), tls.answering(far)
    while not all([one.greet(), other.greet()]):
        pass
    yield one, other
    one.close()
    other.close()


class Poller:
    """In the place of the kernel's: `poll` does what a test says."""

    def __init__(self, poll: Callable[[int, float], bool]) -> None:
        self._poll, self._events = poll, 0

    def register(self, fd: int, events: int) -> None:
        assert fd >= 0
        self._events = events

    def poll(self, ms: float) -> list[int]:
        return [1] if self._poll(self._events, ms) else []


def polling(monkeypatch: pytest.MonkeyPatch, made: Callable[[], Poller]) -> None:
    names = SimpleNamespace(POLLIN=select.POLLIN, POLLOUT=select.POLLOUT, poll=made)
    monkeypatch.setattr(tls_socket, "select", names)


def test_a_joiner_that_takes_its_share_slowly_is_sent_all_of_it(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all it takes longer than a donor waits for one that takes nothing."""
    (donor, joiner), taken, now_s = ends, bytearray(), [0.0]
    payload = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)

    def take() -> bool:
        """Whether the end has not come."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(4):
                if not (data := joiner.recv(1 << 14)):
                    return False
                taken.extend(data)
        return True

    def wait(events: int, ms: float) -> bool:
        assert events == select.POLLOUT
        take()
        now_s[0] += 2.0  # for 64 KiB
        return ms > 2000.0

    polling(monkeypatch, lambda: Poller(wait))
    monkeypatch.setattr(tls_socket, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    donor.settimeout(30.0)
    _send(donor, Share(3, 0, len(payload), len(payload), plain=bytes(1 << 20)), [payload])
    assert now_s[0] > 60.0
    donor.shutdown(socket.SHUT_WR)
    while take():
        pass
    assert bytes(taken).endswith(payload.numpy().tobytes())


def test_a_joiner_that_takes_nothing_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_ms: list[float] = []
    polling(monkeypatch, lambda: Poller(lambda _, ms: asked_ms.append(ms) or False))  # type: ignore[func-returns-value]
    ends[0].settimeout(30.0)
    with pytest.raises(TimeoutError):
        _send(ends[0], Share(3, 0, 1 << 20, 1 << 20), [torch.zeros(1 << 20, dtype=torch.uint8)])
    assert len(asked_ms) == 1
    assert asked_ms[0] == pytest.approx(30_000.0, abs=20_000.0)


def test_who_reads_and_who_writes_wait_each_for_its_own(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for room, and before it has begun to the other waits for something to read."""
    sock, waited, begun = ends[0], dict[str, int](), threading.Event()
    sock.settimeout(20.0)

    def read() -> None:
        with pytest.raises(TimeoutError):
            sock.recv(1)

    reader = threading.Thread(target=read, name="reader")

    def made() -> Poller:
        name = threading.current_thread().name
        if name == "reader":
            begun.set()
        elif name not in waited:
            reader.start()
            assert begun.wait(20)
        return Poller(lambda events, _: bool(waited.update({name: events})))  # type: ignore[func-returns-value]

    polling(monkeypatch, made)
    with pytest.raises(TimeoutError):
        sock.sendall(bytes(1 << 22))
    reader.join(20)
    assert waited == {threading.current_thread().name: select.POLLOUT, "reader": select.POLLIN}


def test_one_that_another_thread_has_closed_is_a_connection_that_ended(ends: Ends) -> None:
    """It was to wait for more, and came to that after the other had closed."""
    sock = ends[0]

    def wants() -> bytes:
        raise ssl.SSLWantReadError

    sock.settimeout(20.0)
    sock.close()
    with pytest.raises(ConnectionError):
        sock._patiently(wants)


@pytest.mark.parametrize("resets", [False, True])
def test_a_door_that_lets_go_before_the_greeting_is_a_crowd_and_nobody_s_death(
    authority: Authority, resets: bool
) -> None:
    """It was full when the connection had just been made."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = "x elsewhere {} {}".format(*listening.getsockname())
        call = Call(place, b"s" * 16, "r0.1", PeerClaim("mesh", "r1.1", (1, 2)), authority.tls())
        far = listening.accept()[0]
    if resets:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    assert ready([call.sock], 20)
    call.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # it is reset when that has been asked for

    def goes_on() -> None:
        call.connected()
        call.proved()

    with pytest.raises(OSError) as ended:
        goes_on()
    call.sock.close()
    assert passes(ended.value)


def test_the_end_of_what_is_written_to_who_has_gone_is_nothing_new(ends: Ends) -> None:
    one, other = ends

    async def ended() -> None:
        _, writer = await streams_over(one)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        assert ready([one], 20)
        one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # it is reset when that has been asked for
        with pytest.raises(OSError):
            one.shutdown(socket.SHUT_WR)
        writer.write_eof()
        writer.close()

    asyncio.run(ended())


def test_a_thread_that_does_not_begin_to_look_at_certificates_holds_no_connection_up(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, stillborn: set[str]
) -> None:
    monkeypatch.setattr("outlast.runtime.transport.tls._LOOK_S", 0.0)
    stillborn.add("outlast-certificates")
    tls, (near, far) = authority.tls(), socket.socketpair()
    with far:
        tls.calling(near, "127.0.0.1").close()


def test_where_no_thread_is_to_be_had_connections_are_made_with_what_was_read(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the files are looked at later on."""
    monkeypatch.setattr("outlast.runtime.transport.tls._LOOK_S", 0.0)
    tls, looked = authority.tls(), threading.Event()

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    near, far = socket.socketpair()
    with far, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        tls.calling(near, "127.0.0.1").close()
    monkeypatch.setattr(tls, "_look", looked.set)
    near, far = socket.socketpair()
    with far:
        tls.calling(near, "127.0.0.1").close()
    assert looked.wait(20)
