"""Frames between a process and the coordinator: four bytes of length, then msgpack; and a client's connection.

Both ends are proved before the first frame (`handshake.py`). Sizes are limited before anything is allocated. Which
messages exist is `core/protocol`'s matter.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any, TypeVar

import msgspec

from outlast.core.protocol import Certificate, StepTime
from outlast.core.step_parts import StepParts
from outlast.errors import WireRefusal
from outlast.runtime.transport.handshake import Caller, PeerClaim, Role
from outlast.runtime.transport.seal import CODE_BYTES, FORGED, LENGTH_CODE_BYTES, Keys, Seal
from outlast.runtime.transport.tls import Tls
from outlast.runtime.transport.tls_socket import TlsSocket, TlsTrouble, refusals

__all__ = ["COORDINATOR", "MAX_FRAME", "SILENT_BEATS", "Decoder", "Heartbeat", "HeartbeatReply", "Link", "frame"]

COORDINATOR = "the coordinator"
"""Its name in handshakes."""
MAX_FRAME = 16 << 20
SILENT_BEATS = 10
"""Heartbeats without an answer after which a connection is given up: its other end may have been replaced."""
_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="Heartbeat"):
    """From every process to the coordinator. Progress rides on it, so a healthy step sends nothing else."""

    sender: str
    sent_s: float  # sender's monotonic clock; comes back in the reply
    view: tuple[int, int] = (0, 0)
    committed: int = 0
    stable: int = 0
    losses: tuple[tuple[int, float], ...] = ()
    step_s: float = 0.0
    until: int = 0  # steps in all, as the loop said
    steps: tuple[StepTime, ...] = ()  # this member's newest, those not told on this connection
    sent_messages: int = 0  # messages to the coordinator besides heartbeats so far
    certified: Certificate | None = None
    parts: StepParts | None = None  # where its steps go, now and then
    refused: dict[str, tuple[int, str]] = {}  # strangers at this member's socket so far: {reason: (count, the first)}


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, tag="HeartbeatReply"):
    epoch: int
    sent_s: float


Decoder = msgspec.msgpack.Decoder


def frame(message: Any) -> bytes:
    """Encode one message with its length. ValueError beyond MAX_FRAME."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """Length that a frame's head announces. WireRefusal beyond MAX_FRAME."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise WireRefusal(f"a frame announces more than the limit of {MAX_FRAME} bytes")
    return int(length)


def read_frame(sock: socket.socket, seal: Seal | None = None) -> bytes:
    """One frame's body from a blocking socket. ConnectionError at the end of the stream, WireRefusal if it is
    oversized, or (`seal`: of what the other end sends) not what was sent."""
    head = _read(sock, _LENGTH.size)
    if seal is not None:
        seal.check_length(_read(sock, LENGTH_CODE_BYTES), head)
    body = _read(sock, frame_length(head))
    if seal is not None:
        seal.check(_read(sock, CODE_BYTES), head, body)
    return body


def _read(sock: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionError("the connection ended")
        view = view[got:]
    return bytes(buffer)


def _prove(sock: socket.socket, secret: bytes, claim: PeerClaim, timeout_s: float) -> Keys:
    """The client's side of the handshake, all of it within `timeout_s`. WireRefusal, OSError."""
    end_s, bound = time.monotonic() + timeout_s, b""
    if isinstance(sock, TlsSocket):
        sock.greet_within(timeout_s)
        bound = sock.bound()
    caller = Caller(secret, COORDINATOR, claim, bound)
    sock.sendall(caller.knock)
    reply = b""
    while len(reply) < caller.wanted:
        sock.settimeout(max(1e-3, end_s - time.monotonic()))
        data = sock.recv(caller.wanted - len(reply))
        if not data:
            raise ConnectionError("the connection ended before it was proved")
        reply += data
    sock.settimeout(timeout_s)
    sock.sendall(caller.prove(reply))
    return caller.keys


class Link:
    """A proven client connection to the coordinator: send from any thread, receive from one. Each frame has a code that
    nobody between the two can make; `tls`: and nobody reads it."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        role: Role,
        name: str,
        timeout_s: float,
        run: str = "",
        tls: Tls | None = None,
    ) -> None:
        self.sock = socket.create_connection(address, timeout=timeout_s)
        try:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self.sock = tls.calling(self.sock, address[0])
                self.sock.settimeout(timeout_s)
            with refusals():
                keys = _prove(self.sock, secret, PeerClaim(role, name, run=run), timeout_s)
        except BaseException:
            self.sock.close()
            raise
        self._mine, self._theirs = (Seal(key) for key in keys)
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        data = frame(message)
        with self._sending:  # codes are made in the order in which frames go
            try:
                self.sock.sendall(self._mine.sealed(data[: _LENGTH.size], memoryview(data)[_LENGTH.size :]))
            except OSError:
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)  # what follows a part of a frame would look like a forgery
                raise

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        try:
            return decoder.decode(read_frame(self.sock, self._theirs))
        except TlsTrouble as trouble:
            if trouble.forged:
                raise WireRefusal(FORGED) from trouble
            raise

    @property
    def more(self) -> bool:
        """Whether something has been received already that polling the socket would not tell of."""
        return isinstance(self.sock, TlsSocket) and self.sock.pending() > 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
