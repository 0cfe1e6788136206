"""An S3 server (moto) behind a proxy that fails, stalls and cuts connections."""

from __future__ import annotations

import http.client
import http.server
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Proxy(http.server.ThreadingHTTPServer):
    """Hands requests on to the real server, unless `fault` says otherwise for (method, path)."""

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.requests: list[tuple[str, str]] = []
        self.fault: Any = lambda method, path: "ok"
        self.released = threading.Event()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_args: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path))
        fault = self.server.fault(self.command, self.path)
        if fault == "stall":
            self.server.released.wait(20)
        if fault in {"cut", "stall"}:
            self.close_connection = True
            return
        if fault == "500":
            self._answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
            return
        link = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=20)
        link.request(self.command, self.path, body, dict(self.headers))
        answer = link.getresponse()
        data = answer.read()
        self._answer(answer.status, dict(answer.getheaders()), data)
        link.close()

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in {"content-length", "connection", "transfer-encoding", "date", "server"}:
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve


@contextmanager
def serving() -> Iterator[int]:
    """The real server's port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield port
    server.stop()


@contextmanager
def proxied(upstream: int) -> Iterator[Proxy]:
    server = Proxy(upstream)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join(5)


_numbers = itertools.count()


def new_place(proxy: Proxy) -> tuple[str, dict[str, str]]:
    """The URL of a place in a bucket of its own, and the environment in which it is found."""
    name = f"bucket{next(_numbers)}"
    link = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=20)
    link.request("PUT", f"/{name}")
    assert link.getresponse().status == 200
    link.close()
    environ = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip
    return f"s3://{name}/runs/a", environ
