"""A connection under TLS as asyncio's streams want one. The door has greeted it, and asyncio takes no such socket.

Role: bytes between a `TlsSocket` and the loop, never waiting. What cannot be sent yet is kept, as asyncio keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from outlast.errors import WireRefusal
from outlast.runtime.transport.seal import FORGED
from outlast.runtime.transport.tls_socket import TlsSocket, TlsTrouble

__all__ = ["streams_over"]

_PIECE = 1 << 16  # more than a record of TLS holds, so nothing is left where polling does not see it
_AT_ONCE = 16  # records read before others have their turn
_HIGH, _LOW = 1 << 16, 1 << 14


async def streams_over(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The two directions of a connection, by TLS or without. OSError: the system watches no more just now."""
    loop = asyncio.get_running_loop()
    if not isinstance(sock, TlsSocket):
        # asyncio asks for the watch in a callback, where its want would be this process's end; so it finds one there
        loop.add_reader(sock.fileno(), lambda: None)
        return await asyncio.open_connection(sock=sock)
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport = _TlsTransport(loop, sock, protocol)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _TlsTransport(asyncio.Transport):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: TlsSocket, protocol: asyncio.StreamReaderProtocol
    ) -> None:
        super().__init__()
        sock.setblocking(False)
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._pending = bytearray()
        self._closing = self._gone = self._full = self._last = False
        protocol.connection_made(self)
        loop.add_reader(sock.fileno(), self._readable)

    # --- what comes ----------------------------------------------------------------------------------------------
    def _readable(self) -> None:
        try:
            for _ in range(_AT_ONCE):
                if self._gone:
                    return
                data = self._sock.recv(_PIECE)
                if not data:
                    self._loop.remove_reader(self._sock.fileno())
                    self._protocol.eof_received()
                    return
                self._protocol.data_received(data)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(WireRefusal(FORGED) if isinstance(error, TlsTrouble) and error.forged else error)

    def pause_reading(self) -> None:
        if not self._gone:
            self._loop.remove_reader(self._sock.fileno())

    def resume_reading(self) -> None:
        if not self._gone and not self._closing:
            self._loop.add_reader(self._sock.fileno(), self._readable)

    # --- what goes -----------------------------------------------------------------------------------------------
    def write(self, data: Any) -> None:
        if self._closing or self._gone:
            return
        waited = bool(self._pending)
        self._pending += data
        if not waited:
            self._writable()

    def _writable(self) -> None:
        """Send what goes. As long as some is left it begins with what was tried before, as OpenSSL wants it."""
        try:
            while self._pending:
                del self._pending[: self._sock.send(self._pending)]
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            if len(self._pending) > _HIGH and not self._full:
                self._full = True
                self._protocol.pause_writing()
            return
        except OSError as error:
            self._lose(error)
            return
        finally:
            if self._full and len(self._pending) <= _LOW:
                self._full = False
                self._protocol.resume_writing()
        self._loop.remove_writer(self._sock.fileno())
        if self._last:
            self._end()
        if self._closing:
            self._lose(None)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Nothing is written after this."""
        self._last = True
        if not self._pending:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # the other end has gone already, which reading tells
            self._sock.shutdown(socket.SHUT_WR)

    # --- the end -------------------------------------------------------------------------------------------------
    def is_closing(self) -> bool:
        return self._closing or self._gone

    def close(self) -> None:
        """Once what is pending has been sent."""
        if self._closing or self._gone:
            return
        self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        if not self._pending:
            self._lose(None)

    def abort(self) -> None:
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if self._gone:
            return
        self._gone = self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._pending.clear()
        self._loop.call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)
        self._sock.close()
