"""One save under way, and the watch over it: a disk that never answers must not hold anybody up for good. torch.

Role: what `Engine.save` hands out, and the clock that runs while its bytes are written. Invariants: `durable` is
settled exactly once, by the writer or, once nothing has moved for `timeout_s`, by the watch; a save that was given up
is never promised afterwards. Does not decide what becomes of its slot: the writer may still be reading from it.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection

from outlast.checkpoint._arena import Slot
from outlast.checkpoint._writer import Base
from outlast.checkpoint.manifest import Part
from outlast.checkpoint.snapshot import Snapshot
from outlast.checkpoint.threads import begin
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.errors import CheckpointError

__all__ = ["COPY_S", "Handle"]

COPY_S = 600.0  # at least: copying is no work of a disk, however little patience there is with that
_FIRST_BYTES = 4096


class Handle:
    """One save under way. `durable` resolves to the report that the coordinator waits for, or to the failure."""

    def __init__(self, save: SaveId, snapshot: Snapshot, slot: Slot, part: Part, timeout_s: float) -> None:
        self.save, self.part = save, part
        self.staged_bytes, self.state_bytes, self.written_bytes = part.stream_bytes, 0, 0
        self.durable: concurrent.futures.Future[PartReport] = concurrent.futures.Future()
        self.base: tuple[Base, int | None] = ({}, None)  # chunks it may refer to, and the generation that they lie in
        self.copied_s = self.durable_s = float("nan")
        self._snapshot, self._slot, self._timeout_s = snapshot, slot, timeout_s
        self.copy_s = max(COPY_S, timeout_s)
        self._claim = threading.Lock()  # taken by whoever settles `durable`; never given back
        self.returned = False  # the writer is done, one way or the other
        self._moved_s = time.monotonic()
        self._over = threading.Event()  # the writer is done: nothing is left to watch

    def wait_copied(self, names: Collection[str] | None = None) -> None:
        """Call before overwriting these tensors (all by default), as the optimizer step does. Helps copying."""
        self._snapshot.wait_for(names, timeout_s=self.copy_s)

    @property
    def copied(self) -> bool:
        return self._snapshot.copied.is_set()

    # the engine's side

    def claim(self) -> bool:
        """Whether the caller settles `durable`; the other one came first if not."""
        return self._claim.acquire(blocking=False)

    def watch(self, late: Callable[[Handle], None]) -> None:
        """From now on `late` is called, once and on a thread of its own, when nothing moves for `timeout_s`.

        Returns when the first bytes are there to be written: the step that waits for them shares its lock with us.
        Raises what the copying raised, and RuntimeError where no thread is to be had for the watch.
        """
        self._snapshot.ready(min(self.part.stream_bytes, _FIRST_BYTES), timeout_s=self.copy_s)
        self._moved_s = time.monotonic()
        begin(threading.Thread(target=self._look, args=(late,), name="outlast-watch", daemon=True))

    def _look(self, late: Callable[[Handle], None]) -> None:
        while (left_s := self._moved_s + self._timeout_s - time.monotonic()) > 0:
            if self._over.wait(left_s):
                return
        if self.claim():
            late(self)

    def moved(self) -> None:
        """The disk answered. Raises CheckpointError if it did so too late: what follows need not be written."""
        if self._claim.locked():
            raise CheckpointError(
                f"the save of step {self.save.step} was given up before its disk answered",
                did="the save is dropped, training goes on, older generations stay",
                remedy="look after the disk or the mount under the checkpoints, or raise Checkpoint(timeout_s=…)",
            )
        self._moved_s = time.monotonic()

    def ended(self) -> None:
        """The writer is done."""
        self.returned = True
        self._over.set()

    def given_up(self, url: str) -> CheckpointError:
        """What `durable` fails with when the watch ends it."""
        return CheckpointError(
            f"the write of step {self.save.step} has not returned for {self._timeout_s:g} s",
            where=url,
            did="the save is dropped, training goes on, older generations stay; its memory is taken until it returns",
            remedy="look after the disk or the mount under the checkpoints, or raise Checkpoint(timeout_s=…)",
        )

    def unpublished(self, url: str) -> CheckpointError:
        """What became of a durable save whose store did not answer the publication in time."""
        return CheckpointError(
            f"step {self.save.step} is durable, and its publication has not returned for {self._timeout_s:g} s",
            where=url,
            did="training goes on, older generations stay",
            remedy="look after the disk or the mount under the checkpoints",
        )
