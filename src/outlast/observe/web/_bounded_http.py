"""HTTP for whoever connects: no request is waited for without an end, and no crowd holds more than so many sockets.

Role: uvicorn's own protocol waits for a request as long as its sender likes, so a thousand half requests of any local
user used up the server's descriptors. Invariant: at most `MOST_UNASKED` connections have not asked a whole question,
none for longer than `ASK_S`; what was asked is not interrupted.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["ASK_S", "MOST_ASKED", "MOST_UNASKED", "BoundedHTTP"]

ASK_S = 15.0  # from a connection's beginning, or its last answer, to the end of the next request
MOST_UNASKED, MOST_ASKED = 256, 512


class BoundedHTTP(H11Protocol):
    """A connection of which a whole request is expected in `ASK_S`."""

    _due: asyncio.TimerHandle | None = None  # while there is no whole request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()
        waiting = [one for one in self.connections if isinstance(one, BoundedHTTP) and one._due is not None]
        if len(waiting) > MOST_UNASKED:
            min(waiting, key=BoundedHTTP._due_s)._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._asked()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._asked()
        elif self._due is None and not self.transport.is_closing():
            self._due = self.loop.call_later(ASK_S, self._hang_up)

    def _due_s(self) -> float:
        return self._due.when() if self._due is not None else 0.0

    def _asked(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _hang_up(self) -> None:
        self._asked()
        self.transport.abort()
