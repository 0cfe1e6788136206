"""The connections between a view's members on one host: made afresh for every view, closed with a goodbye.

Role: small frames in order between every pair (roll call, bucket announcements, headers, hand-over), descriptors of
shared regions, and the first evidence of a death: an end of stream without goodbye. All I/O is the training thread's;
it waits on sockets and on a wake descriptor, never in a sleep. Frames of an older view cannot arrive: its sockets are
closed. Between hosts another mesh will stand in its place.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from outlast.core.phases import Phase
from outlast.core.policy import Culprit
from outlast.core.protocol import Commitment, Header, RollEntry, View, ViewId
from outlast.errors import StepMisuse, ViewAbandoned
from outlast.runtime._probe import Probe
from outlast.runtime._shared import Region

__all__ = [
    "Bye", "Extra", "Final", "Found", "Hand", "Head", "Listener", "Mesh", "Parts", "PeersLost", "Prints", "Ready",
    "Reduced", "Roll",
]  # fmt: skip


class _Hi(msgspec.Struct, frozen=True, tag=True):
    member: str
    view: ViewId
    token: bytes


class Roll(msgspec.Struct, frozen=True, tag=True):
    entry: RollEntry


class Parts(msgspec.Struct, frozen=True, tag=True):
    """After a roll in which states differ: one fingerprint for each part of mine, by name. `step`: -1."""

    step: int
    rows: tuple[tuple[str, int], ...]


class Prints(msgspec.Struct, frozen=True, tag=True):
    """Fingerprints of the microbatches that I contribute to a step, before audits are drawn."""

    step: int
    said: Commitment


class Ready(msgspec.Struct, frozen=True, tag=True):
    """My partial sums of a bucket lie in these slots of my region, in the order of my nodes. `prints`: of their blocks,
    taken when the sums were made (with audits)."""

    step: int
    bucket: int
    slots: tuple[int, ...]
    prints: tuple[bytes, ...] = ()


class Reduced(msgspec.Struct, frozen=True, tag=True):
    """My slice of a bucket is reduced and lies in my region's outcome slot."""

    step: int
    bucket: int


class Head(msgspec.Struct, frozen=True, tag=True):
    """My header; and the module buffers after microbatch 0, from who computed it."""

    header: Header
    buffers: tuple[bytes, ...] = ()


class Hand(msgspec.Struct, frozen=True, tag=True):
    """The outcome of `step` lies in my outcome slot; `meta` is the rest of it."""

    step: int
    meta: bytes


class Extra(msgspec.Struct, frozen=True, tag=True):
    """What a robust rule needs told beside the gradients; `bucket`: the channel (`_row_planes.py`)."""

    step: int
    bucket: int
    body: bytes


class Found(msgspec.Struct, frozen=True, tag=True):
    """What I found when the guards had reason to look closer."""

    step: int
    culprits: tuple[Culprit, ...]


class Final(msgspec.Struct, frozen=True, tag=True):
    """I committed the last step."""

    step: int


class Bye(msgspec.Struct, frozen=True, tag=True):
    """I leave this view."""


class _Ping(msgspec.Struct, frozen=True, tag=True):
    pass


class _Pong(msgspec.Struct, frozen=True, tag=True):
    pass


_Frame = _Hi | Roll | Parts | Prints | Ready | Reduced | Head | Hand | Extra | Found | Final | Bye | _Ping | _Pong
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Frame)
_encoder = msgspec.msgpack.Encoder()


class PeersLost(ViewAbandoned):
    """Connections ended without a goodbye: `suspects`."""

    def __init__(self, suspects: tuple[str, ...]) -> None:
        super().__init__(f"the connections to {', '.join(suspects)} ended")
        self.suspects = suspects


class _Conn:
    """One unix stream with a peer: frames in, frames out, descriptors in."""

    def __init__(self, sock: socket.socket, peer: str = "") -> None:
        self.sock, self.peer = sock, peer
        self.buffer = bytearray()
        self.pending = bytearray()
        self.fds: list[int] = []
        self.early: list[Any] = []  # frames that came with the greeting
        self.ended = False
        self.deaf = False  # the peer takes nothing more; what it said before may still have to be read
        sock.setblocking(False)

    def send(self, message: Any) -> None:
        if self.deaf:
            return
        body = _encoder.encode(message)
        self.pending += len(body).to_bytes(4, "big") + body
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

    def read(self) -> list[Any]:
        """Frames that have arrived. Sets `ended` at the end of the stream."""
        while not self.ended:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(65536, socket.CMSG_LEN(16))
            except BlockingIOError:
                break
            except OSError:
                data, ancillary = b"", []
            for level, kind, body in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                    self.fds += fds
            self.ended = not data
            self.buffer += data
            if len(data) < 65536:
                break
        return list(self._frames())

    def _frames(self) -> Any:
        while len(self.buffer) >= 4:
            length = int.from_bytes(self.buffer[:4], "big")
            if len(self.buffer) < 4 + length:
                return
            body = bytes(self.buffer[4 : 4 + length])
            del self.buffer[: 4 + length]
            yield _decoder.decode(body)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.sock.close()


class Listener:
    """A member's address on this host (abstract unix socket) and what outlives a view: peers' mapped regions."""

    def __init__(self, run_id: str, me: str, secret: bytes) -> None:
        self.me, self.secret = me, secret
        self.address = f"outlast/{run_id}/{me}/{os.getpid()}"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.bind("\0" + self.address)
        self.sock.listen(1024)
        self.sock.setblocking(False)
        self.early: list[tuple[_Conn, _Hi]] = []
        self.unknown: list[_Conn] = []  # have not said yet who they are, nor for which view they come
        self.regions: dict[str, Region] = {}

    def token(self, view: ViewId, sender: str, receiver: str) -> bytes:
        text = f"mesh|{view}|{sender}|{receiver}".encode()
        return hmac.digest(self.secret, text, "sha256")

    def keep_region(self, conn: _Conn) -> None:
        """Map a peer's region once; it is the same for all its views."""
        if conn.fds and conn.peer not in self.regions:
            self.regions[conn.peer] = Region(0, fd=conn.fds.pop(0))

    def close(self) -> None:
        for conn in self.unknown:
            conn.close()
        self.sock.close()


class Mesh:
    """All pairs of one view. `abandoned()` is asked whenever `wake_fd` is readable. `on_stall(phase, missing, s)`
    is called when a wait exceeds `patience(phase)` seconds, and then each time that again has passed."""

    def __init__(
        self,
        listener: Listener,
        view: View,
        addresses: dict[str, str],
        region: Region | None,
        *,
        wake_fd: int,
        abandoned: Callable[[], bool],
        patience: Callable[[Phase], float],
        on_stall: Callable[[Phase, tuple[str, ...], float], None],
        probe: Probe,
    ) -> None:
        self.listener, self.view, self.addresses, self.region = listener, view, addresses, region
        self.me = listener.me
        self.peers = [name for name in view.members if name != self.me]
        self.conns: dict[str, _Conn] = {}
        self.boxes: dict[tuple[type, int, int], dict[str, Any]] = defaultdict(dict)
        self.left: set[str] = set()
        self.answered: set[str] = set()
        self.ping_wanted = False
        self.wake_fd = wake_fd
        self._wake_fd, self._abandoned, self._patience, self._on_stall = wake_fd, abandoned, patience, on_stall
        self._probe = probe
        self._poll = select.poll()
        self._by_fd: dict[int, _Conn] = {}
        self._strangers: dict[int, _Conn] = {}
        self._poll.register(wake_fd, select.POLLIN)

    # --- forming -------------------------------------------------------------------------------------------------
    def form(self) -> None:
        """Connect to every member. Raises ViewAbandoned or PeersLost."""
        self._poll.register(self.listener.sock.fileno(), select.POLLIN)
        while self.listener.unknown:
            self._meet(self.listener.unknown.pop())
        early, self.listener.early = self.listener.early, []
        for conn, hi in early:
            self._welcome(conn, hi)
        mine = self.view.members.index(self.me)
        for name in self.view.members[:mine]:
            self._connect(name)
        self._wait(lambda: [n for n in self.peers if n not in self.conns or not self.conns[n].peer], Phase.CONNECT)
        self._poll.unregister(self.listener.sock.fileno())
        for fd in self._strangers:
            self._poll.unregister(fd)
        self._keep_strangers()

    def _keep_strangers(self) -> None:
        """They may come for a later view: closed without a word they would take me for dead."""
        self.listener.unknown += self._strangers.values()
        self._strangers.clear()

    def _connect(self, name: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(5.0)
            sock.connect("\0" + self.addresses[name])
        except (OSError, KeyError) as error:
            sock.close()
            raise PeersLost((name,)) from error
        conn = _Conn(sock)
        self.conns[name] = conn
        self._by_fd[sock.fileno()] = conn
        self._poll.register(sock.fileno(), select.POLLIN)
        self._greet(conn, name)

    def _greet(self, conn: _Conn, name: str) -> None:
        if self.region is not None:
            with contextlib.suppress(OSError):
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.region.fd]))
                body = _encoder.encode(_Hi(self.me, self.view.id, self.listener.token(self.view.id, self.me, name)))
                conn.sock.sendmsg([len(body).to_bytes(4, "big") + body], [rights])
            return
        conn.send(_Hi(self.me, self.view.id, self.listener.token(self.view.id, self.me, name)))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self.listener.sock.accept()
                self._meet(_Conn(sock))

    def _meet(self, conn: _Conn) -> None:
        self._strangers[conn.sock.fileno()] = conn
        self._poll.register(conn.sock.fileno(), select.POLLIN)

    def _welcome(self, conn: _Conn, hi: _Hi) -> None:
        """A connection said who it is: ours, of a newer view (kept for it), of an older one (that I have left, which it
        is told), or refused."""
        genuine = hmac.compare_digest(hi.token, self.listener.token(hi.view, hi.member, self.me))
        fd = conn.sock.fileno()
        self._strangers.pop(fd, None)
        with contextlib.suppress(KeyError):
            self._poll.unregister(fd)
        if not genuine or hi.view < self.view.id or (hi.view == self.view.id and hi.member not in self.peers):
            if genuine:
                conn.send(_Hi(self.me, hi.view, self.listener.token(hi.view, self.me, hi.member)))
                conn.send(Bye())
            conn.close()
        elif hi.view > self.view.id:
            self.listener.early.append((conn, hi))
        else:
            self.conns[hi.member] = conn
            self._by_fd[fd] = conn
            self._poll.register(fd, select.POLLIN)
            self._introduce(conn, hi.member)
            self._greet(conn, hi.member)
            early, conn.early = conn.early, []
            for message in early:
                self._dispatch(conn, message)

    def _introduce(self, conn: _Conn, name: str) -> None:
        conn.peer = name
        self.listener.keep_region(conn)

    # --- sending -------------------------------------------------------------------------------------------------
    def broadcast(self, message: Any) -> None:
        for name in self.peers:
            self.send(name, message)

    def send(self, name: str, message: Any) -> None:
        conn = self.conns.get(name)  # none while the mesh forms
        if conn is not None and name not in self._probe.muted:
            conn.send(message)

    # --- waiting -------------------------------------------------------------------------------------------------
    def collect(self, kind: type, step: int, bucket: int, phase: Phase, names: list[str] | None = None) -> Any:
        """Wait for one message of this kind from each of `names` (all peers): {member: message}."""
        box = self.boxes[kind, step, bucket]
        wanted = self.peers if names is None else names

        def missing() -> list[str]:
            absent = [name for name in wanted if name not in box]
            self._same_end(kind, step, absent)
            return absent

        self._wait(missing, phase)
        return box

    def _same_end(self, kind: type, step: int, absent: list[str]) -> None:
        """Who waits for the end of the run while others train on would wait for ever, and so would they."""
        if kind not in (Final, Ready):
            return
        other = Ready if kind is Final else Final
        differ = [name for name in absent if name in self.boxes.get((other, step, 0), ())]
        if differ:
            what = "train on" if kind is Final else "ended their loop"
            raise StepMisuse(
                f"replicas end their loops at different steps: {', '.join(differ)} {what} at step {step}",
                where=f"replica {self.me}", remedy="decide on `break` by what is equal everywhere, such as step.loss",
            )  # fmt: skip

    def until(self, done: Callable[[], bool], suspects: list[str], phase: Phase) -> None:
        """Wait for something that wakes `wake_fd`; `suspects` are named if it takes too long."""
        self._wait(lambda: [] if done() else suspects, phase)

    def has_all(self, kind: type, step: int, bucket: int) -> bool:
        """Whether `collect` would return at once. Reads what has arrived, never waits."""
        box = self.boxes[kind, step, bucket]
        if len(box) < len(self.peers):
            self._pump(0.0)
        return len(box) == len(self.peers)

    def forget(self, step: int) -> None:
        """Drop what was collected for steps before `step`."""
        for key in [key for key in self.boxes if 0 <= key[1] < step]:
            del self.boxes[key]

    def _wait(self, missing: Callable[[], list[str]], phase: Phase) -> None:
        start = time.monotonic()
        patience = self._patience(phase)
        told = start
        while absent := missing():
            self._check(absent)
            now = time.monotonic()
            if now - told >= patience:
                self._on_stall(phase, tuple(absent), now - start)
                told = now
            self._pump(min(patience - (now - told), 3600.0))

    def _check(self, absent: list[str]) -> None:
        if self._abandoned():
            raise ViewAbandoned("a newer view or a notice ended this one")
        if self.left.intersection(absent):
            raise ViewAbandoned(f"{', '.join(sorted(self.left))} left the view")
        ended = tuple(n for n in absent if n in self.conns and self.conns[n].ended)
        if ended:
            raise PeersLost(ended)

    def _pump(self, timeout_s: float) -> None:
        """Read everything that has arrived, waiting for the first of it at most `timeout_s`."""
        for fd, events in self._poll.poll(timeout_s * 1000.0):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd == self.listener.sock.fileno():
                self._accept()
            elif fd in self._strangers:
                self._stranger(self._strangers[fd])
            else:
                self._read(fd, events)

    def _stranger(self, conn: _Conn) -> None:
        messages = conn.read()
        if messages and isinstance(messages[0], _Hi):
            conn.early = messages[1:]
            self._welcome(conn, messages[0])
            return
        if conn.ended:
            self._poll.unregister(conn.sock.fileno())
            del self._strangers[conn.sock.fileno()]
            conn.close()

    def _read(self, fd: int, events: int) -> None:
        conn = self._by_fd[fd]
        if events & select.POLLOUT:
            conn.flush()
        for message in conn.read():
            self._dispatch(conn, message)
        if conn.ended:
            self._poll.unregister(fd)
        else:
            self._poll.modify(fd, select.POLLIN | (select.POLLOUT if conn.pending else 0))

    def _dispatch(self, conn: _Conn, message: Any) -> None:
        name = conn.peer
        if isinstance(message, _Hi):
            if not hmac.compare_digest(message.token, self.listener.token(self.view.id, message.member, self.me)):
                conn.ended = True
                return
            self._introduce(conn, message.member)
        elif isinstance(message, Bye):
            self.left.add(name)
        elif isinstance(message, _Ping):
            self.send(name, _Pong())
        elif isinstance(message, _Pong):
            self.answered.add(name)
        elif isinstance(message, Roll):
            self.boxes[Roll, -1, 0][name] = message
        elif isinstance(message, Head):
            self.boxes[Head, message.header.step, 0][name] = message
        else:
            bucket = message.bucket if isinstance(message, Ready | Reduced | Extra) else 0
            self.boxes[type(message), message.step, bucket][name] = message

    def ping(self) -> None:
        """Ask every peer for a sign of life on this mesh; answers gather in `answered`."""
        self.answered.clear()
        self.ping_wanted = False
        self.broadcast(_Ping())

    def rest(self, timeout_s: float) -> None:
        """Nobody is waited for: read what arrives for at most `timeout_s`. Raises as a wait does."""
        self._check(self.peers)
        self._pump(timeout_s)

    # --- leaving -------------------------------------------------------------------------------------------------
    def close(self, goodbye: bool = True) -> None:
        """Leave the view; peers learn at once that it was no death."""
        self._keep_strangers()
        for conn in self.conns.values():
            if goodbye and not conn.ended:
                conn.send(Bye())
            conn.close()
        self.conns.clear()
