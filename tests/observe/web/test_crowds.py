"""A page's server and a crowd that asks nothing: it holds few sockets, for a short time, and others are answered."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from outlast.journal import Journal
from outlast.observe.web import Board, Serving, _bounded_http, listen

HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HALVES = (b"", HEAD + b"X: ", HEAD.replace(b"GET", b"POST") + b"Content-Length: 9\r\n\r\nab")


@pytest.fixture
def port(tmp_path: Path, story: Any) -> Iterator[int]:
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many(story.whole)
    listening = listen(0)
    serving = Serving(Board([tmp_path / "brave"]), listening)
    thread = threading.Thread(target=serving.run, daemon=True)
    thread.start()
    yield int(listening.getsockname()[1])
    serving.stop()
    thread.join(60.0)


def ask(line: http.client.HTTPConnection) -> int:
    line.request("GET", "/healthz")
    answer = line.getresponse()
    answer.read()
    return answer.status


def half(port: int, said: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=60.0)
    with contextlib.suppress(ConnectionError):  # on a busy machine it is hung up on before it can say that
        sock.sendall(said)
    return sock


def is_hung_up(sock: socket.socket) -> bool:
    """Waits for it."""
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("said", HALVES)
def test_who_does_not_finish_a_request_is_hung_up_on(port: int, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(_bounded_http, "ASK_S", 0.05)
        with half(port, said) as sock:
            while not is_hung_up(sock):  # an answer may come before the end of what was asked
                pass
    # Who asks in full has the usual time: of a busy machine this thread may have nothing for longer than that.
    assert ask(http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)) == 200


def test_of_a_crowd_the_oldest_goes_and_who_asks_is_answered(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounded_http, "MOST_UNASKED", 5)
    crowd = [half(port, HALVES[1]) for _ in range(12)]
    assert all(is_hung_up(sock) for sock in crowd[:7])
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    assert [ask(line), ask(line)] == [200, 200], "one after the other on one connection"
    for sock in crowd:
        sock.close()
