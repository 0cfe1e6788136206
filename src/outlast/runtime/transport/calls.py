"""Connections that a member makes to a peer's socket: proved at both ends, over TLS where the run has it.

Role: the calling end of `door.py` for members: `Call` for the training thread, which never waits in it, `reached` for
threads that do. On one machine they are Unix sockets, without TLS.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct

from outlast.runtime.transport.endpoints import caller_for
from outlast.runtime.transport.handshake import Caller, PeerClaim
from outlast.runtime.transport.seal import Keys
from outlast.runtime.transport.tls import Tls
from outlast.runtime.transport.tls_socket import TlsSocket, refusals

__all__ = ["Call", "passes", "reach", "reached"]

_TRIES = 64  # to reach a peer whose door is crowded
_CROWDED = (BlockingIOError, BrokenPipeError, ConnectionResetError)
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def passes(error: OSError) -> bool:
    """Whether a call has failed for what is no sign that nobody is there: a queue that was full, a door that let go of
    the caller before its knock, or a want of descriptors, memory or ports at this end."""
    return isinstance(error, _CROWDED) or error.errno in _SHORT


class Call:
    """A connection to a peer's socket whose handshake is under way. Never waits. `events`: what to poll it for; while
    it is `connecting`, call `connected` then, and `proved` after that."""

    def __init__(self, address: str, secret: bytes, peer: str, claim: PeerClaim, tls: Tls | None = None) -> None:
        """ConnectionRefusedError: nobody listens there. BlockingIOError: the queue before it is full just now."""
        self.peer, self._secret, self._claim, self._tls, self._data = peer, secret, claim, tls, b""
        self._caller: Caller | None = None
        self.sock, self._target = caller_for(address)
        self.sock.setblocking(False)
        self.connecting = False
        try:
            try:
                self.sock.connect(self._target)
            except BlockingIOError:
                if self.sock.family == socket.AF_UNIX:
                    raise
                self.connecting = True
                return
            self._begin()
        except OSError:
            self.sock.close()
            raise

    @property
    def events(self) -> int:
        if isinstance(self.sock, TlsSocket) and self._caller is None:
            return self.sock.wants
        return select.POLLOUT if self.connecting else select.POLLIN

    @property
    def keys(self) -> Keys:
        """Once both ends are proved."""
        assert self._caller is not None
        return self._caller.keys

    def connected(self) -> None:
        """The network has answered. OSError: nobody listens there, or there is no way to it."""
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self.connecting = False
        self._begin()

    def _begin(self) -> None:
        if self._tls is not None and self.sock.family != socket.AF_UNIX:
            self.sock = self._tls.calling(self.sock, self._target[0])
        else:
            self._knock(b"")

    def _knock(self, bound: bytes) -> None:
        self._caller = Caller(self._secret, self.peer, self._claim, bound)
        self.sock.send(self._caller.knock)

    def proved(self) -> bool:
        """Whether both ends are proved now. ConnectionError: it ended before; WireRefusal: it is somebody else."""
        with refusals():
            return self._heard()

    def _heard(self) -> bool:
        if self._caller is None:
            assert isinstance(self.sock, TlsSocket)
            if not self.sock.greet():
                return False
            self._knock(self.sock.bound())
        assert self._caller is not None
        try:
            data = self.sock.recv(self._caller.wanted - len(self._data))
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionError("it ended before it had proved anything")
        self._data += data
        if len(self._data) < self._caller.wanted:
            return False
        self.sock.send(self._caller.prove(self._data))
        return True


def reach(address: str, secret: bytes, peer: str, claim: PeerClaim, patience_s: int) -> socket.socket:
    """As `reached`, for two processes of one machine, whose frames have no codes."""
    return reached(address, secret, peer, claim, patience_s)[0]


def reached(
    address: str, secret: bytes, peer: str, claim: PeerClaim, patience_s: int, tls: Tls | None = None
) -> tuple[socket.socket, Keys]:
    """A connection to a peer's socket, proved, for a thread that waits in its sends. OSError: the peer is gone, or took
    longer than `patience_s` for one call of ours; WireRefusal: it is somebody else.

    The limit is the kernel's: a send is then one call for all of a payload, without the interpreter's lock. With TLS it
    is for all that one `sendall` is given: who may take long over it is sent pieces.
    """
    for tries_left in reversed(range(_TRIES)):
        sock, target = caller_for(address)
        try:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", patience_s, 0))
            sock.connect(target)
            if tls is not None and sock.family != socket.AF_UNIX:
                sock = tls.calling(sock, target[0])
                sock.settimeout(patience_s)
            with refusals():
                if (keys := _proved(sock, secret, peer, claim, patience_s)) is not None:
                    return sock, keys
        except ConnectionRefusedError:
            sock.close()
            raise
        except ConnectionError:  # its door was too crowded
            if not tries_left:
                raise
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise ConnectionError(f"{peer} let go of every connection")


def _proved(sock: socket.socket, secret: bytes, peer: str, claim: PeerClaim, patience_s: float) -> Keys | None:
    """The keys once both ends are proved; None if it hung up."""
    bound = b""
    if isinstance(sock, TlsSocket):
        sock.greet_within(patience_s)
        bound = sock.bound()
    caller, reply = Caller(secret, peer, claim, bound), b""
    sock.sendall(caller.knock)
    while len(reply) < caller.wanted:
        data = sock.recv(caller.wanted - len(reply))
        if not data:
            return None
        reply += data
    sock.sendall(caller.prove(reply))
    return caller.keys
