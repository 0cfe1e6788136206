"""Listening: a port on loopback, and the end of the server.

Role: uvicorn behind a socket of our own, so that the port is known before the first request and a busy one is told in
our words. Invariant: it binds to loopback only; to be reached from elsewhere is a proxy's or ssh's affair.
What a crowd may hold is bounded by `_bounded_http.py`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from outlast.errors import ConfigError, EnvironmentFault
from outlast.observe.web._app import build_app
from outlast.observe.web._board import Board
from outlast.observe.web._wishes import Wishes

if TYPE_CHECKING:
    import uvicorn

__all__ = ["PORT", "Serving", "listen"]

PORT = 8642
_GRACE_S = 1


def listen(port: int | None) -> socket.socket:
    """A listening socket on 127.0.0.1. None is `PORT`, or a free one where that is taken; 0 is any free one.

    Raises EnvironmentFault for a port that was asked for and is taken, ConfigError for a number that is no port.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", PORT if port is None else port))
    except OverflowError as error:
        listening.close()
        raise ConfigError(f"{port} is no port", remedy="give a --port from 0 to 65535; 0 is a free one") from error
    except OSError as error:
        if port is not None:
            listening.close()
            raise EnvironmentFault(
                f"port {port} on 127.0.0.1: {error.strerror}", remedy="give another --port, or 0 for a free one"
            ) from error
        listening.bind(("127.0.0.1", 0))
    listening.listen(128)
    return listening


class Serving:
    """A server on a socket. `run` serves until `stop`, a signal, or the end of process `with_pid`."""

    def __init__(
        self,
        board: Board,
        listening: socket.socket,
        *,
        allowed_hosts: Collection[str] = (),
        with_pid: int | None = None,
        wishes: Wishes | None = None,
    ) -> None:
        self._listening, self._with_pid = listening, with_pid
        self._server = _server(board, allowed_hosts, wishes)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def run(self) -> None:
        """Serve; returns when it is over."""
        if self._with_pid is not None:
            threading.Thread(target=self._end_with, args=(self._with_pid,), daemon=True).start()
        self._server.run(sockets=[self._listening])

    def stop(self) -> None:
        """Ask it to end; from any thread."""
        self._server.should_exit = True

    def _end_with(self, pid: int) -> None:
        _until_ended(pid)
        self.stop()


def _until_ended(pid: int) -> None:
    import select

    poll = select.poll()
    try:
        poll.register(os.pidfd_open(pid), select.POLLIN)
    except OSError:
        return
    poll.poll()


def _server(board: Board, allowed_hosts: Collection[str], wishes: Wishes | None) -> uvicorn.Server:
    import uvicorn

    from outlast.observe.web._bounded_http import ASK_S, MOST_ASKED, MOST_UNASKED, BoundedHTTP

    config = uvicorn.Config(
        build_app(board, allowed_hosts=allowed_hosts, wishes=wishes),
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=int(ASK_S),
        http=BoundedHTTP,
        limit_concurrency=MOST_UNASKED + MOST_ASKED,
        h11_max_incomplete_event_size=16384,
        ws="none",
        lifespan="on",
    )
    return uvicorn.Server(config)
