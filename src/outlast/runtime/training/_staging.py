"""Between a device and sums in the host's memory: one copy a bucket each way, through pages that are pinned.

A copy from or to other pages makes the host wait for the device, and one for each parameter makes it wait hundreds of
times a step. So the gradients of a bucket are joined on the device and leave it by one copy, for which nobody waits
before it is read; the outcome lies in pinned pages itself. Nothing is computed on the way and no type changes on the
device, so bits are those of the gradients. Does not know microbatches, sums or when a step is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outlast.runtime.training._straight_copies import StraightCopies
from outlast.tensors import Layout, is_shard

__all__ = ["DEPTH", "Arrival", "Mark", "Staging"]

DEPTH = 3
"""Buckets that may be under way at a time: one is added up while the next ones are copied."""


class Mark(Protocol):
    """A place in a device's work: a `torch.cuda.Event` that was recorded."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(slots=True)
class Arrival:
    """Gradients on their way. `mark`: when they are there; none: now. `held`: what must live until then."""

    grads: list[Tensor]
    mark: Mark | None = None
    held: Sequence[Tensor] = ()

    def is_here(self) -> bool:
        """Whether they can be read."""
        return self.mark is None or self.mark.query()

    def wait(self) -> list[Tensor]:
        """The gradients, once they can be read."""
        if self.mark is not None:
            self.mark.synchronize()
        self.held = ()
        return self.grads


class Staging:
    """Pinned memory between `device` and the sums of a layout. At most `DEPTH` arrivals may wait to be read: what was
    brought longer ago is overwritten."""

    def __init__(self, params: Sequence[Tensor], layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._plain = [all(params[i].dtype == b.dtype for i, _, _ in b.params) for b in layout.buckets]
        self._buffers: list[Tensor] = []
        self._marks: list[Any] = [None] * (DEPTH + 2)
        self._turn = 0
        self._returned: Mark | None = None
        self.straight = StraightCopies(device, self._plain, lambda: self._mark(DEPTH + 1))

    @classmethod
    def between(cls, params: Sequence[Tensor], layout: Layout) -> Staging | None:
        """None where it is of no use: sums lie with the parameters, or those are on several devices or no CUDA one."""
        devices = {param.device for param in params}
        device = params[0].device
        if layout.device.type != "cpu" or device.type != "cuda" or len(devices) > 1 or any(map(is_shard, params)):
            return None
        return cls(params, layout, device)

    # --- gradients to the host -----------------------------------------------------------------------------------
    def bring(self, grads: Sequence[Tensor]) -> Arrival | None:
        """The dense gradients of one bucket, copied to the host in their own type; None for what cannot be joined:
        of several types or devices, or of a wider type than the sums."""
        if not grads or len({(grad.device, grad.dtype) for grad in grads}) > 1 or grads[0].device != self._device:
            return None
        size = sum(grad.numel() * grad.element_size() for grad in grads)
        if size > len(self._buffer(self._turn)):
            return None
        turn, self._turn = self._turn, (self._turn + 1) % DEPTH
        with torch.no_grad():
            rows = [grad.reshape(-1) for grad in grads]
            flat = rows[0] if len(rows) == 1 else torch.cat(rows)
            into = self._buffer(turn)[:size].view(flat.dtype)
            into.copy_(flat, non_blocking=True)
        parts = torch.split(into, [row.numel() for row in rows])
        here = [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)]
        return Arrival(here, self._mark(turn), [*grads, flat])

    def _buffer(self, turn: int) -> Tensor:
        if not self._buffers:
            size = max(bucket.numel * bucket.dtype.itemsize for bucket in self._layout.buckets)
            self._buffers = [self._zeros(size, torch.uint8) for _ in range(DEPTH)]
        return self._buffers[turn]

    def _mark(self, number: int) -> Mark | None:
        """The work that the device has been given until now. Each number has one mark, used again and again."""
        if self._device.type != "cuda":
            return None
        event = self._marks[number]
        if event is None:
            event = self._marks[number] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        mark: Mark = event
        return mark

    # --- the outcome to the device -------------------------------------------------------------------------------
    def outcome(self) -> list[Tensor]:
        """Zeros, a flat tensor a bucket, which `back` copies without waiting."""
        return [self._zeros(bucket.numel, bucket.dtype) for bucket in self._layout.buckets]

    def back(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the device, which may not be there yet: `settle` before `flats` are written again. Those that came
        straight are there. Of a bucket with parameters of another type the flat tensor itself: types change on the
        host, as ever."""
        there = [self._back(bucket, flat) for bucket, flat in enumerate(flats)]
        self._returned = self._mark(DEPTH)
        return there

    def _back(self, bucket: int, flat: Tensor) -> Tensor:
        there = self.straight.given(bucket)
        if there is not None or not self._plain[bucket]:
            return flat if there is None else there
        return flat.to(self._device, non_blocking=True)

    def settle(self) -> None:
        """Wait until what went back was read."""
        if self._returned is not None:
            self._returned.synchronize()
            self._returned = None

    def _zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        if self._device.type == "cuda":
            try:
                return torch.zeros(size, dtype=dtype, pin_memory=True)
            except RuntimeError:  # no more can be pinned: copies wait then, as all do without this
                pass
        return torch.zeros(size, dtype=dtype)
