"""Donors and joiners: a frozen snapshot from all donors at once, then the outcome of each step since.

A donor freezes its share of the state on a thread while the next step computes (nothing writes parameters between two
optimizer steps; the next one waits for what is not copied yet) and sends from that thread, so a joiner's slowness or
death touches no exchange. What waits for it is bounded; beyond that the stream ends and the joiner starts again
(protocol, 18). A stream from another host ends without a word when that host does: who is in no view any more is then
not waited for (`joiner.py`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from outlast.checkpoint.threads import begin
from outlast.core.protocol import ServeId, ViewId
from outlast.errors import CheckpointError, WireRefusal
from outlast.runtime.training.frozen import Frozen, OutcomeShare
from outlast.runtime.training.warm_memory import at_low_priority
from outlast.runtime.transport.calls import reached
from outlast.runtime.transport.connections import Arrivals, seals_for
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.seal import CODE_BYTES, FORGED, LENGTH_CODE_BYTES, Growing, Keys, Seal, same
from outlast.runtime.transport.tls import Tls
from outlast.runtime.transport.tls_socket import TlsSocket, TlsTrouble

__all__ = ["Flushed", "Share", "Stream", "Streams"]

_SEND_S = 30  # a joiner that takes nothing for so long loses the stream
_AGAIN_S = 0.1  # between two calls of a joiner that lives and is not reached
_THREAD_S = 5.0  # between two tries to have a thread: one may take as long as a step, and more
_QUEUE = 16  # outcomes and snapshots that may wait for one joiner
_PIECE = 4 << 20  # bytes that are sent before they enter a message's code
_TLS_PIECE = 256 << 10  # bytes that a joiner has taken within `_SEND_S` by TLS
_PREFIX = 12  # bytes before a message: its own length, and that of the payload after it
_MOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # of a message: what this host could hold


class Share(msgspec.Struct, frozen=True, tag=True):
    """Bytes lo..hi of the state at `committed`, all tensors laid end to end; from the first donor only `plain`, and
    of the step before `meta` and `given`, what the loops had found as they were given it."""

    committed: int
    lo: int
    hi: int
    total: int
    plain: bytes = b""
    meta: bytes = b""
    given: bytes = b""


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """The sender is about to form this view; nothing of earlier views follows."""

    view: ViewId


class Rest(msgspec.Struct, frozen=True, tag=True):
    """So many messages wait behind what was just sent. Without it a joiner that has applied all that came would take
    itself for caught up, and its members would stand until it has applied what still lay with its donors."""

    count: int


_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Share | OutcomeShare | Flushed | Rest)


def _send(sock: socket.socket, head: Any, payload: Sequence[Tensor], seal: Seal | None = None) -> None:
    body = msgspec.msgpack.encode(head)
    size = sum(part.numel() for part in payload)
    prefix = len(body).to_bytes(4, "big") + size.to_bytes(8, "big")
    parts: list[Any] = [body, *(part.numpy().data for part in payload)]
    if seal is None:
        parts[0] = prefix + body
        for piece in _pieces(parts, _TLS_PIECE) if isinstance(sock, TlsSocket) else parts:
            sock.sendall(piece)
        return
    sock.sendall(prefix + seal.length_code(prefix))
    code = seal.begun()
    code.update(prefix)
    for piece in _pieces(parts, _PIECE):  # both ends compute the code while the network works
        sock.sendall(piece)
        code.update(piece)
    sock.sendall(code.digest())


def _pieces(parts: Sequence[Any], most: int) -> Iterator[Any]:
    return (part[at : at + most] for part in parts for at in range(0, len(part), most))


class Stream:
    """One donor's connection to one joiner, with a thread that sends. While there is none to be had, what is put waits,
    as it does for a joiner that is slow; the donor trains on."""

    def __init__(
        self, run: str, me: str, joiner: str, address: str, secret: bytes, serve: ServeId, tls: Tls | None = None
    ) -> None:
        self.joiner = joiner
        self._queue: queue.Queue[tuple[Any, list[Tensor], Frozen | None] | None] = queue.Queue(_QUEUE)
        self.broken = self._closed = False
        self._until_s = math.inf  # the joiner is called until then
        claim = PeerClaim("feed", me, serve, run)
        self._reach = functools.partial(reached, address, secret, joiner, claim, _SEND_S, tls)
        self._begun, self._begin_s = False, -math.inf  # when its thread is tried next
        self._begin()

    def _begin(self) -> None:
        """Have the thread, now or at a later call."""
        if self._begun or time.monotonic() < self._begin_s:
            return
        self._thread = threading.Thread(target=self._run, name=f"outlast-feed-{self.joiner}", daemon=True)
        try:
            begin(self._thread)
        except (RuntimeError, MemoryError) as error:
            if self._begin_s < 0.0:
                said = f"outlast: no thread to feed {self.joiner} from: {error}; it is tried again"
                print(said, file=sys.stderr, flush=True)
            self._begin_s = time.monotonic() + _THREAD_S
        else:
            self._begun = True

    def put(self, head: Any, payload: list[Tensor] | None = None, frozen: Frozen | None = None) -> None:
        """Queue something; a joiner that cannot keep up loses the stream."""
        if self.broken:
            return
        try:
            self._queue.put_nowait((head, payload or [], frozen))
        except queue.Full:
            self._overfull()
        self._begin()

    def _overfull(self) -> None:
        """It has missed something, so the rest is no use to it. A joiner that was never reached still has to be: by the
        end of a stream it knows that it must ask to be served again."""
        self.broken = self._begun
        if not self._begun:
            self._queue = queue.Queue(1)
            self._queue.put_nowait(None)

    def close(self) -> None:
        """Send what is queued, then end."""
        self._until_s, self._closed = time.monotonic() + _SEND_S, True
        with contextlib.suppress(queue.Full):  # then the thread has yet to take something, and sees that it is closed
            self._queue.put_nowait(None)
        self._begin()

    def _reached(self) -> tuple[socket.socket, Keys] | None:
        """None: the joiner is gone, as its agent will say, or what is queued is of no use to it any more. A crowd at
        its door, no descriptor here and a way that is cut just now are no sign of that: it waits for this stream."""
        never = threading.Event()
        while not self.broken and time.monotonic() < self._until_s:
            try:
                return self._reach()
            except (ConnectionRefusedError, WireRefusal):
                break
            except OSError:
                never.wait(_AGAIN_S)
        return None

    def _run(self) -> None:
        if (reached := self._reached()) is None:
            self.broken = True
            return
        sock, keys = reached
        seal = seals_for(sock, keys)[0]
        try:
            while not self.broken and (item := self._queue.get()) is not None:
                head, payload, frozen = item
                if frozen is None:
                    _send(sock, head, payload, seal)
                else:
                    at_low_priority(functools.partial(_send, sock, head, [frozen.ready()], seal))
                _send(sock, Rest(self._queue.qsize()), [], seal)
                del item, head, payload, frozen  # memory that is lent goes back before the next wait
                if self._closed and self._queue.empty():
                    break
        except (OSError, CheckpointError):
            self.broken = True  # the joiner is gone or too slow: its agent or itself will say so
        finally:
            sock.close()


class _Incoming:
    """A joiner's end of one stream: non-blocking, so that many are read by one thread. A payload is received where it
    stays: survivors wait for a joiner that still has to apply what came last, so nothing is copied on the way.
    `forged`: what came was not what the donor had sent."""

    def __init__(self, sock: socket.socket, member: str, serve: ServeId, keys: Keys | None = None) -> None:
        sock.setblocking(False)
        self._seal, self.forged = seals_for(sock, keys)[1], False
        self._code = 0 if self._seal is None else CODE_BYTES
        self._growing: Growing | None = None
        self.sock, self.member, self.serve, self.ended = sock, member, serve, False
        self.flushed: ViewId | None = None
        self.behind = 1  # messages that wait at the other end, by its newest word
        self._prefix = _PREFIX + (LENGTH_CODE_BYTES if self._seal is not None else 0)
        self._target, self._filled = _memory(self._prefix), 0
        self._head = 0  # bytes of the message before its payload; 0 while the prefix is read

    @property
    def coming(self) -> bool:
        """Whether something is on its way: half here, or by the donor's newest word (which may be old)."""
        return bool(self.behind or self._head or self._filled)

    def note(self, head: Any) -> None:
        """What a message says about the stream itself."""
        if isinstance(head, Flushed):
            self.flushed = head.view
        if isinstance(head, Rest):
            self.behind = head.count

    def read(self) -> list[tuple[Any, memoryview]]:
        """Messages that are complete now. A donor whose words cannot be read is no donor any more: its stream ends."""
        out: list[tuple[Any, memoryview]] = []
        while self._fill():
            whole, self._filled = self._target, 0
            if not self._head:
                if not self._begins(whole):
                    break
                continue
            if not self._genuine(whole):
                break
            whole = whole[: len(whole) - self._code]
            try:
                out.append((_decoder.decode(whole[: self._head]), whole[self._head :]))
            except msgspec.DecodeError:
                self.ended = True
                break
            self._target, self._head = _memory(self._prefix), 0
        return out

    def _begins(self, prefix: memoryview) -> bool:
        """Whether the donor has announced a message, and there is memory for it."""
        self._head, size = int.from_bytes(prefix[:4], "big"), int.from_bytes(prefix[4:_PREFIX], "big")
        try:
            if self._seal is not None:
                self._seal.check_length(prefix[_PREFIX:], prefix[:_PREFIX])
                self._growing = self._seal.begun()
                self._growing.update(prefix[:_PREFIX])
            if self._head and self._head + size <= _MOST_BYTES:
                self._target = _memory(self._head + size + self._code)
                return True
        except WireRefusal:
            self.forged = True
        except RuntimeError:  # this host has less left
            pass
        self.ended = True
        return False

    def _genuine(self, whole: memoryview) -> bool:
        """Whether the donor has sent this. Nothing that follows what it has not is heard."""
        if self._growing is not None and not same(whole[-CODE_BYTES:], self._growing.digest()):
            self.ended = self.forged = True
        self._growing = None
        return not self.forged

    def _fill(self) -> bool:
        """Receive what there is; whether the target is full."""
        while self._filled < len(self._target):
            try:
                received = self.sock.recv_into(self._target[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:  # between hosts also for want of an answer
                received, self.forged = 0, isinstance(error, TlsTrouble) and error.forged
            if not received:
                self.ended = True
                return False
            if self._growing is not None:
                self._growing.update(self._target[self._filled : min(self._filled + received, self._coded)])
            self._filled += received
        return True

    @property
    def _coded(self) -> int:
        """Bytes of what is being received that its code is of."""
        return len(self._target) - self._code


def _memory(size: int) -> memoryview:
    """Not cleared, as a bytearray would be."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


class Streams:
    """All streams that reach one joiner. `wait` returns what arrived."""

    def __init__(self, arrivals: Arrivals, wake_fd: int) -> None:
        self._arrivals, self._wake_fd = arrivals, wake_fd
        self.incoming: list[_Incoming] = []

    def wait(self, timeout_s: float) -> list[tuple[_Incoming, Any, memoryview]]:
        """Everything that has arrived, after waiting at most `timeout_s` for the first of it or a wake-up."""
        poll = select.poll()
        for fd in (self._wake_fd, self._arrivals.fd, *(s.sock.fileno() for s in self.incoming if not s.ended)):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout_s * 1000.0)}
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        if self._arrivals.fd in ready:
            new = [_Incoming(sock, claim.name, claim.number, keys) for sock, claim, keys in self._arrivals.take()]
            self.incoming += new
            ready |= {stream.sock.fileno() for stream in new}
        out = []
        for stream in self.incoming:
            if not stream.ended and stream.sock.fileno() in ready:
                for head, payload in stream.read():
                    stream.note(head)
                    out.append((stream, head, payload))
                if stream.forged:
                    self._arrivals.refuse(FORGED, stream.member)
        return out

    def keep(self, counts: Callable[[ServeId], bool]) -> None:
        """Forget all streams but those of attempts to serve that count."""
        kept = [s for s in self.incoming if counts(s.serve)]
        for stream in self.incoming:
            if stream not in kept:
                stream.sock.close()
        self.incoming = kept

    def close(self) -> None:
        self.keep(lambda _: False)
