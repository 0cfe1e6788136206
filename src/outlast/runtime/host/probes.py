"""What an engine's probes are answered: GET /healthz (does this process's loop turn?) and /ready (is it in the run?).

A thread of its own, which shares two values with the loop, so that a loop that hangs is told of and a slow stranger
delays nobody. It answers everybody, for probes carry no secret: two words and a reason, nothing of the run. No torch.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time

from outlast.checkpoint.threads import begin
from outlast.errors import ConfigError, EnvironmentFault
from outlast.runtime.transport.endpoints import read_host_port

__all__ = ["Probes", "answer"]

_HANGS_S = 15.0  # a loop turns several times a second; to look up a name and to connect may take it this long
_PATIENCE_S = 2.0  # for a whole request
_FULL_S = 0.25  # until callers are let in again, after one for whom there was no descriptor
_MOST, _LONGEST = 32, 2048  # connections at a time, bytes of a request


def answer(path: str, turned_s_ago: float, why_not: str) -> tuple[int, str]:
    """(status, text) for a probe of a process whose loop has turned that long ago, and which is ready unless `why_not`
    says something."""
    if path not in ("/healthz", "/ready"):
        return 404, "only /healthz and /ready"
    if turned_s_ago > _HANGS_S:
        return 503, f"its loop has not turned for {turned_s_ago:.0f} s"
    if path == "/ready" and why_not:
        return 503, why_not
    return 200, "ok" if path == "/healthz" else "ready"


class Probes:
    """`where`: PORT on all addresses, or HOST:PORT; "" for none. ConfigError, EnvironmentFault."""

    def __init__(self, where: str, why_not: str = "it has just begun") -> None:
        self._state = (time.monotonic(), why_not)
        self._open: dict[socket.socket, tuple[float, bytes]] = {}
        self._full = False  # callers wait outside: else this thread would look at them without an end
        self.port = 0
        if where:
            self._listening = _listen(where)
            self.port = self._listening.getsockname()[1]
            begin(threading.Thread(target=self._serve, name="probes", daemon=True))

    def turned(self, why_not: str = "") -> None:
        """The loop has turned; it is ready unless `why_not` says why not."""
        self._state = (time.monotonic(), why_not)

    # --- the thread ----------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        with selectors.DefaultSelector() as ready:
            self._full = not _watched(ready, self._listening)
            while True:
                self._turn(ready)

    def _turn(self, ready: selectors.BaseSelector) -> None:
        was_full = self._full
        for key, _ in ready.select(_FULL_S if was_full else _PATIENCE_S):
            if key.fileobj is self._listening:
                self._accept(ready)
            elif isinstance(key.fileobj, socket.socket):
                self._hear(ready, key.fileobj)
        now = time.monotonic()
        for sock in [sock for sock, (since_s, _) in self._open.items() if now - since_s > _PATIENCE_S]:
            self._drop(ready, sock)
        if was_full:
            self._full = not _watched(ready, self._listening)

    def _accept(self, ready: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            ready.unregister(self._listening)
            self._full = True
            return
        sock.setblocking(False)
        if len(self._open) >= _MOST:  # the oldest makes room: a probe says what it wants at once
            self._drop(ready, next(iter(self._open)))
        if _watched(ready, sock):
            self._open[sock] = (time.monotonic(), b"")
        else:
            sock.close()

    def _hear(self, ready: selectors.BaseSelector, sock: socket.socket) -> None:
        if sock not in self._open:  # dropped in this very turn
            return
        since_s, had = self._open[sock]
        try:
            more = sock.recv(_LONGEST)
        except OSError:
            more = b""
        had += more
        if more and b"\r\n\r\n" not in had and len(had) <= _LONGEST:
            self._open[sock] = (since_s, had)
            return
        words = had.split(b"\r\n", 1)[0].split(b" ")
        if len(words) == 3 and words[0] in (b"GET", b"HEAD"):
            turned_s, why_not = self._state
            status, text = answer(words[1].decode("latin-1"), time.monotonic() - turned_s, why_not)
            body = f"{text}\n".encode()
            head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\nContent-Type: text/plain\r\n"
            with contextlib.suppress(OSError):
                sock.send(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
                sock.send(body if words[0] == b"GET" else b"")
        self._drop(ready, sock)

    def _drop(self, ready: selectors.BaseSelector, sock: socket.socket) -> None:
        del self._open[sock]
        ready.unregister(sock)
        sock.close()


def _watched(ready: selectors.BaseSelector, sock: socket.socket) -> bool:
    """Whether the system has room to watch it, too."""
    try:
        ready.register(sock, selectors.EVENT_READ)
    except OSError:
        return False
    return True


def _listen(where: str) -> socket.socket:
    try:
        if where.isdigit():
            if int(where) > 65535:
                raise ConfigError(f"no port {where}", remedy="--probes PORT or HOST:PORT")
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            sock = socket.create_server(("", int(where)), family=family, dualstack_ipv6=dual)
        else:
            host, port = read_host_port(where, "--probes")
            sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise EnvironmentFault(
            f"probes cannot be answered at {where}: {error.strerror or error}", remedy="--probes with a free port"
        ) from error
    sock.setblocking(False)
    return sock
