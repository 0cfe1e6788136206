"""The connections between a view's members: made afresh for every view, closed with a goodbye.

Role: small frames in order between every pair (roll call, bucket announcements, headers, hand-over), descriptors of
shared regions, and the first evidence of a death: an end of stream without goodbye. All I/O is the training thread's;
it waits on sockets and on a wake descriptor, never in a sleep. Frames of an older view cannot arrive: its sockets are
closed. Who connects has been proved before it is heard of here (`connections.py`). Between hosts they are TCP's; a host
that falls silent ends none of them, so who waits for it is told of by the view's deadlines.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from outlast.core.phases import Phase
from outlast.core.protocol import View, ViewId
from outlast.core.step_parts import PART_OF
from outlast.errors import StepMisuse, ViewAbandoned, WireRefusal
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport.calls import Call, passes
from outlast.runtime.transport.connections import Connection, Listener, PeersLost
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.pair_waits import PairWaits
from outlast.runtime.transport.peer_messages import (
    Bye,
    Extra,
    Final,
    Frame,
    HeaderSaid,
    Hi,
    Key,
    Ping,
    Pong,
    Reduced,
    Roll,
    SayAgain,
    SumsReady,
)
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.seal import FORGED, Keys
from outlast.runtime.transport.tls_socket import counted

__all__ = ["Mesh"]  # fmt: skip


_RETRY_S = 0.02  # until what failed for a want is tried again: a call, or a region that was not passed on
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Frame)
T = TypeVar("T")


def _box_of(message: Any) -> tuple[type, int, int]:
    """(kind, step, bucket): what a message is filed under, here and where it arrives."""
    if isinstance(message, Roll):
        return Roll, -1, 0
    if isinstance(message, HeaderSaid):
        return HeaderSaid, message.header.step, 0
    return type(message), message.step, message.bucket if isinstance(message, SumsReady | Reduced | Extra) else 0


class Mesh:
    """All pairs of one view. `abandoned()` is asked whenever `wake_fd` is readable. `on_stall(phase, missing, s)`
    is called when a wait exceeds `patience(phase)` seconds, and then each time that again has passed; in between
    `on_awaited(missing)`, each time that `awaited_s(phase)` has."""

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
        awaited_s: Callable[[Phase], float] = lambda phase: math.inf,
        on_awaited: Callable[[tuple[str, ...]], None] = lambda missing: None,
    ) -> None:
        self.listener, self.view, self.addresses, self.region = listener, view, addresses, region
        self.me = listener.me
        self.peers = [name for name in view.members if name != self.me]
        self.conns: dict[str, Connection] = {}
        self.boxes: dict[tuple[type, int, int], dict[str, Any]] = defaultdict(dict)
        self.keys: list[Key] = []  # from peers, until the view's store takes them
        self.left: set[str] = set()
        self.answered: set[str] = set()
        self.ping_wanted = False
        self.wake_fd = wake_fd
        self._wake_fd, self._abandoned, self._patience, self._on_stall = wake_fd, abandoned, patience, on_stall
        self._probe, self._awaited_s, self._on_awaited = probe, awaited_s, on_awaited
        self._poll = select.poll()
        self._by_fd: dict[int, Connection] = {}
        self._calls: dict[int, Call] = {}  # connections that I make, until both ends are proved
        self._to_call: list[str] = []
        self._to_greet: list[Connection] = []  # who has not been sent my region yet
        self._call_at_s = 0.0
        self.waits = PairWaits()  # the replica's own, where it has one
        self._headed: dict[str, float] = {}  # when each peer's newest header came
        self._poll.register(wake_fd, select.POLLIN)

    # --- forming -------------------------------------------------------------------------------------------------
    def form(self) -> None:
        """Connect to every member. Raises ViewAbandoned or PeersLost."""
        self.waits.conns = self.conns
        self._poll.register(self.listener.mesh.fd, select.POLLIN)
        early, self.listener.early = self.listener.early, []
        for proved in early:
            self._welcome(*proved)
        self._to_call = list(self.view.members[: self.view.members.index(self.me)])
        self._call()
        self._wait(self._not_here, Phase.CONNECT)
        self._poll.unregister(self.listener.mesh.fd)

    def _not_here(self) -> list[str]:
        return [name for name in self.peers if name not in self.conns or not self.conns[name].introduced]

    def _call(self) -> None:
        """Greet and connect to whom I have to, as far as the kernel and their queues let me."""
        names, self._to_call = self._to_call, []
        unsaid, self._to_greet = self._to_greet, []
        self._call_at_s = time.monotonic() + _RETRY_S
        for conn in unsaid:
            self._greet(conn)
        claim = PeerClaim("mesh", self.me, (self.view.id.epoch, self.view.id.n), self.listener.run)
        for name in names:
            try:
                call = Call(self.addresses[name], self.listener.secret, name, claim, self.listener.tls)
            except (OSError, KeyError) as error:
                if isinstance(error, KeyError) or not passes(error):
                    raise PeersLost((name,)) from error
                self._to_call.append(name)
            else:
                self._calls[call.sock.fileno()] = call
                self._poll.register(call.sock.fileno(), call.events)

    def _connected(self, fd: int, call: Call) -> None:
        """The network has answered a call: there is a listener, or none."""
        try:
            call.connected()
        except OSError as error:
            if not passes(error):
                raise PeersLost((call.peer,)) from error
            self._hung_up(fd, call.sock, call.peer)
            return
        self._poll.modify(fd, call.events)

    def _answered(self, fd: int) -> None:
        """A listener that I called said something, or let go of me: its door was too crowded, or it has died."""
        call = self._calls[fd]
        if call.connecting:
            self._connected(fd, call)
            return
        try:
            if not call.proved():
                self._poll.modify(fd, call.events)
                return
        except WireRefusal as error:  # the peer is gone, and a stranger has taken its address; or certificates differ
            if error.remedy:
                self.listener.mesh.refuse(counted(error), call.peer)
            raise PeersLost((call.peer,)) from error
        except OSError:
            self._hung_up(fd, call.sock, call.peer)
            return
        del self._calls[fd]
        self._poll.unregister(fd)
        self._meet(Connection(call.sock, call.peer, _decoder, called=True, keys=call.keys))

    def _hung_up(self, fd: int, sock: socket.socket, name: str) -> None:
        """Try again: the peer's door lives or refuses, and that tells. `fd`: the number that `sock` had, for TLS may
        have closed it."""
        self._poll.unregister(fd)
        self._calls.pop(fd, None)
        sock.close()
        self._to_call.append(name)

    def _welcome(self, sock: socket.socket, claim: PeerClaim, keys: Keys) -> None:
        """A proved peer has come: for this view, for a newer one (it is kept for that), or for one that I have left,
        which it is told."""
        view = ViewId(*claim.number)
        conn = Connection(sock, claim.name, _decoder, keys=keys)
        if view > self.view.id:
            self.listener.early.append((sock, claim, keys))
        elif view == self.view.id and claim.name in self.peers:
            self._meet(conn)
        else:
            conn.send(Bye())
            conn.close()

    def _meet(self, conn: Connection) -> None:
        """Both ends are proved."""
        self.conns[conn.peer] = conn
        self._by_fd[conn.sock.fileno()] = conn
        self._poll.register(conn.sock.fileno(), select.POLLIN)
        self._greet(conn)

    def _greet(self, conn: Connection) -> None:
        """Say that I am in this view; later, where the kernel does not pass my region on just now."""
        if not conn.ended and not conn.send(Hi(), None if self.region is None else self.region.fd):
            self._to_greet.append(conn)

    # --- sending -------------------------------------------------------------------------------------------------
    def broadcast(self, message: Any) -> None:
        for name in self.peers:
            self.send(name, message)

    def send(self, name: str, message: Any) -> None:
        conn = self.conns.get(name)  # none while the mesh forms
        if conn is not None and name not in self._probe.muted:
            conn.send(message)
            if conn.pending and not conn.ended:  # goes on when there is room, though the peer may say nothing meanwhile
                self._poll.modify(conn.sock.fileno(), select.POLLIN | select.POLLOUT)

    # --- waiting -------------------------------------------------------------------------------------------------
    def collect(self, kind: type, step: int, bucket: int, phase: Phase, names: list[str] | None = None) -> Any:
        """Wait for one message of this kind from each of `names` (all peers): {member: message}."""
        began_s, box = time.monotonic(), self.boxes[kind, step, bucket]
        wanted = self.peers if names is None else names

        def missing() -> list[str]:
            absent = [name for name in wanted if name not in box]
            self._same_end(kind, step, absent)
            return absent

        self._wait(missing, phase)
        if kind is HeaderSaid:
            self.waits.headed(self._headed, began_s)
        return box

    def everyone(self, mine: T, phase: Phase) -> dict[str, T]:
        """Say `mine` to all, and wait for everybody's message of its kind and step: in the view's order, mine too."""
        self.broadcast(mine)
        box = self.collect(*_box_of(mine), phase)
        return {name: mine if name == self.me else box[name] for name in self.view.members}

    def _same_end(self, kind: type, step: int, absent: list[str]) -> None:
        """Who waits for the end of the run while others train on would wait for ever, and so would they."""
        if kind not in (Final, SumsReady):
            return
        other = SumsReady if kind is Final else Final
        differ = [name for name in absent if name in self.boxes.get((other, step, 0), ())]
        if differ:
            what = "train on" if kind is Final else "ended their loop"
            raise StepMisuse(
                f"replicas end their loops at different steps: {', '.join(differ)} {what} at step {step}",
                where=f"replica {self.me}",
                remedy="decide on `break` by what is equal everywhere, such as step.loss",
            )

    def until(self, done: Callable[[], bool], suspects: list[str], phase: Phase) -> None:
        """Wait for something that wakes `wake_fd`; `suspects` are named if it takes too long."""
        self._wait(lambda: [] if done() else suspects, phase)

    def has_all(self, kind: type, step: int, bucket: int, names: Sequence[str] | None = None) -> bool:
        """Whether `collect` would return at once. Reads what has arrived, never waits."""
        box, wanted = self.boxes[kind, step, bucket], self.peers if names is None else names
        if not box.keys() >= set(wanted):
            self._pump(0.0)
        return box.keys() >= set(wanted)

    def forget(self, step: int) -> None:
        """Drop what was collected for steps before `step`."""
        for key in [key for key in self.boxes if 0 <= key[1] < step]:
            del self.boxes[key]

    def _wait(self, missing: Callable[[], list[str]], phase: Phase) -> None:
        start = time.monotonic()
        patience, awaited_s = self._patience(phase), self._awaited_s(phase)
        told = said = start
        while absent := missing():
            self._check(absent)
            now = time.monotonic()
            if now - told >= patience:
                self._on_stall(phase, tuple(absent), now - start)
                told = now
            elif now - said >= awaited_s:
                self._on_awaited(tuple(absent))
                said = now
            self._pump(max(0.0, min(patience - (now - told), awaited_s - (now - said), 3600.0)))
            if PART_OF.get(phase) == "wait":
                self.waits.took(absent, time.monotonic() - now)

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
        timeout_s = min(timeout_s, _RETRY_S) if self._to_call or self._to_greet else timeout_s
        for fd, events in self._poll.poll(timeout_s * 1000.0):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd == self.listener.mesh.fd:
                for proved in self.listener.mesh.take():
                    self._welcome(*proved)
            elif fd in self._calls:
                self._answered(fd)
            else:
                self._read(fd, events)
        if (self._to_call or self._to_greet) and time.monotonic() >= self._call_at_s:
            self._call()

    def _read(self, fd: int, events: int) -> None:
        conn = self._by_fd[fd]
        if events & select.POLLOUT:
            conn.flush()
        for message in conn.read():
            self._dispatch(conn, message)
        if conn.forged:
            self.listener.mesh.refuse(FORGED, conn.peer)
        if conn.ended and not conn.introduced and conn.called and conn.peer not in self.left:
            del self._by_fd[fd], self.conns[conn.peer]
            self._hung_up(fd, conn.sock, conn.peer)
        elif conn.ended:
            self._poll.unregister(fd)
        else:
            self._poll.modify(fd, select.POLLIN | (select.POLLOUT if conn.pending else 0))

    def _dispatch(self, conn: Connection, message: Any) -> None:
        name = conn.peer
        if isinstance(message, Hi):
            self.answered.add(name)  # no ping reached who came after the pings
            conn.introduced = self.listener.keep_region(conn)
            if not conn.introduced:
                conn.send(SayAgain())
        elif isinstance(message, SayAgain):
            self._to_greet.append(conn)  # not at once: whoever lacks room lacks it for a moment
        elif isinstance(message, Bye):
            self.left.add(name)
        elif isinstance(message, Ping):
            self.send(name, Pong())
        elif isinstance(message, Pong):
            self.answered.add(name)
        elif isinstance(message, Key):
            self.keys.append(message)
        else:
            self.boxes[_box_of(message)][name] = message
            if isinstance(message, HeaderSaid):
                self._headed[name] = time.monotonic()

    def ping(self) -> None:
        """Ask every peer for a sign of life on this mesh; answers gather in `answered`. Who has not answered a call is
        called again: what was lost is one connection, and neither of two living members should go for it."""
        self.answered.clear()
        self.ping_wanted = False
        for fd, call in list(self._calls.items()):
            self._hung_up(fd, call.sock, call.peer)
        self.broadcast(Ping())

    def rest(self, timeout_s: float) -> None:
        """Nobody is waited for: read what arrives for at most `timeout_s`. Raises as a wait does."""
        self._check(self.peers)
        self._pump(timeout_s)

    # --- leaving -------------------------------------------------------------------------------------------------
    def close(self, goodbye: bool = True) -> None:
        """Leave the view; peers learn at once that it was no death."""
        self.waits.settle()
        for call in self._calls.values():
            call.sock.close()
        for conn in self.conns.values():
            if goodbye and not conn.ended:
                conn.send(Bye())
            conn.close()
        self._calls.clear()
        self.conns.clear()
