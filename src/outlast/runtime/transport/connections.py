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
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from outlast.checkpoint.threads import begin
from outlast.errors import ViewAbandoned, WireRefusal
from outlast.runtime.transport.descriptors import closed_with
from outlast.runtime.transport.door import Door
from outlast.runtime.transport.endpoints import listen_on, member_address
from outlast.runtime.transport.handshake import FOLLOWED, OTHER_RUN, PeerClaim
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.seal import CODE_BYTES, LENGTH_CODE_BYTES, Keys, Seal
from outlast.runtime.transport.tls import Tls
from outlast.runtime.transport.tls_socket import TlsSocket, TlsTrouble

__all__ = [
    "MAX_PEER_FRAME",
    "Arrivals",
    "Connection",
    "Listener",
    "PeersLost",
    "Proved",
    "decoded",
]

MAX_PEER_FRAME = 1 << 31
"""Bytes of one frame between members: an outcome that is handed over may carry momentum and module buffers. Memory
grows with what has arrived, not with what was announced."""
_MOST = 1024  # proved connections that may wait for the training thread
_FDS = socket.CMSG_LEN(16)
_CUT = int(socket.MSG_CTRUNC)  # a flag of an enumeration makes another with each use
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
    """For what this end sends and for what the other does; none on one machine, where nobody is between them, and none
    over TLS, which has its own."""
    if keys is None or sock.family == socket.AF_UNIX or isinstance(sock, TlsSocket):
        return None, None
    return Seal(keys[0]), Seal(keys[1])


class Connection:
    """One stream with a proved peer: frames in, frames out, descriptors in where both are on one machine; where they
    are not, each frame has a code that nobody between them can make (`keys`), TLS's or ours. `forged`: one had
    another."""

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
        self.cut = False  # a descriptor was sent, and this process had none left to hold it by
        sock.setblocking(False)

    def send(self, message: Any, fd: int | None = None) -> bool:
        """Queue a frame and send what fits. `fd` goes with it on one machine. False if the kernel passes none on just
        now (too many are under way, or it has no memory): then nothing was sent."""
        if self.deaf:
            return True
        body = _encoder.encode(message)
        if len(body) > MAX_PEER_FRAME:
            raise ValueError(f"a message of {len(body)} bytes to {self.peer} is over the limit of {MAX_PEER_FRAME}")
        head = len(body).to_bytes(4, "big")
        data = head + body if self._mine is None else self._mine.sealed(head, body)
        if fd is not None and self.sock.family == socket.AF_UNIX:
            return self._send_with(fd, data)
        self.pending += data
        self.flush()
        return True

    def _send_with(self, fd: int, data: bytes) -> bool:
        whole, rights = self.pending + data, (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        try:
            sent = self.sock.sendmsg([whole], [rights])
        except ConnectionError:  # the peer is gone
            sent = 0
        except OSError:
            return False
        self.pending = whole[sent:]
        self.flush()
        return True

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
                data, ancillary, flags, _ = self.sock.recvmsg(65536, _FDS)
            except BlockingIOError:
                break
            except OSError as error:
                data, ancillary, flags = b"", [], 0
                self.forged = isinstance(error, TlsTrouble) and error.forged
            self.cut |= bool(flags & _CUT)
            for level, kind, body in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                    self._take(fds)
            self.ended = not data
            self.buffer += data
            if len(data) < 65536 and not isinstance(self.sock, TlsSocket):  # which gives a record at a time
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


class Arrivals:
    """Proved connections that wait for the training thread. `fd` is readable while there are some. `refuse(reason,
    who)`: one of them turned out not to be what it was."""

    def __init__(self, refuse: Callable[[str, str], None] = lambda reason, who: None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._forget_fd = closed_with(self, self.fd)  # a training that never begins closes nothing
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
        self._forget_fd()


class Listener:
    """A member's address, and what outlives a view: peers' mapped regions, callers of later views.

    The address has a random part: nobody can take it beforehand. `refused`: how often strangers were sent away, and
    who was the first, for each reason (of which there are few). `alone`: a fleet of one listens to nobody. `network`:
    the address of this machine at which other hosts reach this member; "" where the run has but one. `tls`: what they
    have to show there, and this member at theirs. Whoever is left of another run, which may have had the same secret
    and this very port, is a stranger too. `followed(address, epoch)`: a coordinator says, on the door's thread, that it
    has taken over; False if that is refused. RuntimeError, MemoryError: there is no thread for its door.
    """

    def __init__(
        self, run_id: str, me: str, secret: bytes, *, alone: bool = False, network: str = "", tls: Tls | None = None
    ) -> None:
        self.run, self.me, self.secret, self.tls = run_id, me, secret, tls
        unix = f"outlast/{run_id}/{me}/{secrets.token_hex(8)}"
        self.mesh, self.feeds = Arrivals(self._refuse), Arrivals(self._refuse)
        self.early: list[Proved] = []  # for views that I have not heard of
        self.regions: dict[str, Region] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.followed: Callable[[str, int], bool] = lambda address, epoch: False
        self._closing_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._forget_fd = closed_with(self, self._closing_fd)
        self._thread = threading.Thread(target=self._watch, name="outlast-door", daemon=True)
        self._doors: list[Door] = []
        self.address = unix
        if not alone:
            self._open(unix, network)
            begin(self._thread)

    def _open(self, unix: str, network: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + unix)
        sock.listen(1024)
        socks = [sock]
        if network:
            socks.append(listen_on(network))
            self.address = member_address(unix, socks[1].getsockname()[:2])
        self._doors = [Door(sock, self.secret, self.me, self._admit, self._refuse, self.tls) for sock in socks]

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
            if claim.role == "coordinator" and not self.followed(claim.name, claim.number[0]):
                self._refuse(FOLLOWED, claim.name)
            sock.close()

    def _refuse(self, reason: str, who: str) -> None:
        count, first = self.refused.get(reason, (0, who))
        self.refused = {**self.refused, reason: (count + 1, first)}  # another thread may be reading it

    def keep_region(self, conn: Connection) -> bool:
        """Map a peer's region once; it is the same for all its views. False if it has sent one that this process had no
        descriptor or memory for: it has to come again."""
        cut, conn.cut = conn.cut, False
        if conn.peer in self.regions:
            return True
        if not conn.fds:
            return not cut
        try:
            self.regions[conn.peer] = Region(0, fd=conn.fds.pop(0))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Once or more: the end of a loop and that of its process both close what is left."""
        if not self._forget_fd.alive:
            return
        os.eventfd_write(self._closing_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._forget_fd()
        for sock, _, _ in self.early:
            sock.close()
        self.mesh.close()
        self.feeds.close()
