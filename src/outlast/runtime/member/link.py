"""A member's connection to the coordinator: one thread that listens, answers, beats and reconnects.

It runs while user code holds the training thread, so a notice is acknowledged at once; the shared `Member` is touched
under one lock, and the training thread is woken through an eventfd. A healthy step sends nothing here but heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable

import msgspec

from outlast.checkpoint.threads import begin
from outlast.core.protocol import Member, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.host_messages import Awaited
from outlast.errors import ProtocolViolation, WireRefusal
from outlast.runtime.transport import save_messages as saving
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.descriptors import closed_with
from outlast.runtime.transport.frames import SILENT_BEATS, Heartbeat, HeartbeatReply, Link
from outlast.runtime.transport.seal import FORGED
from outlast.runtime.transport.tls import Tls
from outlast.runtime.transport.tls_socket import counted

__all__ = ["MemberLink", "SoloLink"]

_decoder: msgspec.msgpack.Decoder[m.FromCoordinator | HeartbeatReply | saving.ToMember] = msgspec.msgpack.Decoder(
    m.FromCoordinator | HeartbeatReply | saving.ToMember
)

_LOOK_S = 0.1  # between two looks at where the coordinator is, where it can move
_ELSEWHERE_S = 1.0  # for one connection then: its host may be gone


class MemberLink:
    """Speaks with the coordinator for a member, on a thread of its own. `hello()` and `beat(again)` make the messages;
    `asked(probe)` is called on a Probe, `refused(reason)` when the two do not take each other."""

    def __init__(
        self,
        place: CoordinatorPlace,
        secret: bytes,
        member: Member,
        lock: threading.RLock,
        *,
        hello: Callable[[], m.Hello],
        beat: Callable[[bool], Heartbeat],
        asked: Callable[[m.ProbePaths], None],
        heartbeat_s: float,
        lease_s: float,
        run: str = "",
        refused: Callable[[str], None] = lambda reason: None,
        tls: Tls | None = None,
    ) -> None:
        self._place, self._secret, self.member, self.lock = place, secret, member, lock
        self._at = place.now()
        self._run_id, self._tls = run, tls
        self._complained: set[str] = set()
        self._hello, self._beat, self._asked, self._refused = hello, beat, asked, refused
        self._heartbeat_s, self._lease_s = heartbeat_s, lease_s
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.sent = 0  # messages besides heartbeats
        self.on_save: Callable[[saving.ToMember], None] = lambda message: None
        self.on_told: Callable[[], None] = lambda: None  # after each word of the coordinator to the member
        self.repeat: Callable[[], Iterable[saving.FromMember]] = tuple  # said again after each reconnection
        self._link: Link | None = None
        self._leaving_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-link", daemon=True)

    def start(self) -> None:
        """RuntimeError: there is no thread for it."""
        begin(self._thread)

    def send(self, messages: Iterable[m.ToCoordinator | saving.FromMember | Awaited]) -> None:
        """Best effort: what is lost with a connection is said again by Hello."""
        for message in messages:
            with contextlib.suppress(OSError), self.lock:  # before Hello is made, or after: never while it is said
                self.sent += 1
                if self._link is not None:
                    self._link.send(message)

    def beat(self) -> None:
        """A heartbeat now: the last words before the end carry the last losses."""
        link = self._link
        if link is not None:
            beat = self._beat(False)
            with contextlib.suppress(OSError), self.lock:
                link.send(beat)

    def leave(self) -> None:
        """I was asked to go. From a signal's handler: whatever it interrupts may hold any lock, also the one under
        which threads are started."""
        self.member.leave()
        os.eventfd_write(self._leaving_fd, 1)

    def wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def forget_saves(self) -> None:
        """Nobody is there any more to hear of checkpoints, or to speak of them."""
        self.on_save, self.repeat = lambda message: None, tuple

    def close(self) -> None:
        self._over.set()
        if self._link is not None:
            self._link.close()

    # --- the thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._talk()
        except Exception:  # noqa: BLE001 - the boundary: without this thread the replica would hang unseen
            if self._over.is_set():  # `close` took the connection away under it
                return
            traceback.print_exc()
            os._exit(ProtocolViolation.exit_code)

    def _talk(self) -> None:
        pause_s = 0.02
        while not self._over.is_set():
            try:
                self._at = self._place.now()
                limit_s = _ELSEWHERE_S if self._place.moves else 5.0
                link = Link(self._at, self._secret, "member", self.member.me, limit_s, self._run_id, self._tls)
                pause_s = 0.02
                self._converse(link)
            except (OSError, msgspec.DecodeError):
                self._link = None
            except WireRefusal as error:
                self._link = None
                if error.message == FORGED or error.remedy:
                    self._refused(counted(error))
                if error.remedy and error.message not in self._complained:
                    self._complained.add(error.message)
                    print(f"outlast: the coordinator: {error}", file=sys.stderr, flush=True)
            self._over.wait(pause_s * (0.5 + random.random()))
            pause_s = min(_LOOK_S if self._place.moves else 1.0, pause_s * 2)

    def _converse(self, link: Link) -> None:
        with self.lock:
            link.send(self._hello())
            for message in self.repeat():
                link.send(message)
            self._link = link
        try:
            poll = select.poll()
            poll.register(link.sock.fileno(), select.POLLIN)
            poll.register(self._leaving_fd, select.POLLIN)
            next_beat, heard_s, first = 0.0, time.monotonic(), True
            while not self._over.is_set():
                now = time.monotonic()
                if now >= next_beat:
                    beat = self._beat(first)  # the first to a coordinator says again what it may never have heard
                    first = False
                    with self.lock:
                        link.send(beat)
                    next_beat = now + self._heartbeat_s
                wait_s = max(0.0, next_beat - now)
                ready = {fd for fd, _ in poll.poll(1000.0 * (min(wait_s, _LOOK_S) if self._place.moves else wait_s))}
                if self._place.now() != self._at:  # the host of the one that I knew may not even end its connections
                    raise ConnectionError("the coordinator is elsewhere now")
                if self._leaving_fd in ready:
                    os.eventfd_read(self._leaving_fd)
                    self.beat()  # if all are asked to go, the coordinator hears no more of what was done
                    self.send(self.member.leave())
                if ready - {self._leaving_fd}:
                    self._receive(link)
                    while link.more:
                        self._receive(link)
                    heard_s = time.monotonic()
                elif now - heard_s > SILENT_BEATS * self._heartbeat_s:
                    raise ConnectionError("no heartbeat was answered")
        finally:
            self._link = None
            link.close()

    def _receive(self, link: Link) -> None:
        message = link.receive(_decoder)
        if isinstance(message, HeartbeatReply):
            lapsed = time.monotonic() > self.member.lease_until_s
            if self.member.answered(message.epoch, message.sent_s + self._lease_s) and lapsed:
                self.wake()
            return
        if isinstance(message, m.ProbePaths):
            self._asked(message)
        elif isinstance(message, saving.TO_MEMBER):
            self.on_save(message)
        else:
            with self.lock:
                for answer in self.member.told(message):
                    self.sent += 1
                    link.send(answer)
            self.on_told()
        self.wake()


class SoloLink:
    """A fleet of one: the view that a coordinator would install, and nobody to talk to."""

    def __init__(self, member: Member, lock: threading.RLock) -> None:
        self.member, self.lock = member, lock
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._forget_fd = closed_with(self, self.wake_fd)
        self.sent = 0
        self.on_told: Callable[[], None] = lambda: None

    def start(self) -> None:
        with self.lock:
            view = View(id=ViewId(1, 1), members=(self.member.me,), start=True)
            self.member.told(m.Install(view=view))

    def send(self, messages: Iterable[m.ToCoordinator | Awaited]) -> None:
        """What a coordinator would answer, and what it would write down."""
        for message in messages:
            if isinstance(message, m.Done):
                with self.lock:
                    self.member.told(m.Close(epoch=1, reason="finished"))
            elif isinstance(message, m.Judged):
                verdict = message.verdict
                said = f"step {message.step}: {verdict.action}: {verdict.evidence} ({verdict.remedy})"
                print(f"outlast: {said}", file=sys.stderr, flush=True)
            elif isinstance(message, m.DataNoted) and message.what == "skipped":
                said = f"{message.text}: skipped from here on ({message.total} of {message.allowed} that may be)"
                print(f"outlast: step {message.step}: {said}", file=sys.stderr, flush=True)

    def beat(self) -> None:
        """Nobody listens."""

    def leave(self) -> None:
        """Nobody to ask."""

    def wake(self) -> None:
        if self._forget_fd.alive:
            os.eventfd_write(self.wake_fd, 1)

    def forget_saves(self) -> None:
        """Nobody spoke of any."""

    def close(self) -> None:
        """Nobody waits for anything any more."""
        self._forget_fd()
