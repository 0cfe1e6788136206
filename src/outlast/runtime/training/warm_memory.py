"""Memory whose pages are already there, and work that yields the processor: what serving a joiner takes.

Role: copying a state costs little, faulting its pages in costs ten times that, on the machines where training runs
several times more. What a donor copies into is therefore touched in the background before a joiner can come, and kept.
Invariants: memory is lent to one user at a time and comes back when that user is gone; no more is kept than
`prepare` asked for. A thread at low priority does its work in calls that do without the interpreter's lock: preempted
with it, it would hold up the training thread that it is meant to yield to.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from outlast.checkpoint.threads import be_nice, begin

__all__ = ["Lent", "Warm", "at_low_priority", "populate", "touch"]

T = TypeVar("T")

_libc_madvise = ctypes.CDLL(None).madvise  # without the interpreter's lock
_libc_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_HUGE = 2 << 20
_LEVEL = 10
_POPULATE_WRITE = 23  # of madvise, Linux 5.14
_PIECE = 1 << 18  # what maps or unmaps memory waits for a call to end


def at_low_priority(work: Callable[[], T]) -> T:
    """`work()` on a thread of its own that yields to training, waited for. Raises what it raised. On this one, at its
    own priority, where no other is to be had."""
    done: Future[T] = Future()

    def run() -> None:
        be_nice(_LEVEL)
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            done.set_exception(error)

    try:
        begin(threading.Thread(target=run, name="outlast-gently", daemon=True))
    except (RuntimeError, MemoryError):
        return work()
    return done.result()


def touch(memory: Tensor) -> None:
    """Fault all pages of a contiguous CPU tensor in, as huge ones where the system has them. It becomes zero."""
    address, size = memory.data_ptr(), memory.numel() * memory.element_size()
    if size >= _HUGE:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(start, address + size - start, mmap.MADV_HUGEPAGE)
    ctypes.memset(address, 0, size)


def populate(parts: Sequence[Tensor]) -> None:
    """Fault in all pages of contiguous CPU tensors, which keep what they hold, also if it is written meanwhile. Where
    the system knows no such call they fault as they are written, as ever."""
    for part in parts:
        address, end = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
        for at in range(address // mmap.PAGESIZE * mmap.PAGESIZE, end, _PIECE):
            if not _madvise(at, min(_PIECE, end - at), _POPULATE_WRITE):
                return


def _madvise(address: int, size: int, advice: int) -> bool:
    """Advice may be refused: False."""
    return bool(_libc_madvise(address, size, advice) == 0)


class Lent(list[Tensor]):
    """Tensors in memory that is lent: it goes back when nobody holds this list any more."""


class Warm:
    """Touches memory before it is needed, and takes it back when its user is gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory may come back from a finaliser, in any thread at any point
        self._free: list[Tensor] = []  # by size
        self._wanted: list[int] = []
        self._refilling = False

    @property
    def held_bytes(self) -> int:
        """What is kept and not lent now."""
        with self._lock:
            return sum(map(len, self._free))

    def prepare(self, sizes: Sequence[int], soon: Sequence[Tensor] = ()) -> None:
        """Have memory of these sizes, soon: a background thread touches it at low priority. What else is kept goes.
        `soon`: what lies elsewhere and will be written; its pages are faulted in too."""
        with self._lock:
            self._wanted = sorted(sizes)
            kept, missing = self._matched()
            dropped, self._free = self._free, kept
        if missing or soon or len(dropped) > len(kept):
            self._in_background(functools.partial(self._settle, missing, dropped, soon))

    def _in_background(self, work: Callable[[], None]) -> bool:
        """False if no thread is to be had: the memory will be touched when it is needed."""
        try:
            begin(threading.Thread(target=work, name="outlast-touch", daemon=True))
        except (RuntimeError, MemoryError):
            return False
        return True

    def _matched(self) -> tuple[list[Tensor], list[int]]:
        """(free memory that serves a wanted size, by size; the sizes for which there is none). What is lent will come
        back: until then a size may be missing that is wanted no more."""
        free, kept, missing = list(self._free), list[Tensor](), list[int]()
        for size in self._wanted:
            at = bisect.bisect_left(free, size, key=len)
            if at < len(free) and len(free[at]) <= 2 * size:
                kept.append(free.pop(at))
            else:
                missing.append(size)
        return sorted(kept, key=len), missing

    def _settle(self, missing: list[int], dropped: list[Tensor], soon: Sequence[Tensor] = ()) -> None:
        be_nice(_LEVEL)
        dropped.clear()  # giving pages back takes its time too
        populate(soon)
        for size in missing:
            memory = torch.empty(size, dtype=torch.uint8)
            touch(memory)
            self._back(memory)

    def _refill(self, size: int) -> None:
        """Who borrows again and again, faster than is given back, finds touched memory all the same."""
        with self._lock:
            wanted = [other for other in self._wanted if other >= size][:1]
            if self._refilling or not wanted or any(size <= len(memory) <= 2 * wanted[0] for memory in self._free):
                return
            self._refilling = True

        def work() -> None:
            try:
                self._settle(wanted, [])
            finally:
                self._refilling = False

        if not self._in_background(work):
            self._refilling = False

    def lend(self, size: int, user: Any) -> Tensor:
        """`size` bytes until `user` is gone; untouched if there is none that large."""
        with self._lock:
            at = bisect.bisect_left(self._free, size, key=len)
            memory = self._free.pop(at) if at < len(self._free) else None
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8)
        weakref.finalize(user, self._back, memory).atexit = False
        return memory[:size]

    def _back(self, memory: Tensor) -> None:
        with self._lock:
            bisect.insort(self._free, memory, key=len)
            self._free, _ = self._matched()

    def copies(self, tensors: Sequence[Tensor]) -> Lent:
        """Copies of contiguous tensors, as bytes."""
        lent = Lent()
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        memory, at = self.lend(sum(sizes), lent), 0
        self._refill(sum(sizes))
        for tensor, size in zip(tensors, sizes, strict=True):
            lent.append(memory[at : at + size])
            lent[-1].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            at += size
        return lent
