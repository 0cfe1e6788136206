"""A joiner's life: wait to be served, receive the snapshot, replay outcomes, be at most one step behind for ever.

Runs on the training thread of a process that is in no view. What it holds is complete at every moment: a state at a
step, and pieces of the next outcomes. What cannot be completed any more is thrown away and asked for again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from outlast.core.phases import Phase
from outlast.core.protocol import Member, ServeId, View
from outlast.errors import ViewAbandoned
from outlast.runtime.exchange.slots import OUTCOME
from outlast.runtime.host.environment import Environment
from outlast.runtime.joining._feeds import Share, Streams
from outlast.runtime.joining._idle_test import IdleTest
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.frozen import OutcomeShare, raw
from outlast.runtime.training.loop_state import Lived
from outlast.runtime.training.state import empty_like_encoded
from outlast.runtime.training.step_checks import Meta
from outlast.runtime.training.warm_memory import at_low_priority
from outlast.runtime.transport.connections import Arrivals
from outlast.runtime.view.port import CoordinatorLink

__all__ = ["Spare"]

_SILENT_S = 0.25  # for the end of a stream whose sender has died; on one machine it comes at once
_ENOUGH = 8  # outcomes, half of what may wait in a donor before it gives a joiner up


class _Pieces:
    """What has arrived of one step's outcome."""

    def __init__(self) -> None:
        self.meta: Meta | None = None
        self.slices: dict[tuple[int, int, int], memoryview] = {}
        self.last = False
        self.lived: Lived | None = None

    def covers(self, numels: list[int]) -> bool:
        have = [0] * len(numels)
        for bucket, lo, hi in self.slices:
            have[bucket] += hi - lo
        return self.meta is not None and self.lived is not None and have == numels


class Spare:
    """See the module."""

    def __init__(
        self,
        env: Environment,
        engine: Engine,
        link: CoordinatorLink,
        member: Member,
        lock: threading.RLock,
        enter: Callable[..., None],
        donors: Arrivals,
    ) -> None:
        self.engine, self.link, self.member, self.lock, self.enter = engine, link, member, lock, enter
        self.streams = Streams(donors, link.wake_fd)
        self._num_replicas = env.config.replicas
        self._touched = False
        self._test = IdleTest(engine.layout.device, link, env.me)
        self._grace_s = env.config.ack_s
        self._serve: ServeId = (0, 0)
        self._shares: list[tuple[ServeId, Share, memoryview]] = []
        self._steps: dict[int, _Pieces] = {}
        self._early: list[tuple[ServeId, OutcomeShare, memoryview]] = []  # of a serving that I was not told yet
        self._numels = [flat.numel() for flat in engine.incoming]
        self._orphaned_at = 0.0
        self._loaded = False
        self.applied: Callable[[], None] = lambda: None  # told of each outcome
        self._replayed = 0  # outcomes, since the state was loaded
        self.late = False  # the roll call is told of an outcome as if it were applied here

    def idle(self, timeout_s: float) -> None:
        """Wait for the coordinator's word; streams are read meanwhile."""
        self._take_in(min(timeout_s, 1.0))

    def follow(self) -> None:
        """One turn of following: take in what arrived, replay what is complete, say when caught up."""
        if self.member.serve_id != self._serve:
            self._restart()
        if self._loaded:
            self._take_in(1.0)
        else:  # nobody waits for me before I have a state, however large: who trains has the processor first
            at_low_priority(lambda: self._take_in(1.0))
        self._replay()
        self.enter(Phase.IDLE)
        if self.member.state == "ready":
            self._test.turn()
        self._give_up_if_orphaned()

    def _restart(self) -> None:
        """A new serving was ordered (or the old one called off)."""
        self.enter(Phase.JOIN_HELLO)
        self._serve = self.member.serve_id
        self.streams.keep(self._serve)
        self._shares = [row for row in self._shares if row[0] == self._serve]
        self._steps.clear()
        self._loaded = self.late = False
        self.engine.late = None
        self._orphaned_at = 0.0
        early, self._early = self._early, [row for row in self._early if row[0] > self._serve]
        for serve, head, payload in early:
            if serve == self._serve:
                self._keep(head, payload)

    def _touch(self) -> None:
        """My first step writes where no page is yet: ten thousand faults while all others wait. An undisturbed share's
        sums and a new member's slices, the last of all, are touched before."""
        engine, members = self.engine, self._num_replicas
        if not self._touched and engine.layout.device.type == "cpu":
            share = -(-engine.num_leaves // members)
            for slot in range(share.bit_length()):
                for flat in engine.memory.flats(OUTCOME + 1 + slot):
                    flat.zero_()
            for bucket, flat in zip(engine.layout.buckets, engine.memory.flats(OUTCOME), strict=True):
                flat[slice(*bucket.slices(members)[-1])].zero_()
        self._touched = True

    def _take_in(self, timeout_s: float) -> None:
        for stream, head, payload in self.streams.wait(timeout_s):
            if isinstance(head, Share):
                self.enter(Phase.JOIN_SNAPSHOT)
                self._shares.append((stream.serve, head, payload))
            elif isinstance(head, OutcomeShare) and stream.serve > self._serve:
                self._early.append((stream.serve, head, payload))
            elif isinstance(head, OutcomeShare):
                self._keep(head, payload)

    def _keep(self, head: OutcomeShare, payload: memoryview) -> None:
        if self._loaded and head.step < self.member.committed:
            return
        pieces = self._steps.setdefault(head.step, _Pieces())
        if head.whole:
            pieces.slices.clear()
        elif pieces.covers(self._numels):
            return
        pieces.meta = msgspec.msgpack.decode(head.meta, type=Meta)
        pieces.last |= head.last
        at = 0
        for bucket, lo, hi in head.slices:
            size = (hi - lo) * self.engine.incoming[bucket].element_size()
            pieces.slices[bucket, lo, hi] = payload[at : at + size]
            at += size
        if head.lived:
            rest = torch.frombuffer(payload[at:], dtype=torch.uint8) if len(payload) > at else raw(torch.empty(0))
            pieces.lived = Lived(head.step, head.lived, rest.clone())

    def _complete(self, step: int) -> _Pieces | None:
        """The step's outcome, if all of it has arrived."""
        pieces = self._steps.get(step)
        return pieces if pieces is not None and pieces.covers(self._numels) else None

    def _apply(self, pieces: _Pieces) -> None:
        """It takes its place in `out`; the one before, whose step no loop here will go through, is applied."""
        self.enter(Phase.JOIN_REPLAY)
        self.engine.settle(self.enter)
        for (bucket, lo, hi), data in pieces.slices.items():
            raw(self.engine.incoming[bucket][lo:hi]).copy_(torch.frombuffer(data, dtype=torch.uint8))
        assert pieces.meta is not None
        self.engine.hold(pieces.meta, pieces.lived)
        self.engine.loop.kept = pieces.lived
        self.applied()

    def _replay(self, late: bool = False) -> None:
        if not self._loaded:
            self._load()
            if not self._loaded:
                return
            self._take_in(0.0)  # donors went on meanwhile: what I knew of them is as old as the load is long
        replayed = self.member.committed
        while (pieces := self._complete(self.member.committed)) is not None:
            self._apply(pieces)
            self.late = late and pieces.last  # an older view's last step was not the last after all
            with self.lock:
                del self._steps[self.member.committed]
                self.member.replayed(self.member.committed + 1, keeps_output=not self.late)
            self._replayed += 1
            if self.late:
                return
        if self.member.committed > replayed:
            self.enter(Phase.JOIN_READY)  # what follows is a wait for others, however long they take
        if self._near() and self.member.state == "joining":
            self.enter(Phase.JOIN_READY)
            with self.lock:  # served anew meanwhile: what is here is of the serving that was called off
                mine = self.member.serve_id == self._serve
                answers = self.member.caught_up(self.member.committed) if mine else []
            self.link.send(answers)

    def _near(self) -> bool:
        """Whether I am at most a step behind: by what is here, and by what my donors still have for me. Where steps
        are so short that something is always on its way, that lasts a few steps only."""
        coming = any(stream.coming for stream in self.streams.incoming if not stream.ended)
        return len(self._steps) <= 1 and (not coming or self._replayed >= _ENOUGH)

    def _load(self) -> None:
        """The snapshot is complete when the shares tile the state."""
        rows = [(share, payload) for serve, share, payload in self._shares if serve == self._serve]
        shares = sorted(rows, key=lambda row: row[0].lo)
        if not shares or sum(s.hi - s.lo for s, _ in shares) != shares[0][0].total:
            return
        if len({s.committed for s, _ in shares}) > 1 or not any(s.plain for s, _ in shares):
            self._ask_again()
            return
        self.enter(Phase.JOIN_SCHEMA)
        plain = next(s.plain for s, _ in shares if s.plain)
        told = next((s.meta for s, _ in shares if s.meta), b"")
        meta = msgspec.msgpack.decode(told, type=Meta) if told else None
        self.engine.thaw(plain, at_low_priority(lambda: _assembled(plain, shares)), meta)
        with self.lock:
            self.member.replayed(shares[0][0].committed)
        at_low_priority(self._touch)
        self._shares.clear()
        self._loaded, self._replayed = True, 0

    def drain(self, view: View) -> None:
        """Before joining a view: everything that was sent up to it. Ends when each stream said so or ended; of who is
        not in the view also after a while, since his host may have fallen silent.

        The last outcome is left for `live`, as the loop goes through its step. Who is switched into the view by an
        order says so in the roll: then its members do not wait, in the first step, for gradients of this replica. With
        a robust rule rows decide in which views may be computed at all, so there it takes its share from the first."""
        self._touched = True  # from here on others may read what lies there
        late = self.member.switched and self.engine.robust is None
        until_s = time.monotonic() + (self._grace_s if self.member.switched else _SILENT_S)
        while waits_s := self._unsaid_s(view, until_s):
            if self.member.over(view.id):
                break
            self._take_in(waits_s)
            if self._loaded:  # at once: its members wait for what is left when the last has sent the last word
                self._replay(late)
        if self._loaded:
            self._replay(late)
        self.streams.keep(None)
        self._loaded = False
        self._steps.clear()
        self._serve = (0, 0)
        if self.member.over(view.id):
            raise ViewAbandoned("the view ended while the joiner caught up")

    def _unsaid_s(self, view: View, until_s: float) -> float:
        """How long to wait now for streams that may still bring something of before the view; 0: for none."""
        unsaid = [s for s in self.streams.incoming if not s.ended and (s.flushed is None or s.flushed < view.id)]
        if any(stream.member in view.members for stream in unsaid):
            return 1.0
        return max(0.0, until_s - time.monotonic()) if unsaid else 0.0

    def live(self) -> None:
        """The loop is in the step whose outcome was left for it: apply it."""
        self.enter(Phase.JOIN_REPLAY)
        self.engine.live(self.enter)
        late, self.late = self.late, False
        if late:
            with self.lock:
                self.member.caught_up_late()

    def _give_up_if_orphaned(self) -> None:
        """A stream that ended leaves a gap, unless a new view sends the outcome whole: then ask to be served anew."""
        if self.member.committed >= (self.member.until or math.inf):
            return  # the last step is here: nothing more comes, but an end, or a view should all its members die
        now = time.monotonic()
        behind = any(step > self.member.committed for step in self._steps)
        if not any(s.ended for s in self.streams.incoming) and not behind:
            self._orphaned_at = 0.0
        elif not self._orphaned_at:
            self._orphaned_at = now
        elif now - self._orphaned_at > self._grace_s:
            live = [s for s in self.streams.incoming if not s.ended]
            if behind or not live:
                self._ask_again()
            else:
                self.streams.incoming = live
                self._orphaned_at = 0.0

    def _ask_again(self) -> None:
        with self.lock:
            answers = self.member.rejoin()
        self.link.send(answers)
        if answers:  # else it was told a view, or to start again, meanwhile
            self._restart()

    def close(self) -> None:
        self.streams.close()


def _assembled(plain: bytes, shares: list[tuple[Share, memoryview]]) -> dict[str, torch.Tensor]:
    """The tensors of an encoded state, from shares that tile it."""
    tensors = empty_like_encoded(plain)
    views = [raw(tensor) for tensor in tensors.values()]
    for share, payload in shares:
        _scatter(views, share.lo, payload)
    return tensors


def _scatter(views: list[Any], lo: int, payload: memoryview) -> None:
    """Write bytes at offset `lo` of tensors laid end to end."""
    at, offset = 0, 0
    data = torch.frombuffer(payload, dtype=torch.uint8) if len(payload) else torch.empty(0, dtype=torch.uint8)
    for view in views:
        start, stop = max(lo, at), min(lo + len(payload), at + view.numel())
        if start < stop:
            offset = start - lo
            view[start - at : stop - at].copy_(data[offset : offset + stop - start])
        at += view.numel()
