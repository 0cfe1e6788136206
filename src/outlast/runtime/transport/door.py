"""A listening socket of a run: whoever connects proves itself here, or is sent away, and costs next to nothing.

Role: the accepting end of `handshake.py` for the coordinator's port and the members' sockets. Nothing is decoded, no
byte beyond the handshake is read, and no descriptor is taken before the caller is proved. What the unproved may make
us hold: `ROOM` connections that have said nothing right yet and as many that have knocked, some 300 bytes of each, for
`PROVE_S` seconds. When more come, who has waited longest goes: members prove themselves in milliseconds, and a knock,
which only the run's own processes can make, is not pushed out by idle connections.

Where the run has TLS, whoever comes over the network greets by it before the knock. A certificate of the run counts as
a knock does, for nobody else has one; who greets and goes no further has the same 5 seconds as who says nothing. In a
turn 8 are heard, so that what TLS computes holds nobody up: who was heard least goes first, however much others say. In
a crowd callers wait in the kernel's queue: no more are let in than could be heard, or one, so that they are heard
before others push them out. Who was answered by TLS waits in a room of its own, for a certificate comes later than a
greeting; strangers get there, too, but not faster than TLS computes. Who has TLS and meets none, or has none and meets
TLS, is told so and sent away.

It never waits: `turn` deals with what has arrived, and `fileno` is readable when something has.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable

from outlast.errors import WireRefusal
from outlast.runtime.transport.handshake import TLS_WANTED, WRONG_NAME, Doorkeeper, PeerClaim, no_entry
from outlast.runtime.transport.seal import Keys
from outlast.runtime.transport.tls import Tls
from outlast.runtime.transport.tls_socket import NO_TLS, TlsSocket, counted, refusals

__all__ = ["PROVE_S", "ROOM", "Door"]

ROOM = 64
"""Connections that have not knocked, as many that were answered by TLS, and as many that have knocked, which are kept
at a time."""
PROVE_S = 5.0
"""Seconds in which a caller has to prove itself."""
_AT_ONCE = 16  # accepted in one turn: those that are here already are heard in between
_HEARD_AT_ONCE = 8  # with TLS: to answer a greeting takes up to some milliseconds
_CALLS_AGAIN_S = 2.0  # who was pushed out, or was refused by the system, has done so within this
_TLS_BEGINS = b"\x16"  # a record of TLS's handshake
_CREDENTIALS = struct.Struct("3i")


class _Visitor:
    """A connection that has proved nothing yet. `tls`: None where there is none on it."""

    def __init__(self, sock: socket.socket, make: Callable[[bytes], Doorkeeper], who: str, tls: Tls | None) -> None:
        self.sock, self.fd, self.who = sock, sock.fileno(), who
        self._make, self._tls = make, tls
        self.keeper = make(b"")
        self._begun = self._greeted = False
        self.times_heard = 0
        self.until_s = time.monotonic() + PROVE_S
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        self.gave_up = bool(poll.poll(0))  # before it was let in: whoever listened here before had died

    @property
    def knocked(self) -> bool:
        """Whether it belongs to the run, by its certificate or its knock."""
        return self._greeted or self.keeper.knocked

    @property
    def answered(self) -> bool:
        """Whether TLS has answered its greeting: from then on it has a cipher."""
        return isinstance(self.sock, TlsSocket) and self.sock.cipher() is not None

    def read(self) -> bool:
        """Take what came, not beyond the end of the handshake; whether it is proved. WireRefusal, ConnectionError.

        A plain `recv`: the kernel closes descriptors that come with the bytes.
        """
        if not (self._begun or self._begin()) or not (self._greeted or self._greet()):
            return False
        while self.keeper.claim is None:
            try:
                data = self.sock.recv(self.keeper.most)
            except BlockingIOError:
                return False
            if not data:
                raise ConnectionError
            if answer := self.keeper.hear(data):
                self._answer(answer)
                return False
        return True

    def _begin(self) -> bool:
        """Whether it has begun to speak; by TLS or without."""
        if self.sock.family == socket.AF_UNIX:
            self._begun = True
            return True
        try:
            first = self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        self._begun = True
        if first != _TLS_BEGINS:
            return True
        if self._tls is None:
            self.sock.send(NO_TLS)
            raise WireRefusal("TLS, which this run does not have", remedy="tls_cert, tls_key, tls_ca here, too")
        self.sock = self._tls.answering(self.sock)
        return True

    def _greet(self) -> bool:
        """Whether what comes before the knock is done."""
        if not isinstance(self.sock, TlsSocket):
            return True
        if not self.sock.greet():
            return False
        self._greeted, self.keeper = True, self._make(self.sock.bound())
        assert self._tls is not None
        if self._tls.name and not self.sock.bears(self._tls.name):
            self.sock.send(no_entry(WRONG_NAME))
            raise WireRefusal("TLS: its certificate does not bear this run's tls_name")
        return True

    def _answer(self, answer: bytes) -> None:
        """Send what fits the buffer of a connection on which nothing was sent."""
        if self._tls is not None and not self._greeted:
            self.sock.send(no_entry(TLS_WANTED))
            raise WireRefusal(
                "no TLS, which this run has, but the run's secret", remedy="tls_cert, tls_key and tls_ca there, too"
            )
        self.sock.send(answer)


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
        tls: Tls | None = None,
    ) -> None:
        sock.setblocking(False)
        self._tls = tls if sock.family != socket.AF_UNIX else None
        self._sock, self._secret, self._name = sock, secret, name
        self._admit, self._refused = admit, refused
        self._poll = select.epoll()
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self._silent: dict[int, _Visitor] = {}  # oldest first
        self._answered: dict[int, _Visitor] = {}
        self._knocked: dict[int, _Visitor] = {}
        self._full = False  # no descriptor or watch was to be had for the next caller
        self._pushed_s = -math.inf  # when somebody was sent away last to make room

    def fileno(self) -> int:
        return self._poll.fileno()

    @property
    def patience_s(self) -> float:
        """Seconds after which `turn` has something to do although nothing has arrived."""
        if self._full:
            return 0.1
        oldest = [next(iter(room.values())).until_s for room in self._rooms if room]
        return max(0.0, min(oldest) - time.monotonic()) if oldest else 3600.0

    @property
    def crowded(self) -> bool:
        """Whether somebody of the run may not have come in though he calls: callers wait in the kernel's queue just
        now, or some were pushed out a moment ago."""
        if self._full or time.monotonic() - self._pushed_s < _CALLS_AGAIN_S:
            return True
        return any(fd == self._sock.fileno() for fd, _ in self._poll.poll(0))

    @property
    def _rooms(self) -> tuple[dict[int, _Visitor], ...]:
        return self._knocked, self._answered, self._silent

    def turn(self) -> None:
        """Hear everybody who has said something, then let a few more in."""
        ready = {fd for fd, _ in self._poll.poll(0)}
        here = [visitor for room in self._rooms for fd, visitor in room.items() if fd in ready]
        if self._tls is not None:
            here.sort(key=lambda visitor: visitor.times_heard)
            here, most = here[:_HEARD_AT_ONCE], max(1, _HEARD_AT_ONCE - len(here))
        else:
            most = _AT_ONCE
        for visitor in here:
            if any(room.get(visitor.fd) is visitor for room in self._rooms):  # nobody has pushed it out meanwhile
                self._hear(visitor)
        if self._full:
            self._full = False
            self._poll.modify(self._sock.fileno(), select.EPOLLIN)
        elif self._sock.fileno() in ready:
            self._accept(most)
        self._send_away_the_slow()

    def _accept(self, most: int) -> None:
        for _ in range(most):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor is left
                self._shut()
                return
            self._meet(sock, address)
            if self._full:
                return

    def _shut(self) -> None:
        """For a moment: who waits here gives back what is short, and callers wait outside. The listening socket keeps
        its own watch, for there may be none to be had when it is opened again."""
        self._full = True
        self._poll.modify(self._sock.fileno(), 0)
        for room in (self._silent, self._answered):
            self._make_room(room, 1)

    def _meet(self, sock: socket.socket, address: object) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            visitor = _Visitor(sock, self._keeper, f"uid {uid}, pid {pid}", None)
            if uid != os.geteuid():
                self._refuse(visitor, "another user's process")
                return
        else:
            host, port = address[:2] if isinstance(address, tuple) else ("?", 0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visitor = _Visitor(sock, self._keeper, f"{host}:{port}", self._tls)
        self._make_room(self._silent, ROOM)
        try:
            self._poll.register(sock.fileno(), select.EPOLLIN)
        except OSError:  # this user may watch no more, or the kernel has no memory: the caller tries again
            sock.close()
            self._shut()
            return
        self._silent[sock.fileno()] = visitor
        if self._tls is None:
            self._hear(visitor)  # most have knocked by now

    def _keeper(self, bound: bytes) -> Doorkeeper:
        return Doorkeeper(self._secret, self._name, bound)

    def _make_room(self, room: dict[int, _Visitor], most: int) -> None:
        while len(room) >= most:
            self._pushed_s = time.monotonic()
            self._send_away(next(iter(room.values())), "too many connections that prove nothing")

    def _send_away(self, visitor: _Visitor, reason: str) -> None:
        """Unless it has said meanwhile what proves it: it takes itself for let in, and what is over then is its peer.
        By TLS only who belongs to the run: to answer others takes too long."""
        if self._tls is None or visitor.knocked:
            self._hear(visitor)
        if any(room.get(visitor.fd) is visitor for room in self._rooms):
            self._refuse(visitor, reason)

    def _hear(self, visitor: _Visitor) -> None:
        fd = visitor.fd
        visitor.times_heard += 1
        try:
            with refusals():
                proved = visitor.read()
        except WireRefusal as refusal:
            if last_word := visitor.keeper.last_word:
                with contextlib.suppress(OSError):
                    visitor.sock.send(last_word)
            self._refuse(visitor, counted(refusal))
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
            return
        room = self._knocked if visitor.knocked else self._answered if visitor.answered else self._silent
        if fd not in room:
            for other in self._rooms:
                other.pop(fd, None)
            self._make_room(room, ROOM)
            room[fd] = visitor

    def _refuse(self, visitor: _Visitor, reason: str) -> None:
        self._forget(visitor.fd)
        self._refused(reason, visitor.who)  # who sees that it was hung up on has been counted by then
        visitor.sock.close()

    def _forget(self, fd: int) -> None:
        if any(room.pop(fd, None) is not None for room in self._rooms):  # it is in one at most
            with contextlib.suppress(OSError):  # it is closed already
                self._poll.unregister(fd)

    def _send_away_the_slow(self) -> None:
        now = time.monotonic()
        for room in self._rooms:
            while room and (visitor := next(iter(room.values()))).until_s <= now:
                self._send_away(visitor, "a connection that proved nothing in time")

    def close(self) -> None:
        """Close the listening socket and everybody who waits at it."""
        for room in self._rooms:
            for visitor in room.values():
                visitor.sock.close()
        with contextlib.suppress(OSError):
            self._poll.close()
        self._sock.close()
