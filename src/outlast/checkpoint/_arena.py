"""Memory for snapshots: allocated and touched once, leased by the save, bounded. No torch.

Role: slots of one size, each a private mapping or a shared one (`_memory`) that outlives the process. The cost of a
snapshot is page faults, not copying (2 GiB/s into fresh pages, 10 and more into warm ones), so every page is written
once when the slot is made, with huge pages where the kernel has them. Invariant: at most `num_slots` slots exist, and
one is in at most one lease. Never grows on its own: `reserve` says what it takes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

from outlast.checkpoint.threads import Threads

__all__ = ["Arena", "Growth", "Slot", "address_of", "map_private", "thread_buffer"]

_HUGE = 2 << 20
_PAGE = 4096


def map_private(size_bytes: int) -> mmap.mmap:
    """Anonymous memory with huge pages advised, every page already there."""
    area = mmap.mmap(-1, max(_HUGE, -(-size_bytes // _HUGE) * _HUGE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    touch(area)
    return area


def touch(area: mmap.mmap) -> None:
    """Fault every page in, now. MADV_POPULATE_WRITE (Linux 5.14) does it in one call; else a write to each page."""
    try:
        area.madvise(23)
    except OSError:
        for offset in range(0, len(area), _PAGE):
            area[offset] = 0


def address_of(buffer: memoryview) -> int:
    """The address of a writable buffer's first byte. The buffer must outlive every use of it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


_threads = threading.local()


def thread_buffer(size_bytes: int) -> memoryview:
    """This thread's page-aligned scratch memory: warm, and good until the thread asks again."""
    held: mmap.mmap | None = getattr(_threads, "buffer", None)
    if held is None or len(held) < size_bytes:
        held = _threads.buffer = map_private(size_bytes)
    return memoryview(held)[: -(-size_bytes // _PAGE) * _PAGE]


class Slot:
    """One snapshot's memory. `index` is stable; `view` covers the slot's stream."""

    def __init__(self, index: int, area: mmap.mmap, start: int = 0) -> None:
        self.index, self.area, self.start = index, area, start
        self.view = memoryview(area)[start:]

    @property
    def size_bytes(self) -> int:
        return len(self.view)


class Arena:
    """Slots and their leases. Thread-safe; `lease` never blocks: a save that finds no slot is delayed, not the step."""

    def __init__(self, num_slots: int = 2, make: Callable[[int, int], Slot] | None = None) -> None:
        self.num_slots = num_slots
        self._make = make if make is not None else lambda index, size: Slot(index, map_private(size))
        self._slots: dict[int, Slot] = {}
        self._leased: set[int] = set()
        self._lock = threading.Lock()

    @property
    def host_bytes(self) -> int:
        """What the slots take now, leased or not."""
        with self._lock:
            return sum(len(slot.area) for slot in self._slots.values())

    def reserve(self, size_bytes: int, *, keep: frozenset[int] = frozenset()) -> None:
        """Make every free slot, but those of `keep`, at least `size_bytes` large, touched."""
        for index in range(self.num_slots):
            with self._lock:
                if index not in self._leased and index not in keep:
                    self._ensure(index, size_bytes)

    def _ensure(self, index: int, size_bytes: int) -> Slot:
        slot = self._slots.get(index)
        if slot is None or slot.size_bytes < size_bytes:
            self._slots.pop(index, None)
            slot = self._slots[index] = self._make(index, size_bytes)
        return slot

    def is_too_small(self, size_bytes: int, *, keep: frozenset[int] = frozenset()) -> bool:
        """Whether a free slot that exists would have to be made again, larger, to hold this."""
        with self._lock:
            free = self._slots.keys() - self._leased - keep
            return any(self._slots[index].size_bytes < size_bytes for index in free)

    def lease(self, size_bytes: int, *, keep: frozenset[int] = frozenset()) -> Slot | None:
        """A free slot of at least `size_bytes`, none of `keep`; or None."""
        with self._lock:
            free = [i for i in range(self.num_slots) if i not in self._leased and i not in keep]
            if not free:
                return None
            slot = self._ensure(free[0], size_bytes)
            self._leased.add(slot.index)
            return slot

    def has_free(self, *, keep: frozenset[int] = frozenset()) -> bool:
        """Whether `lease` would find a slot."""
        with self._lock:
            return len(self._leased | keep) < self.num_slots

    def release(self, slot: Slot) -> None:
        with self._lock:
            self._leased.discard(slot.index)

    @property
    def num_leased(self) -> int:
        with self._lock:
            return len(self._leased)


class Growth:
    """Free slots that are too small for a share that grew while they were taken, made larger beside training.
    `size_bytes`: the share's."""

    def __init__(self, arena: Arena, pool: Threads) -> None:
        self._arena, self._pool = arena, pool
        self.size_bytes = 0
        self._newest: concurrent.futures.Future[None] | None = None

    def under_way(self, keep: frozenset[int]) -> bool:
        """Begins it if there is such a slot. Not after it has failed: then the next save tries, and tells."""
        newest = self._newest
        if newest is not None and (not newest.done() or newest.exception() is not None):
            return not newest.done()
        if self._arena.is_too_small(self.size_bytes, keep=keep):
            self.begin(keep)
        return self._newest is not newest

    def begin(self, keep: frozenset[int]) -> None:
        self._newest = self._pool.try_submit(self._arena.reserve, self.size_bytes, keep=keep)
