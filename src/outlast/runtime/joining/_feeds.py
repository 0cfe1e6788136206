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
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from outlast.core.protocol import ServeId, ViewId
from outlast.errors import CheckpointError, WireRefusal
from outlast.runtime.training.frozen import Frozen, OutcomeShare
from outlast.runtime.training.warm_memory import at_low_priority
from outlast.runtime.transport.connections import Arrivals, reached, seals_for
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.seal import CODE_BYTES, FORGED, LENGTH_CODE_BYTES, Growing, Keys, Seal, same

__all__ = ["Flushed", "Share", "Stream", "Streams"]

_SEND_S = 30  # a joiner that takes nothing for so long loses the stream
_QUEUE = 16  # outcomes and snapshots that may wait for one joiner
_PIECE = 4 << 20  # bytes that are sent before they enter a message's code
_PREFIX = 12  # bytes before a message: its own length, and that of the payload after it
_MOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # of a message: what this host could hold


class Share(msgspec.Struct, frozen=True, tag=True):
    """Bytes lo..hi of the state at `committed`, all tensors laid end to end; from the first donor only `plain`, and
    `meta` of the step before."""

    committed: int
    lo: int
    hi: int
    total: int
    plain: bytes = b""
    meta: bytes = b""


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
        for part in parts:
            sock.sendall(part)
        return
    sock.sendall(prefix + seal.length_code(prefix))
    code = seal.begun()
    code.update(prefix)
    for part in parts:
        for at in range(0, len(part), _PIECE):  # both ends compute the code while the network works
            piece = part[at : at + _PIECE]
            sock.sendall(piece)
            code.update(piece)
    sock.sendall(code.digest())


class Stream:
    """One donor's connection to one joiner, with a thread that sends."""

    def __init__(self, run: str, me: str, joiner: str, address: str, secret: bytes, serve: ServeId) -> None:
        self.joiner = joiner
        self._queue: queue.Queue[tuple[Any, list[Tensor], Frozen | None] | None] = queue.Queue(_QUEUE)
        self.broken = False
        claim = PeerClaim("feed", me, serve, run)
        self._reach = functools.partial(reached, address, secret, joiner, claim, _SEND_S)
        self._thread = threading.Thread(target=self._run, name=f"outlast-feed-{joiner}", daemon=True)
        self._thread.start()

    def put(self, head: Any, payload: list[Tensor] | None = None, frozen: Frozen | None = None) -> None:
        """Queue something; a joiner that cannot keep up loses the stream."""
        if self.broken:
            return
        try:
            self._queue.put_nowait((head, payload or [], frozen))
        except queue.Full:
            self.broken = True

    def close(self) -> None:
        """Send what is queued, then end."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _run(self) -> None:
        try:
            sock, keys = self._reach()
        except (OSError, WireRefusal):  # the joiner is gone: its agent will say so
            self.broken = True
            return
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
            except OSError:  # between hosts also for want of an answer
                received = 0
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
