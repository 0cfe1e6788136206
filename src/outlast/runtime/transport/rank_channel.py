"""The streams between the ranks of one replica, for the words of `rank_words.py`.

Role: one proved unix stream between the lead and each of the others, read by a thread at either end, so that nobody
waits in a send and whoever loses the other end ends at once: a replica lives and dies as a whole (protocol, 38). The
lead alone is a member of the run. What the words mean is `member/_siblings.py`'s and `member/follower.py`'s matter.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from outlast.checkpoint.threads import begin
from outlast.core.protocol import ViewId
from outlast.core.protocol.data_messages import DataNoted
from outlast.errors import MembershipError, WireRefusal
from outlast.runtime.transport.calls import reach
from outlast.runtime.transport.door import Door
from outlast.runtime.transport.frames import frame, read_frame
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.rank_path_words import LaneAnswers, LaneStalled, ProbeLane
from outlast.runtime.transport.rank_words import (
    DECODER,
    AreYouThere,
    EndRun,
    HereIAm,
    LaneHas,
    RankFailed,
    RankLeft,
    SavesHear,
    SavesSay,
    ViewOver,
)
from outlast.runtime.transport.seal import Keys

__all__ = ["RankPipe", "call_lead", "meet_ranks"]

T = TypeVar("T")
_RETRY_S = 0.02
_PATIENCE_S = 30  # for one call of the lead
_LOOK_S = 1.0  # one wait for the others: a lead that was stopped for longer has waited for so long
_LOST = MembershipError.exit_code  # of a rank that ends because another one has


class RankPipe:
    """One end of a stream between two ranks. `wake_fd` becomes readable when something has arrived; `over`: the other
    end may go; until then its loss ends this process."""

    def __init__(self, sock: socket.socket, place: int) -> None:
        sock.settimeout(None)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a microbatch takes as long as it takes
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
        self._sock, self.place, self.over, self.left = sock, place, False, False
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.wakes_too = -1  # another descriptor to write to
        self.inbox: deque[Any] = deque()
        self._answered = threading.Event()
        self.failed: RankFailed | None = None  # what the other end's script raised
        self._sending = threading.Lock()  # the coordinator's words are passed on by the thread that hears them
        self.view_over = ViewId(0, 0)  # at the other ranks: every view up to this one is
        self.to_probe = ViewId(0, 0)  # at the other ranks: the view in whose lane all are to be pinged
        self.on_failed: Callable[[RankFailed], None] = lambda failed: None
        self.on_path: Callable[[LaneStalled | LaneAnswers], None] = lambda said: None
        self.on_noted: Callable[[DataNoted], None] = lambda noted: None
        self.on_has: Callable[[LaneHas], None] = lambda has: None
        self.on_saves: Callable[[Any], None] = lambda said: None  # `SavesSay`, or (at the other end) `SavesHear`
        self._thread = threading.Thread(target=self._read, name=f"outlast-rank-{place}", daemon=True)
        begin(self._thread)

    def send(self, word: Any) -> None:
        """The other end's thread always reads. What cannot be sent is for one that is gone, as its end will tell."""
        with contextlib.suppress(OSError), self._sending:
            self._sock.sendall(frame(word))

    def ask_presence(self) -> None:
        """Begin to find out whether the other end lives: see `present`."""
        self._answered.clear()
        if self.failed is not None:
            self._answered.set()
        self.send(AreYouThere())

    def present(self, timeout_s: float) -> bool:
        """Whether the other end has answered `ask_presence`. Its loss ends this process meanwhile."""
        return self._answered.wait(timeout_s)

    def take(self) -> Any:
        """The next word, or None. Never waits."""
        return self.inbox.popleft() if self.inbox else None

    def wait_for(self, kind: type[T]) -> T:
        """The next word, which is of this kind. The other end's loss ends this process meanwhile."""
        while (word := self.take()) is None:
            _readable(self.wake_fd, 1.0)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.wake_fd)
        if not isinstance(word, kind):
            raise MembershipError(
                f"the lead said {type(word).__name__} where {kind.__name__} was due",
                where=f"rank {self.place}",
                did="this rank ends",
                remedy="call run.mesh() on every rank, before protect()",
            )
        return word

    def _read(self) -> None:
        try:
            while True:
                word = DECODER.decode(read_frame(self._sock))
                self.left = self.left or isinstance(word, RankLeft)
                self.over = self.over or isinstance(word, EndRun | RankLeft)
                if isinstance(word, RankFailed):
                    self.failed = word
                    self._answered.set()  # it lived to say so, and this thread may now wait for the other ranks
                    self.on_failed(word)
                if isinstance(word, LaneStalled | LaneAnswers):  # no part of the order of the others, as the next two
                    self.on_path(word)
                    continue
                if isinstance(word, DataNoted):
                    self.on_noted(word)
                    continue
                if isinstance(word, AreYouThere):
                    self.send(HereIAm())
                    continue
                if isinstance(word, HereIAm):
                    self._answered.set()
                    continue
                if isinstance(word, SavesSay | SavesHear):
                    self.on_saves(word)
                    continue
                if isinstance(word, LaneHas):
                    self.on_has(word)
                elif isinstance(word, ViewOver):
                    self.view_over = max(self.view_over, word.view)
                elif isinstance(word, ProbeLane):
                    self.to_probe = word.view
                else:
                    self.inbox.append(word)
                for fd in (self.wake_fd, self.wakes_too):
                    if fd >= 0:
                        os.eventfd_write(fd, 1)
        except (OSError, WireRefusal, msgspec.DecodeError):
            if not self.over:  # a replica without one of its ranks is none: nobody waits in a collective for it
                os._exit(_LOST)


def _address(secret: bytes, run: str, member: str) -> str:
    """Known to the ranks of this replica alone, so nobody takes it beforehand, and two runs do not meet."""
    return "outlast/ranks/" + hmac.digest(secret, f"ranks of {member} in {run}".encode(), "sha256").hex()[:32]


def meet_ranks(secret: bytes, run: str, member: str, width: int, patience_s: float) -> list[RankPipe]:
    """The lead's end: wait for all other ranks. Raises MembershipError if they do not come while this process runs."""
    found: dict[int, RankPipe] = {}
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + _address(secret, run, member))
    sock.listen(64)

    def admit(other: socket.socket, claim: PeerClaim, keys: Keys) -> None:
        place = claim.number[0]
        mine = claim.role == "rank" and claim.run == run and claim.name == member
        if not mine or not 0 < place < width or place in found:
            other.close()
        else:
            other.setblocking(True)
            found[place] = RankPipe(other, place)

    door, left_s = Door(sock, secret, member, admit, lambda reason, who: None), patience_s
    try:
        while len(found) < width - 1:
            began_s = time.monotonic()
            if left_s <= 0:
                missing = ", ".join(str(place) for place in range(1, width) if place not in found)
                raise MembershipError(
                    f"rank {missing} of this replica did not come in {patience_s:g} s",
                    where=f"replica {member}",
                    did="it ends",
                    remedy="every rank must call outlast.join(); their output is in the run's logs",
                )
            _readable(door.fileno(), min(left_s, door.patience_s, _LOOK_S))
            door.turn()
            left_s -= min(time.monotonic() - began_s, _LOOK_S)
    finally:
        door.close()
    return [found[place] for place in sorted(found)]


def call_lead(secret: bytes, run: str, member: str, place: int, patience_s: float) -> RankPipe:
    """Another rank's end. Raises MembershipError if the lead does not answer while this process runs."""
    left_s, never = patience_s, threading.Event()
    while True:
        began_s = time.monotonic()
        try:
            claim = PeerClaim("rank", member, (place, 0), run)
            return RankPipe(reach(_address(secret, run, member), secret, member, claim, _PATIENCE_S), place)
        except (OSError, WireRefusal) as error:  # it is still on its way to `join`
            if left_s <= 0:
                raise MembershipError(
                    f"the lead rank of {member} did not answer in {patience_s:g} s",
                    where=f"rank {place}",
                    did="this rank ends",
                    remedy="every rank must call outlast.join()",
                ) from error
        never.wait(_RETRY_S)
        left_s -= min(time.monotonic() - began_s, _PATIENCE_S)  # whoever was stopped in it calls once more at least


def _readable(fd: int, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(max(0.0, timeout_s) * 1000.0)
