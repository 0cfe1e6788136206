"""A member's socket for its peers and donors, and the connections that its door has let in.

Role: one abstract unix socket a member, and beside it one on the network where the run spans hosts, watched by a thread
of their own from their first moment to their last, so that strangers are dealt with before, between and during views
and none of it waits for the training thread. Who has proved
itself waits in `mesh` or `feeds` until that thread asks. Also frames, and descriptors of shared regions, between
members that are proved: a peer that sends what cannot be read is a lost peer.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from outlast.errors import ViewAbandoned, WireRefusal
from outlast.runtime.transport.door import Door
from outlast.runtime.transport.endpoints import caller_for, listen_on, member_address
from outlast.runtime.transport.handshake import OTHER_RUN, Caller, PeerClaim
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.seal import CODE_BYTES, LENGTH_CODE_BYTES, Keys, Seal

__all__ = [
    "MAX_PEER_FRAME",
    "Arrivals",
    "Call",
    "Connection",
    "Listener",
    "PeersLost",
    "Proved",
    "decoded",
    "reach",
    "reached",
]

MAX_PEER_FRAME = 1 << 31
"""Bytes of one frame between members: an outcome that is handed over may carry momentum and module buffers. Memory
grows with what has arrived, not with what was announced."""
_TRIES = 64  # to reach a peer whose door is crowded
_MOST = 1024  # proved connections that may wait for the training thread
_FDS = socket.CMSG_LEN(16)
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")
Proved = tuple[socket.socket, PeerClaim, Keys]
"""A connection whose other end has said who it is, and is."""


class PeersLost(ViewAbandoned):
    """Connections ended without a goodbye: `suspects`."""

    def __init__(self, suspects: tuple[str, ...]) -> None:
        super().__init__(f"the connections to {', '.join(suspects)} ended")
        self.suspects = suspects


def decoded(member: str, body: bytes | memoryview, kind: type[T]) -> T:
    """What `member` sent inside a frame. PeersLost if it cannot be read: whoever sends that is no peer any more."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise PeersLost((member,)) from error


def seals_for(sock: socket.socket, keys: Keys | None) -> tuple[Seal | None, Seal | None]:
    """For what this end sends and for what the other does; none on one machine, where nobody is between them."""
    if keys is None or sock.family == socket.AF_UNIX:
        return None, None
    return Seal(keys[0]), Seal(keys[1])


class Connection:
    """One stream with a proved peer: frames in, frames out, descriptors in where both are on one machine; where they
    are not, each frame has a code that nobody between them can make (`keys`). `forged`: one had another."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        called: bool = False,
        keys: Keys | None = None,
    ) -> None:
        self.sock, self.peer, self.called, self._decoder = sock, peer, called, decoder
        self.buffer = bytearray()
        self.pending = bytearray()
        self.fds: list[int] = []
        self.introduced = False  # the peer has said that it is in my view, and sent its region if it has one
        self.ended = False
        self.forged = False
        self._mine, self._theirs = seals_for(sock, keys)
        self.deaf = False  # the peer takes nothing more; what it said before may still have to be read
        sock.setblocking(False)

    def send(self, message: Any, fd: int | None = None) -> None:
        """Queue a frame and send what fits. `fd` goes with it on one machine; nothing may be waiting then."""
        if self.deaf:
            return
        body = _encoder.encode(message)
        if len(body) > MAX_PEER_FRAME:
            raise ValueError(f"a message of {len(body)} bytes to {self.peer} is over the limit of {MAX_PEER_FRAME}")
        head = len(body).to_bytes(4, "big")
        data = head + body if self._mine is None else self._mine.sealed(head, body)
        if fd is not None and self.sock.family == socket.AF_UNIX:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
            with contextlib.suppress(OSError):
                data = data[self.sock.sendmsg([data], [rights]) :]
        self.pending += data
        self.flush()

    def flush(self) -> None:
        try:
            while self.pending:
                del self.pending[: self.sock.send(self.pending)]
        except BlockingIOError:
            pass
        except OSError:
            self.deaf = True
            self.pending.clear()

    def read(self) -> Iterator[Any]:
        """Frames that have arrived. Sets `ended` at the end of the stream, or of what can be understood of it."""
        while not self.ended:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(65536, _FDS)
            except BlockingIOError:
                break
            except OSError:
                data, ancillary = b"", []
            for level, kind, body in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                    self._take(fds)
            self.ended = not data
            self.buffer += data
            if len(data) < 65536:
                break
        return self._frames()

    def _take(self, fds: array.array[int]) -> None:
        """A peer has one region; whatever else comes is closed."""
        keep = list(fds) if not self.fds and not self.introduced else []
        self.fds += keep[:1]
        for fd in fds[len(keep[:1]) :]:
            os.close(fd)

    def _frames(self) -> Iterator[Any]:
        start, after = (4, 0) if self._theirs is None else (4 + LENGTH_CODE_BYTES, CODE_BYTES)
        while len(self.buffer) >= start:
            head = bytes(self.buffer[:4])
            length = int.from_bytes(head, "big")
            if not self._genuine(self.buffer[4:start], head) or length > MAX_PEER_FRAME:
                self.ended = True
                return
            end = start + length
            if len(self.buffer) < end + after:
                return
            with memoryview(self.buffer) as view:
                whole = memoryview(bytes(view[: end + after]))
            del self.buffer[: end + after]
            if not self._genuine(whole[end:], head, whole[start:end]):
                return
            try:
                message = self._decoder.decode(whole[start:end])
            except msgspec.DecodeError:
                self.ended = True
                return
            yield message

    def _genuine(self, code: bytearray | memoryview, head: bytes, *body: memoryview) -> bool:
        """Whether the peer has sent this length, or frame. Nothing that follows what it has not is heard."""
        if self._theirs is None:
            return True
        try:
            (self._theirs.check if body else self._theirs.check_length)(code, head, *body)
        except WireRefusal:
            self.ended = self.forged = True
        return not self.forged

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.sock.close()


class Call:
    """A connection to a peer's socket whose handshake is under way. Never waits. `events`: what to poll it for; while
    it is `connecting`, call `connected` then, and `proved` after that."""

    def __init__(self, address: str, secret: bytes, peer: str, claim: PeerClaim) -> None:
        """ConnectionRefusedError: nobody listens there. BlockingIOError: the queue before it is full just now."""
        self.peer, self._caller, self._data = peer, Caller(secret, peer, claim), b""
        self.sock, target = caller_for(address)
        self.sock.setblocking(False)
        self.connecting = False
        try:
            try:
                self.sock.connect(target)
            except BlockingIOError:
                if self.sock.family == socket.AF_UNIX:
                    raise
                self.connecting = True
                return
            self.sock.send(self._caller.knock)
        except OSError:
            self.sock.close()
            raise

    @property
    def events(self) -> int:
        return select.POLLOUT if self.connecting else select.POLLIN

    @property
    def keys(self) -> Keys:
        """Once both ends are proved."""
        return self._caller.keys

    def connected(self) -> None:
        """The network has answered. OSError: nobody listens there, or there is no way to it."""
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self.connecting = False
        self.sock.send(self._caller.knock)

    def proved(self) -> bool:
        """Whether both ends are proved now. ConnectionError: it ended before; WireRefusal: it is somebody else."""
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


def reached(address: str, secret: bytes, peer: str, claim: PeerClaim, patience_s: int) -> tuple[socket.socket, Keys]:
    """A connection to a peer's socket, proved, for a thread that waits in its sends. OSError: the peer is gone, or took
    longer than the kernel waits for one call of ours; WireRefusal: it is somebody else.

    The limit is the kernel's: a send is then one call for all of a payload, without the interpreter's lock.
    """
    for tries_left in reversed(range(_TRIES)):
        (sock, target), caller = caller_for(address), Caller(secret, peer, claim)
        try:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", patience_s, 0))
            sock.connect(target)
            sock.sendall(caller.knock)
            reply = sock.recv(caller.wanted, socket.MSG_WAITALL)
            if len(reply) == caller.wanted:
                sock.sendall(caller.prove(reply))
                return sock, caller.keys
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


class Arrivals:
    """Proved connections that wait for the training thread. `fd` is readable while there are some. `refuse(reason,
    who)`: one of them turned out not to be what it was."""

    def __init__(self, refuse: Callable[[str, str], None] = lambda reason, who: None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.refuse = refuse
        self._waiting: deque[Proved] = deque()

    def put(self, sock: socket.socket, claim: PeerClaim, keys: Keys) -> None:
        """From the door's thread."""
        if len(self._waiting) >= _MOST:
            self._waiting.popleft()[0].close()
        self._waiting.append((sock, claim, keys))
        os.eventfd_write(self.fd, 1)

    def take(self) -> Iterator[Proved]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._waiting:
            yield self._waiting.popleft()

    def close(self) -> None:
        for sock, _, _ in self.take():
            sock.close()
        os.close(self.fd)


class Listener:
    """A member's address, and what outlives a view: peers' mapped regions, callers of later views.

    The address has a random part: nobody can take it beforehand. `refused`: how often strangers were sent away, and
    who was the first, for each reason (of which there are few). `alone`: a fleet of one listens to nobody. `network`:
    the address of this machine at which other hosts reach this member; "" where the run has but one. Whoever is left
    of another run, which may have had the same secret and this very port, is a stranger too.
    """

    def __init__(self, run_id: str, me: str, secret: bytes, *, alone: bool = False, network: str = "") -> None:
        self.run, self.me, self.secret = run_id, me, secret
        unix = f"outlast/{run_id}/{me}/{secrets.token_hex(8)}"
        self.mesh, self.feeds = Arrivals(self._refuse), Arrivals(self._refuse)
        self.early: list[Proved] = []  # for views that I have not heard of
        self.regions: dict[str, Region] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self._closed = False
        self._closing_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="outlast-door", daemon=True)
        self._doors: list[Door] = []
        self.address = unix
        if not alone:
            self._open(unix, network)
            self._thread.start()

    def _open(self, unix: str, network: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + unix)
        sock.listen(1024)
        socks = [sock]
        if network:
            socks.append(listen_on(network))
            self.address = member_address(unix, socks[1].getsockname()[:2])
        self._doors = [Door(sock, self.secret, self.me, self._admit, self._refuse) for sock in socks]

    def _watch(self) -> None:
        poll = select.poll()
        for fd in (self._closing_fd, *(door.fileno() for door in self._doors)):
            poll.register(fd, select.POLLIN)
        while all(fd != self._closing_fd for fd, _ in poll.poll(1000.0 * min(d.patience_s for d in self._doors))):
            for door in self._doors:
                door.turn()
        for door in self._doors:
            door.close()

    def _admit(self, sock: socket.socket, claim: PeerClaim, keys: Keys) -> None:
        if claim.run != self.run:
            self._refuse(OTHER_RUN, f"{claim.name} of run {claim.run or '(none)'}")
            sock.close()
        elif claim.role in ("mesh", "feed"):
            (self.mesh if claim.role == "mesh" else self.feeds).put(sock, claim, keys)
        else:
            sock.close()

    def _refuse(self, reason: str, who: str) -> None:
        count, first = self.refused.get(reason, (0, who))
        self.refused = {**self.refused, reason: (count + 1, first)}  # another thread may be reading it

    def keep_region(self, conn: Connection) -> None:
        """Map a peer's region once; it is the same for all its views."""
        if conn.fds and conn.peer not in self.regions:
            self.regions[conn.peer] = Region(0, fd=conn.fds.pop(0))

    def close(self) -> None:
        """Once or more: the end of a loop and that of its process both close what is left."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._closing_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._closing_fd)
        for sock, _, _ in self.early:
            sock.close()
        self.mesh.close()
        self.feeds.close()
