"""The outcome's way to a device straight from where its slices lie: the outcome slots of a host's members.

Once the pages of these slots are locked, the device reads them itself: no thread of the host copies slices together
first. The host's own copy of the outcome comes back from the device, because others are served from it, so whoever
reads `out` finds it there as ever. Bits are copied, not computed. Does not know what is reduced, nor when.

A member may write its outcome slot again once all have offered sums of the next step, or in another view. Who copies
with a thread has read the slot when `gather` returns; a device may still be reading it then. So `settle` is called
before `finish` of the plane returns or raises: no copy outlives the exchange that began it, and nothing that follows in
the protocol (offering sums, the roll call of another view, a hand-over through the slot) can meet one under way.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from outlast.runtime.exchange.slots import OUTCOME, Memory

__all__ = ["CudaPageLocks", "PageLocks", "StraightCopies"]

_PORTABLE = 1  # `cudaHostRegisterPortable`: locked for all devices


class PageLocks(Protocol):
    """Keeps pages where they are, so that a device can read them at any time."""

    def lock(self, address: int, size: int) -> bool: ...
    def unlock(self, address: int) -> None: ...


class CudaPageLocks:
    """By `cudaHostRegister`, for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, size: int) -> bool:
        """False if the driver, or what the process may lock, does not allow it."""
        with torch.cuda.device(self._device):
            refused = self._call("cudaHostRegister", address, size, _PORTABLE)
        if refused:
            self._forget_error()
        return not refused

    def unlock(self, address: int) -> None:
        with torch.cuda.device(self._device):
            refused = self._call("cudaHostUnregister", address)
        if refused:
            self._forget_error()

    def _call(self, name: str, *arguments: int) -> int:
        return int(getattr(torch.cuda.cudart(), name)(*arguments))  # type: ignore[no-untyped-call]

    def _forget_error(self) -> None:
        """CUDA tells a refusal once more to whoever asks next, which would be a kernel of the loop: ask here."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)


class StraightCopies:
    """Copies to `device`. `plain`: of each bucket, whether all its parameters have the type of its sums. `mark`: what
    says when the device has done what it was given until now."""

    def __init__(
        self, device: torch.device, plain: Sequence[bool], mark: Callable[[], Any], locks: PageLocks | None = None
    ) -> None:
        self._device, self._plain, self._mark_of = device, plain, mark
        self._locks: PageLocks = CudaPageLocks(device) if locks is None else locks
        self._unlock = weakref.WeakKeyDictionary[Memory, Any]()  # of each memory whose outcome slot is locked
        self._there: dict[int, Tensor] = {}
        self._mark: Any = None
        self.refused = False
        self.num_taken = 0
        """`refused`: no pages are locked, as some could not be. `num_taken`: buckets that went this way, ever."""

    # --- pages -----------------------------------------------------------------------------------------------------
    def begin(self, memories: Sequence[Memory]) -> None:
        """The members of an exchange, of which sums are still awaited. What was taken before counts no more. Locks one
        memory, or releases one whose member is gone: large slots take a while, and who has just lost a member would
        wait for all of them. The host's thread copies until all are locked. Never under a backward, where a CUDA graph
        may be recorded, which such a call would spoil."""
        self.forget()
        gone = next((memory for memory in self._unlock if memory not in memories), None)
        new = next((memory for memory in memories if memory not in self._unlock), None)
        if gone is not None:
            self._unlock.pop(gone)()
        elif new is not None and not self.refused:
            self._lock(new)

    def _lock(self, memory: Memory) -> None:
        size, flats = memory.layout.total_bytes, memory.flats(OUTCOME)
        if not size:
            return
        address = flats[0].untyped_storage().data_ptr()
        if memory.region is None or not self._locks.lock(address, size):
            self.refused = True
            self.release()
            return
        # with the memory, before its pages are unmapped; a process that ends gives everything back
        unlock = self._unlock[memory] = weakref.finalize(memory, _unlock, self._locks, address, os.getpid())
        unlock.atexit = False

    def release(self) -> None:
        """No pages are locked."""
        while self._unlock:
            self._unlock.popitem()[1]()

    # --- an outcome ------------------------------------------------------------------------------------------------
    def take(self, bucket: int, slices: Sequence[tuple[Memory, int, int]], out: Tensor) -> bool:
        """Copy a bucket's slices (whose, first element, end) to the device, and from there to `out`: both have them
        after `settle`. False, with nothing done, where the device cannot read them all."""
        if not self._plain[bucket] or not all(memory in self._unlock for memory, _, _ in slices):
            return False
        there = torch.empty(out.shape, dtype=out.dtype, device=self._device)
        for memory, lo, hi in slices:
            there[lo:hi].copy_(memory.flats(OUTCOME)[bucket][lo:hi], non_blocking=True)
        out.copy_(there, non_blocking=True)
        self._there[bucket] = there
        self._mark = self._mark_of()
        self.num_taken += 1
        return True

    def settle(self) -> None:
        """Wait until nothing is under way."""
        if self._mark is not None:
            self._mark.synchronize()
            self._mark = None

    def given(self, bucket: int) -> Tensor | None:
        """The bucket on the device, once."""
        return self._there.pop(bucket, None)

    def forget(self) -> None:
        """What is there is not what `out` holds any more."""
        self.settle()
        self._there.clear()


def _unlock(locks: PageLocks, address: int, pid: int) -> None:
    """A fork has the pages, and not the device's hold on them."""
    if pid == os.getpid():
        locks.unlock(address)
