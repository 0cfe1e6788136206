"""What one rank of a joining replica receives: shares of a state, and the outcomes of the steps since.

What it holds is complete at every moment: a state at a step, and pieces of the next outcomes. It decides nothing: when
the state is loaded and which outcome is next is said by who uses it, the lead's `joiner.py` or, on the other ranks,
what the lead says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from outlast.core.phases import Phase
from outlast.core.protocol import ServeId, View
from outlast.core.protocol.step.catching_up import counts, tiled, unsaid_s
from outlast.runtime.exchange.slots import OUTCOME
from outlast.runtime.joining._feeds import Share, Streams
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.frozen import OutcomeShare, raw
from outlast.runtime.training.loop_state import Lived
from outlast.runtime.training.state import empty_like_encoded
from outlast.runtime.training.step_checks import Meta
from outlast.runtime.training.warm_memory import at_low_priority
from outlast.runtime.transport.connections import Arrivals

__all__ = ["NOTHING", "Inflow", "Pieces"]

NOTHING: ServeId = (0, 0)


class Pieces:
    """What has arrived of one step's outcome."""

    def __init__(self) -> None:
        self.meta: Meta | None = None
        self.slices: dict[tuple[int, int, int], memoryview] = {}
        self.last = False
        self.lived: Lived | None = None

    def covers(self, numels: list[int]) -> bool:
        if self.meta is None or self.lived is None:
            return False
        spans: list[list[tuple[int, int]]] = [[] for _ in numels]
        for bucket, lo, hi in self.slices:
            spans[bucket].append((lo, hi))
        return all(tiled(of, numel) for of, numel in zip(spans, numels, strict=True))


class Inflow:
    """Holds what one rank of a joining replica has received. `committed`: steps in the state that was loaded;
    `serving`: the attempt that counts."""

    def __init__(
        self, engine: Engine, enter: Callable[..., None], donors: Arrivals, wake_fd: int, num_replicas: int
    ) -> None:
        self.engine, self.enter, self._num_replicas = engine, enter, num_replicas
        self.streams = Streams(donors, wake_fd)
        self.serving = self._newest = NOTHING
        self.shares: list[tuple[ServeId, Share, memoryview]] = []
        self.steps: dict[int, Pieces] = {}
        self.loaded = self.touched = False
        self.committed = 0
        self._early: list[tuple[ServeId, OutcomeShare, memoryview]] = []  # of a serving that I was not told yet
        self._numels = [flat.numel() for flat in engine.incoming]

    def serve(self, serving: ServeId) -> None:
        """A new serving was ordered, or the old one called off."""
        self.enter(Phase.JOIN_HELLO)
        newest, self._newest = self._newest, max(self._newest, serving)
        self.serving = serving
        self.streams.keep(lambda serve: counts(serve, serving, newest))
        self.shares = [row for row in self.shares if counts(row[0], serving, newest)]
        self.steps.clear()
        self.loaded = False
        self.engine.late = None
        early, self._early = self._early, [row for row in self._early if row[0] > serving]
        for serve, head, payload in early:
            if serve == serving:
                self._keep(head, payload)

    def take_in(self, timeout_s: float) -> None:
        """What arrives, after waiting at most so long for the first of it."""
        for stream, head, payload in self.streams.wait(timeout_s):
            if isinstance(head, Share):
                self.enter(Phase.JOIN_SNAPSHOT)
                self.shares.append((stream.serve, head, payload))
            elif isinstance(head, OutcomeShare) and stream.serve > self.serving:
                self._early.append((stream.serve, head, payload))
            elif isinstance(head, OutcomeShare):
                self._keep(head, payload)

    def _keep(self, head: OutcomeShare, payload: memoryview) -> None:
        if self.loaded and head.step < self.committed:
            return
        pieces = self.steps.setdefault(head.step, Pieces())
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

    def complete(self, step: int) -> Pieces | None:
        """The step's outcome, if all of it has arrived."""
        pieces = self.steps.get(step)
        return pieces if pieces is not None and pieces.covers(self._numels) else None

    def until(self, step: int) -> int:
        """The first step from this one on whose outcome is not complete."""
        while self.complete(step) is not None:
            step += 1
        return step

    def apply(self, step: int) -> None:
        """Its outcome takes its place in `out`; the one before, whose step no loop here will go through, is applied."""
        self.enter(Phase.JOIN_REPLAY)
        pieces = self.steps.pop(step)
        self.engine.settle(self.enter)
        for (bucket, lo, hi), data in pieces.slices.items():
            raw(self.engine.incoming[bucket][lo:hi]).copy_(torch.frombuffer(data, dtype=torch.uint8))
        assert pieces.meta is not None
        self.engine.hold(pieces.meta, pieces.lived)
        self.engine.loop.kept = pieces.lived
        self.committed = step + 1

    def tiles(self) -> list[tuple[Share, memoryview]]:
        """The shares, by place, if they tile the state; else nothing."""
        rows = [(share, payload) for serve, share, payload in self.shares if serve == self.serving]
        shares = sorted(rows, key=lambda row: row[0].lo)
        whole = bool(shares) and tiled(((s.lo, s.hi) for s, _ in shares), shares[0][0].total)
        return shares if whole else []

    @staticmethod
    def fit(shares: list[tuple[Share, memoryview]]) -> bool:
        """Whether shares that tile the state are of one step, and say what it is."""
        return len({s.committed for s, _ in shares}) == 1 and any(s.plain for s, _ in shares)

    def load(self, shares: list[tuple[Share, memoryview]]) -> None:
        """Become the state that these shares tile."""
        self.enter(Phase.JOIN_SCHEMA)
        plain = next(s.plain for s, _ in shares if s.plain)
        told, given = next(((s.meta, s.given) for s, _ in shares if s.meta), (b"", b""))
        meta = msgspec.msgpack.decode(told, type=Meta) if told else None
        self.engine.thaw(plain, at_low_priority(lambda: _assembled(plain, shares)), meta, given)
        self.committed = shares[0][0].committed
        at_low_priority(self._touch)
        self.shares = [row for row in self.shares if row[0] != self.serving]  # of one that is not told yet: kept
        self.loaded = True

    def _touch(self) -> None:
        """My first step writes where no page is yet: ten thousand faults while all others wait. An undisturbed share's
        sums and a new member's slices, the last of all, are touched before."""
        engine, members = self.engine, self._num_replicas
        if not self.touched and engine.layout.device.type == "cpu":
            share = -(-engine.num_leaves // members)
            for slot in range(share.bit_length()):
                for flat in engine.memory.flats(OUTCOME + 1 + slot):
                    flat.zero_()
            for bucket, flat in zip(engine.layout.buckets, engine.memory.flats(OUTCOME), strict=True):
                flat[slice(*bucket.slices(members)[-1])].zero_()
        self.touched = True

    def unsaid_s(self, view: View, until_s: float) -> float:
        """How long to wait now for streams that may still bring something of before the view; 0: for none."""
        return unsaid_s(self.streams.incoming, view, until_s, time.monotonic())

    def over(self) -> None:
        """What came is in the state, or of no use."""
        self.streams.keep(lambda _: False)
        self.loaded = False
        self.steps.clear()
        self.serving = NOTHING


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
