"""A listening socket of a run: whoever connects proves itself here, or is sent away, and costs next to nothing.

Role: the accepting end of `handshake.py` for the coordinator's port and the members' sockets. Nothing is decoded, no
byte beyond the handshake is read, and no descriptor is taken before the caller is proved. What the unproved may make
us hold: `ROOM` connections that have said nothing right yet and as many that have knocked, some 300 bytes of each, for
`PROVE_S` seconds. When more come, who has waited longest goes: members prove themselves in milliseconds, and a knock,
which only the run's own processes can make, is not pushed out by idle connections.

It never waits: `turn` deals with what has arrived, and `fileno` is readable when something has.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable

from outlast.errors import WireRefusal
from outlast.runtime.transport.handshake import Doorkeeper, PeerClaim
from outlast.runtime.transport.seal import Keys

__all__ = ["PROVE_S", "ROOM", "Door"]

ROOM = 64
"""Connections that have not knocked, and again as many that have, which are kept at a time."""
PROVE_S = 5.0
"""Seconds in which a caller has to prove itself."""
_AT_ONCE = 16  # accepted in one turn: those that are here already are heard in between
_CREDENTIALS = struct.Struct("3i")


class _Visitor:
    """A connection that has proved nothing yet."""

    def __init__(self, sock: socket.socket, keeper: Doorkeeper, who: str) -> None:
        self.sock, self.keeper, self.who = sock, keeper, who
        self.until_s = time.monotonic() + PROVE_S
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        self.gave_up = bool(poll.poll(0))  # before it was let in: whoever listened here before had died

    def read(self) -> bool:
        """Take what came, not beyond the end of the handshake; whether it is proved. WireRefusal, ConnectionError.

        A plain `recv`: the kernel closes descriptors that come with the bytes.
        """
        while self.keeper.claim is None:
            try:
                data = self.sock.recv(self.keeper.most)
            except BlockingIOError:
                return False
            if not data:
                raise ConnectionError
            if answer := self.keeper.hear(data):
                self.sock.send(answer)  # fits the buffer of a connection on which nothing was sent
                return False
        return True


class Door:
    """Lets in whoever proves that it belongs to the run. `admit(sock, claim, keys)` is called with each connection that
    is proved, `refused(reason, who)` for each that is not. The listening socket belongs to the door."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        name: str,
        admit: Callable[[socket.socket, PeerClaim, Keys], None],
        refused: Callable[[str, str], None],
    ) -> None:
        sock.setblocking(False)
        self._sock, self._secret, self._name = sock, secret, name
        self._admit, self._refused = admit, refused
        self._poll = select.epoll()
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self._silent: dict[int, _Visitor] = {}  # oldest first
        self._knocked: dict[int, _Visitor] = {}
        self._full = False  # no descriptor was to be had for the next caller

    def fileno(self) -> int:
        return self._poll.fileno()

    @property
    def patience_s(self) -> float:
        """Seconds after which `turn` has something to do although nothing has arrived."""
        if self._full:
            return 0.1
        oldest = [next(iter(room.values())).until_s for room in (self._silent, self._knocked) if room]
        return max(0.0, min(oldest) - time.monotonic()) if oldest else 3600.0

    def turn(self) -> None:
        """Hear everybody who has said something, then let a few more in."""
        ready = {fd for fd, _ in self._poll.poll(0)}
        for fd in ready:
            visitor = self._knocked.get(fd) or self._silent.get(fd)
            if visitor is not None:
                self._hear(visitor)
        if self._full:
            self._full = False
            self._poll.register(self._sock.fileno(), select.EPOLLIN)
        elif self._sock.fileno() in ready:
            self._accept()
        self._send_away_the_slow()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor is left: who waits here gives theirs back, and callers wait outside
                self._full = True
                self._poll.unregister(self._sock.fileno())
                self._make_room(self._silent, 1)
                return
            self._meet(sock, address)

    def _meet(self, sock: socket.socket, address: object) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            visitor = _Visitor(sock, Doorkeeper(self._secret, self._name), f"uid {uid}, pid {pid}")
            if uid != os.geteuid():
                self._refuse(visitor, "another user's process")
                return
        else:
            host, port = address[:2] if isinstance(address, tuple) else ("?", 0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visitor = _Visitor(sock, Doorkeeper(self._secret, self._name), f"{host}:{port}")
        self._make_room(self._silent, ROOM)
        self._silent[sock.fileno()] = visitor
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self._hear(visitor)  # most have knocked by now

    def _make_room(self, room: dict[int, _Visitor], most: int) -> None:
        while len(room) >= most:
            self._refuse(next(iter(room.values())), "too many connections that prove nothing")

    def _hear(self, visitor: _Visitor) -> None:
        fd, knocked = visitor.sock.fileno(), visitor.keeper.knocked
        try:
            proved = visitor.read()
        except WireRefusal as refusal:
            self._refuse(visitor, refusal.message)
            return
        except OSError:
            if visitor.gave_up:
                self._forget(fd)
                visitor.sock.close()
            else:
                self._refuse(visitor, "a connection that ended before it proved anything")
            return
        if proved:
            self._forget(fd)
            assert visitor.keeper.claim is not None
            self._admit(visitor.sock, visitor.keeper.claim, visitor.keeper.keys)
        elif visitor.keeper.knocked and not knocked:
            self._make_room(self._knocked, ROOM)
            self._knocked[fd] = self._silent.pop(fd)

    def _refuse(self, visitor: _Visitor, reason: str) -> None:
        self._forget(visitor.sock.fileno())
        visitor.sock.close()
        self._refused(reason, visitor.who)

    def _forget(self, fd: int) -> None:
        if self._silent.pop(fd, None) is not None or self._knocked.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _send_away_the_slow(self) -> None:
        now = time.monotonic()
        for room in (self._silent, self._knocked):
            while room and (visitor := next(iter(room.values()))).until_s <= now:
                self._refuse(visitor, "a connection that proved nothing in time")

    def close(self) -> None:
        """Close the listening socket and everybody who waits at it."""
        for visitor in [*self._silent.values(), *self._knocked.values()]:
            visitor.sock.close()
        with contextlib.suppress(OSError):
            self._poll.close()
        self._sock.close()
