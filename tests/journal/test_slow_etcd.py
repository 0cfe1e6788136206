"""Members of an etcd that take longer than one that is well are waited for, once none has answered sooner."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.runtime.conftest import readable

from outlast.core import events as ev
from outlast.journal import Access, CoordinatorClaim, Journal, Unreachable
from outlast.journal._etcd import Etcd

_TAKES_S = 1.0
_ANSWER = b'{"succeeded": true}'
_WITHIN_S = 2.0  # a put's; three members who are given 0.6 s each take nearly all of it


class Slow(BaseHTTPRequestHandler):
    """Is at a transaction for a while, and answers it if it is still waited for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v3/kv/txn" and readable(self.connection.fileno(), _TAKES_S):
            self.close_connection = True  # it was left
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(_ANSWER)))
        self.end_headers()
        self.wfile.write(_ANSWER)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    """Of three members."""
    with contextlib.ExitStack() as stack:
        places = []
        for _ in range(3):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Slow))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            places.append(("127.0.0.1", server.server_port))
        found = Etcd(Access(tuple(places)))
        stack.callback(found.close)
        yield found


def test_a_request_that_takes_longer_than_a_member_is_given_at_first_is_answered(etcd: Etcd) -> None:
    assert etcd.put_if("/key", None, {"/key": b"x"}, 60.0)


def test_what_is_asked_again_and_again_is_given_more_time_each_time(etcd: Etcd) -> None:
    """As the coordinator's record is put, while other things are asked and answered."""
    for _ in range(10):
        assert etcd.range("/key", 60.0) == ([], 0)
        with contextlib.suppress(Unreachable):
            assert etcd.put_if("/key", None, {"/key": b"x"}, _WITHIN_S)
            return
    raise AssertionError("no put was answered")


def test_a_sign_of_life_goes_alone_where_events_are_too_much_for_the_time(tmp_path: Path) -> None:
    """They go along with it where they can; the turn must not end of them."""
    alive = threading.Semaphore(0)

    def put_if(key: str, value: bytes, puts: Mapping[str, bytes], *_: object) -> bool:
        if len(puts) > 1:
            raise Unreachable
        alive.release()
        return True

    with Journal.create(tmp_path / "run") as journal:
        shared = journal.sharing(Access((("127.0.0.1", 1),)), "run", b"s" * 32, 0.06)
        shared._beating.put_if = put_if  # type: ignore[method-assign, assignment]
        shared._mine = CoordinatorClaim(epoch=1, token="t", seat="a", host="a", address="h:1")
        shared.append([ev.Notice(at_s=1.0, level="info", text="much")])
        shared._thread.start()
        try:
            assert all(alive.acquire(timeout=30) for _ in range(3))
        finally:
            shared.close()
