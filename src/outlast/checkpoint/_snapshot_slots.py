"""Memory for one replica's snapshots: its own, or some that outlives it and holds the newest for who comes after."""

from __future__ import annotations

import concurrent.futures

from outlast.checkpoint._arena import Arena, Growth, Slot
from outlast.checkpoint._handle import COPY_S, Handle
from outlast.checkpoint._memory import Hold, MemoryStore, in_memory
from outlast.checkpoint._writer import CHUNK_BYTES
from outlast.checkpoint.threads import Threads

__all__ = ["SnapshotSlots"]


class SnapshotSlots:
    """Leases slots for snapshots. `hold`: the memory that outlives this process, `local` its place there; `keep`: slots
    of the newest complete snapshot, which must survive until a newer one is published; `run`: what is sealed says whose
    it is."""

    def __init__(self, num_slots: int, hold: Hold | None, local: int, run: str, timeout_s: float) -> None:
        self.hold, self._local, self._run = hold, local, run
        self.arena = Arena(num_slots, None if hold is None else lambda at, size: hold.open_slot(local, at, size))
        newest = None if hold is None else MemoryStore(hold).newest_slot(local)
        self.keep: frozenset[int] = frozenset() if newest is None else frozenset({newest})
        self.preparer = Threads(1, "outlast-prepare", limit_s=max(COPY_S, timeout_s))
        self.growth = Growth(self.arena, self.preparer)

    def reserve(self, size_bytes: int) -> None:
        """Make free slots of this size, touched."""
        self.growth.size_bytes = size_bytes
        self.arena.reserve(size_bytes, keep=self.keep)

    def reserve_later(self, size_bytes: int) -> concurrent.futures.Future[None]:
        """The same beside training."""
        self.growth.size_bytes = size_bytes
        return self.preparer.try_submit(self.arena.reserve, size_bytes, keep=self.keep)

    def grows_for(self, size_bytes: int) -> bool:
        """Whether free slots are too small for this. Then that is begun: faulting pages in takes longer than a step
        may."""
        if not self.arena.is_too_small(size_bytes, keep=self.keep):
            return False
        self.growth.begin(self.keep)
        return True

    def lease(self, size_bytes: int) -> Slot | None:
        """A slot if one is free. What is sealed in it no longer counts."""
        slot = self.arena.lease(size_bytes, keep=self.keep)
        if slot is not None and self.hold is not None:
            self.hold.clear(self._local, slot.index)
        return slot

    def seal(self, handle: Handle, stream: memoryview) -> None:
        """A copied snapshot becomes one that others may load, if memory outlives this process."""
        assert self.hold is not None
        save, mine = handle.save, in_memory(handle.part, stream, CHUNK_BYTES)
        self.hold.seal(self._local, handle._slot, mine, step=save.step, view=save.view, run=self._run)

    def settled(self, slot: Slot, published: bool) -> None:
        """What becomes of a sealed snapshot is known: the newest published one is kept, others' slots are free."""
        if self.hold is not None:
            if published:
                self.keep = frozenset({slot.index})
            self.arena.release(slot)
