"""How slices travel inside one c10d group: point to point (Gloo), or in one all-to-all (NCCL).

Point to point costs a third of Gloo's own collectives for small buckets, needs no packing and no padding, and what is
received lies where it is wanted. The caller never waits in here: two threads a group do, one for what is scattered and
one for what is gathered, and wake it through an eventfd. What a transfer may still write stays alive, by its `Pending`,
until the group is gone (protocol, 14). Not here: what is sent when, and what follows from it (`c10d_plane.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllToAllOptions

from outlast.checkpoint.threads import begin
from outlast.errors import ViewAbandoned

__all__ = ["Collectives", "Pending", "Points", "Wires"]

_SCATTER, _GATHER, _HAND_OVER, _NEVER = range(4)
_AT_LEAST = 2  # buckets that are received at the same time, however large
_LET_GO_S = 1.0  # for transfers to end once their connections are cut


class Pending:
    """Tensors under way. `done` is set when all have come, or when one cannot; `parts`: what was scattered to me, by
    member. `queued`: work of NCCL's is done when its kernel is queued, so the caller's stream must wait for it too."""

    def __init__(self, parts: Sequence[list[Tensor]] = (), held: Sequence[Tensor] = (), queued: bool = False) -> None:
        self.parts, self.held, self.queued = list(parts), list(held), queued
        self.works: list[Any] = []
        self.done = threading.Event()
        self.trouble = ""
        self.storage: Tensor | None = None  # from the pool

    @property
    def complete(self) -> bool:
        """Nothing writes any more."""
        return self.done.is_set() and not self.trouble

    def wait(self) -> None:
        """On a thread of the group's. Work that failed is kept, as are its buffers: the rest may still write."""
        try:
            for work in self.works:
                work.wait()
        except Exception as error:  # noqa: BLE001  whatever it is: the thread has others to wait for
            self.fail(error)
        else:
            self.works = self.works if self.queued else []

    def fail(self, error: Exception) -> None:
        """It will never be complete."""
        self.trouble = (str(error) or type(error).__name__).splitlines()[0]

    def result(self) -> list[list[Tensor]]:
        """`parts`, complete. ViewAbandoned if a transfer failed: some member left or died."""
        if self.trouble:
            raise ViewAbandoned(f"a transfer failed: {self.trouble}")
        for work in self.works if self.queued and self.done.is_set() else ():
            work.wait()
        return self.parts


class Wires:
    """A group, and the threads that wait for it. `tags`: an upper bound of bucket numbers."""

    def __init__(self, group: Any, index: int, num_members: int, wake_fd: int, tags: int) -> None:
        self.index, self.num_members, self.tags = index, num_members, tags
        self._group, self._wake_fd = group, wake_fd
        self._under_way: list[Pending] = []
        self._lanes = [SimpleQueue[Pending | None]() for _ in (_SCATTER, _GATHER)]
        self._threads = [threading.Thread(target=self._watch, args=(lane,), daemon=True) for lane in self._lanes]
        for thread in self._threads:
            thread.name = "outlast-wires"
            begin(thread)

    def _watch(self, lane: SimpleQueue[Pending | None]) -> None:
        while (pending := lane.get()) is not None:
            pending.wait()
            self._finished(pending)

    def _finished(self, pending: Pending) -> None:
        pending.done.set()
        os.eventfd_write(self._wake_fd, 1)

    def begin(self) -> None:
        """A new step: what is complete is forgotten."""
        self._under_way = [pending for pending in self._under_way if not pending.complete]

    def send(self, tensor: Tensor, to: int, number: int) -> Pending:
        """Hand a tensor over."""
        return self._single(lambda tag: self._group.send([tensor], to, tag), tensor, number)

    def receive(self, tensor: Tensor, source: int, number: int) -> Pending:
        """Take a tensor that `source` hands over."""
        return self._single(lambda tag: self._group.recv([tensor], source, tag), tensor, number)

    def _single(self, start: Callable[[int], Any], tensor: Tensor, number: int) -> Pending:
        pending = self._keep(Pending(held=[tensor]))
        self._start(pending, [start], self._tag(_HAND_OVER, number))
        self._expect(pending, _SCATTER)
        return pending

    def _keep(self, pending: Pending) -> Pending:
        self._under_way.append(pending)
        return pending

    def _tag(self, kind: int, number: int) -> int:
        return kind * self.tags + number

    def _start(self, pending: Pending, starts: Sequence[Callable[[int], Any]], tag: int) -> None:
        """What cannot be started has failed, and says so where it is waited for: never here, under a backward, where
        nobody would know what else is under way."""
        try:
            for start in starts:
                pending.works.append(start(tag))
        except RuntimeError as error:
            pending.fail(error)

    def _expect(self, pending: Pending, lane: int) -> None:
        if pending.works and not pending.trouble:
            self._lanes[lane].put(pending)
        else:
            self._finished(pending)

    # --- the end -------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Never waits: a destructor may, so a thread runs it."""
        # not a daemon: a group that is torn down while the interpreter exits ends the process with an abort
        try:
            begin(threading.Thread(target=self._drop, name="outlast-drop"))
        except (RuntimeError, MemoryError):
            # from Python 3.12 no thread begins once the interpreter ends; then nobody is kept waiting
            self._drop()

    def _drop(self) -> None:
        """Who waits for a send whose connection broke at the wrong moment is woken by nothing but the group's timeout
        (Gloo loses it). The process may end before that; until then the group lives on in the thread that waits."""
        self._cut()
        for lane in self._lanes:
            lane.put(None)
        until_s = time.monotonic() + _LET_GO_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._group = None
            self._under_way.clear()

    def _cut(self) -> None:
        """End what is under way, here and at the peers."""


class Points(Wires):
    """Gloo. Every piece is a message of its own; what I keep for myself is not copied. At most `ahead_bytes` (or two
    buckets) are received at the same time: peers hold the rest back, in sums that live until the step is committed."""

    def __init__(
        self, group: Any, index: int, num_members: int, wake_fd: int, tags: int, ahead_bytes: float = float("inf")
    ) -> None:
        super().__init__(group, index, num_members, wake_fd, tags)
        self._ahead_bytes, self._taken_bytes, self._num_taken = ahead_bytes, 0, 0
        self._pool: list[Tensor] = []
        self._wanted: deque[tuple[int, Pending, list[list[int]], torch.dtype]] = deque()
        self._sends: dict[int, Pending] = {}

    def begin(self) -> None:
        """Does what every group does; sends that nobody waited for were received, for every header had come."""
        super().begin()
        self._sends.clear()

    def scatter(self, bucket: int, pieces: list[list[Tensor]], sizes: list[list[int]], dtype: torch.dtype) -> Pending:
        """Send each member its pieces, and receive pieces of these numbers of elements from each."""
        pending = self._keep(Pending())
        sends = Pending(held=[piece for row in pieces for piece in row])
        starts = [self._sender(piece, to) for to in self._others() for piece in pieces[to] if len(piece)]
        pending.parts = [row if i == self.index else [] for i, row in enumerate(pieces)]
        self._wanted.append((bucket, pending, sizes, dtype))
        self._receive_more()
        self._start(sends, starts, self._tag(_SCATTER, bucket))
        self._sends[bucket] = sends
        return pending

    def _others(self) -> list[int]:
        """Beginning with the next one, so that not everybody sends to the same."""
        return [(self.index + i) % self.num_members for i in range(1, self.num_members)]

    def _sender(self, tensor: Tensor, to: int) -> Callable[[int], Any]:
        return lambda tag: self._group.send([tensor], to, tag)

    def _receiver(self, tensor: Tensor, source: int) -> Callable[[int], Any]:
        return lambda tag: self._group.recv([tensor], source, tag)

    def _receive_more(self) -> None:
        while self._wanted and (self._num_taken < _AT_LEAST or self._taken_bytes < self._ahead_bytes):
            bucket, pending, sizes, dtype = self._wanted.popleft()
            flat = self._take(pending, sum(sum(sizes[i]) for i in self._others()) * dtype.itemsize).view(dtype)
            starts = []
            for source in self._others():
                *pieces, flat = torch.split(flat, [*sizes[source], len(flat) - sum(sizes[source])])
                pending.parts[source] = pieces
                starts += [self._receiver(piece, source) for piece in pieces if len(piece)]
            self._start(pending, starts, self._tag(_SCATTER, bucket))
            self._expect(pending, _SCATTER)

    def _take(self, pending: Pending, size: int) -> Tensor:
        """The smallest buffer of the pool that is large enough, or a new one in place of one that is not."""
        fits = [i for i, spare in enumerate(self._pool) if len(spare) >= size]
        best = min(fits, key=lambda i: len(self._pool[i]), default=None)
        if best is None and self._pool:
            self._pool.pop()
        storage = self._pool.pop(best) if best is not None else torch.empty(size, dtype=torch.uint8)
        pending.storage, self._num_taken = storage, self._num_taken + 1
        self._taken_bytes += len(storage)
        return storage[:size]

    def release(self, pending: Pending) -> None:
        """What was scattered to me is read: its memory serves another bucket."""
        if pending.storage is not None and pending.complete:
            self._num_taken -= 1
            self._taken_bytes -= len(pending.storage)
            self._pool.append(pending.storage)
            pending.storage, pending.parts = None, []
            self._receive_more()

    def gather(self, bucket: int, whole: Tensor, ranges: Sequence[tuple[int, int]]) -> Pending:
        """Send my range of `whole` to everybody, and receive the others' into it."""
        slices = [whole[lo:hi] for lo, hi in ranges]
        sends = [(slices[self.index], to) for to in self._others()]
        return self.bring(bucket, [(slices[i], i) for i in self._others()], sends)

    def bring(
        self, bucket: int, receives: Sequence[tuple[Tensor, int]], sends: Sequence[tuple[Tensor, int]]
    ) -> Pending:
        """Receive each of these from a member and send each of those to one: the end of a bucket."""
        pending = self._keep(Pending(held=[tensor for tensor, _ in (*receives, *sends)]))
        starts = [self._receiver(tensor, source) for tensor, source in receives if len(tensor)]
        starts += [self._sender(tensor, to) for tensor, to in sends if len(tensor)]
        self._start(pending, starts, self._tag(_GATHER, bucket))
        scattered = self._sends.pop(bucket, None)
        if scattered is not None:
            pending.works += scattered.works
            pending.trouble = pending.trouble or scattered.trouble
        self._expect(pending, _GATHER)
        return pending

    def _cut(self) -> None:
        """Gloo's `abort` does nothing, but a wait that runs out of time closes every connection of its group: then
        nothing can write any more, and neither my threads nor the peers' wait for a timeout of minutes."""
        group = self._group
        if group is None or all(pending.complete for pending in self._under_way):
            return  # dropped already, or nothing to end
        for peer in self._others():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, self._tag(_NEVER, 0)).wait(timedelta(milliseconds=1))


class Collectives(Wires):
    """NCCL: one all-to-all for either direction. On a GPU this has not been run."""

    def __init__(self, device: torch.device, *args: Any) -> None:
        super().__init__(*args)
        self._device = device

    def scatter(self, bucket: int, pieces: list[list[Tensor]], sizes: list[list[int]], dtype: torch.dtype) -> Pending:
        """Does what `Points` does."""
        flat = [piece for row in pieces for piece in row]
        packed = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)
        outs, ins = [sum(row) for row in sizes], [sum(len(piece) for piece in row) for row in pieces]
        received = packed.new_empty(sum(outs))
        parts = [list(torch.split(part, row)) for part, row in zip(torch.split(received, outs), sizes, strict=True)]
        pending = self._keep(Pending(parts, [packed, received], queued=True))
        return self._all_to_all(pending, received, packed, outs, ins, _SCATTER)

    def gather(self, bucket: int, whole: Tensor, ranges: Sequence[tuple[int, int]]) -> Pending:
        """Does what `Points` does."""
        lengths, (lo, hi) = [hi - lo for lo, hi in ranges], ranges[self.index]
        mine = whole[lo:hi].repeat(self.num_members)
        pending = self._keep(Pending(held=[whole, mine], queued=True))
        return self._all_to_all(pending, whole, mine, lengths, [hi - lo] * self.num_members, _GATHER)

    def _all_to_all(
        self, pending: Pending, into: Tensor, source: Tensor, outs: list[int], ins: list[int], lane: int
    ) -> Pending:
        starts = [lambda _: self._group.alltoall_base(into, source, outs, ins, AllToAllOptions())]
        self._start(pending, starts, 0)
        self._expect(pending, lane)
        return pending

    def release(self, pending: Pending) -> None:
        """The allocator keeps what is freed."""
        pending.parts, pending.held = [], []

    def _cut(self) -> None:
        abort: Callable[[], None] | None = getattr(self._group, "abort", None)
        if isinstance(self._group, getattr(dist, "ProcessGroupNCCL", ())) and abort is not None:
            abort()
