"""Frames on a stream: four bytes of length, then msgpack; and the proof that both ends belong to this run.

Every connection starts with a mutual HMAC-SHA256 challenge over the run's secret: fresh nonces make a recorded
handshake worthless. Sizes are limited before anything is allocated. Which messages exist is `core/protocol`'s matter.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
from typing import Any, TypeVar

import msgspec

from outlast.core.protocol import Certificate
from outlast.errors import WireRefusal

__all__ = [
    "MAX_FRAME", "SILENT_BEATS", "Decoder", "Heartbeat", "HeartbeatReply", "Link", "frame", "prove_client",
    "read_frame", "server_challenge", "server_check",
]  # fmt: skip

MAX_FRAME = 16 << 20
SILENT_BEATS = 10
"""Heartbeats without an answer after which a connection is given up: its other end may have been replaced."""
_LENGTH = struct.Struct(">I")
_MAGIC = b"outlast1"
_ROLES = ("member", "agent", "launcher")
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
    seconds: dict[str, float] = {}  # this member's accounting so far
    sent_messages: int = 0  # messages to the coordinator besides heartbeats so far
    certified: Certificate | None = None


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, tag="HeartbeatReply"):
    epoch: int
    sent_s: float


class _Challenge(msgspec.Struct, frozen=True, array_like=True):
    magic: bytes
    nonce: bytes


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    role: str
    name: str
    nonce: bytes
    proof: bytes


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


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((_MAGIC, *parts)), "sha256")


def server_challenge() -> tuple[bytes, bytes]:
    """(nonce, frame to send first)."""
    nonce = secrets.token_bytes(16)
    return nonce, frame(_Challenge(magic=_MAGIC, nonce=nonce))


def server_check(secret: bytes, nonce: bytes, body: bytes) -> tuple[str, str, bytes]:
    """Check the client's answer: (role, name, frame to send back). WireRefusal if it does not know the secret.

    Reasons are fixed texts, here and in `frame_length`: refusals are counted by them, and strangers must not choose
    what is stored.
    """
    try:
        answer = msgspec.msgpack.decode(body, type=_Answer)
    except msgspec.DecodeError as error:
        raise WireRefusal("bytes that are no answer to a challenge") from error
    expected = _proof(secret, b"client", nonce, answer.nonce, answer.role.encode(), answer.name.encode())
    if not hmac.compare_digest(expected, answer.proof):
        raise WireRefusal("a wrongly signed answer: another run's secret, or a replay")
    if answer.role not in _ROLES:
        raise WireRefusal("a role that does not exist")
    return answer.role, answer.name, frame(_proof(secret, b"server", answer.nonce, nonce))


def prove_client(sock: socket.socket, secret: bytes, role: str, name: str) -> None:
    """The client's side of the handshake on a connected socket with a timeout set. WireRefusal, OSError."""
    challenge = msgspec.msgpack.decode(read_frame(sock), type=_Challenge)
    if challenge.magic != _MAGIC:
        raise WireRefusal("the other end is not an outlast coordinator of this version")
    nonce = secrets.token_bytes(16)
    proof = _proof(secret, b"client", challenge.nonce, nonce, role.encode(), name.encode())
    sock.sendall(frame(_Answer(role=role, name=name, nonce=nonce, proof=proof)))
    answer = msgspec.msgpack.decode(read_frame(sock), type=bytes)
    if not hmac.compare_digest(answer, _proof(secret, b"server", nonce, challenge.nonce)):
        raise WireRefusal("the coordinator does not know this run's secret")


def read_frame(sock: socket.socket) -> bytes:
    """One frame's body from a blocking socket. ConnectionError at the end of the stream, WireRefusal if oversized."""
    return _read(sock, frame_length(_read(sock, _LENGTH.size)))


def _read(sock: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionError("the connection ended")
        view = view[got:]
    return bytes(buffer)


class Link:
    """A proven client connection to the coordinator: send from any thread, receive from one."""

    def __init__(self, address: tuple[str, int], secret: bytes, role: str, name: str, timeout_s: float) -> None:
        self.sock = socket.create_connection(address, timeout=timeout_s)
        try:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove_client(self.sock, secret, role, name)
        except BaseException:
            self.sock.close()
            raise

    def send(self, message: Any) -> None:
        self.sock.sendall(frame(message))

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        return decoder.decode(read_frame(self.sock))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
