"""A coordinator whose port is crowded, or that has just died, is called again by who is no member yet."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from outlast.cli import _operator
from outlast.core.protocol import host_messages as hm
from outlast.errors import MembershipError, WireRefusal
from outlast.runtime.host import joined
from outlast.runtime.host.coordinator_finder import CoordinatorFinder
from outlast.runtime.host.joined import JoinOptions
from outlast.runtime.host.probes import Probes
from outlast.runtime.transport.endpoints import listen_on, shown
from outlast.runtime.transport.frames import COORDINATOR, frame, read_frame
from outlast.runtime.transport.handshake import Doorkeeper
from outlast.runtime.transport.seal import Seal

SECRET, OTHER = b"s" * 32, b"o" * 32
BRIEFING = hm.Briefing(epoch=1, run_id="new", command=("python", "train.py"), folder="/", config="{}", hash_seed="0")
Answer = Callable[[socket.socket], None]


def let_go(sock: socket.socket) -> None:
    """As a door does whose room strangers have filled."""


def prove(sock: socket.socket) -> Doorkeeper:
    keeper = Doorkeeper(SECRET, COORDINATOR)
    while keeper.claim is None:
        sock.sendall(keeper.hear(sock.recv(keeper.most)))
    return keeper


def die(sock: socket.socket) -> None:
    """Between the handshake and its first word."""
    prove(sock)


def brief(sock: socket.socket) -> None:
    mine, theirs = (Seal(key) for key in prove(sock).keys)
    read_frame(sock, theirs)
    data = frame(BRIEFING)
    sock.sendall(mine.sealed(data[:4], memoryview(data)[4:]))


class Port:
    """A coordinator's, which does one thing with each caller in turn."""

    def __init__(self) -> None:
        self.sock = listen_on("127.0.0.1")
        self.address = self.sock.getsockname()[:2]
        self._thread: threading.Thread | None = None

    def does(self, *answers: Answer) -> None:
        def serve() -> None:
            for answer in answers:
                with self.sock.accept()[0] as sock:
                    answer(sock)

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        assert self._thread is not None
        self._thread.join(20)
        return not self._thread.is_alive()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(joined, "_PAUSE_S", (0.0, 0.0))
    monkeypatch.setattr(_operator, "_AGAIN_S", 0.0)
    made = Port()
    yield made
    made.sock.close()


def test_a_host_that_wants_to_join_takes_neither_a_crowd_nor_a_death_for_a_refusal(port: Port) -> None:
    """Seven callers in a row are pushed out, and the coordinator dies before it has answered the eighth."""
    port.does(*[let_go] * 7, die, let_go, brief)
    options = JoinOptions(endpoint=shown(*port.address), secret=SECRET, host="h1", wait_s=60.0)
    finder, said = CoordinatorFinder(options.endpoint, SECRET, os.environ), list[str]()
    link, peer, address, told = joined._connected(options, finder, "h1:aa", said.append, Probes(""))
    link.close()
    assert (peer, address, told) == (port.address, "127.0.0.1", BRIEFING)
    assert said == [f"waiting for the coordinator at {options.endpoint}: it let go of the connection"]
    assert port.done()


def test_a_host_with_another_secret_does_not_call_again(port: Port) -> None:
    def refuse(sock: socket.socket) -> None:
        keeper = Doorkeeper(OTHER, COORDINATOR)
        with pytest.raises(WireRefusal, match="wrongly signed"):
            keeper.hear(sock.recv(keeper.most))
        sock.sendall(keeper.last_word)

    port.does(refuse)
    options = JoinOptions(endpoint=shown(*port.address), secret=SECRET, host="h1", wait_s=60.0)
    finder = CoordinatorFinder(options.endpoint, SECRET, os.environ)
    with pytest.raises(MembershipError, match="it does not know this secret"):
        joined._connected(options, finder, "h1:aa", print, Probes(""))
    assert port.done()


def test_who_asks_a_run_for_something_calls_again_until_it_could_ask(port: Port) -> None:
    port.does(let_go, let_go, die)
    _operator._line(_operator._Place(port.address, SECRET, "", None), "operator:aa").close()
    assert port.done()
