"""From a microbatch's backward to partial sums of the fixed tree, in memory that peers may read.

A replica keeps a stack of partial sums: a new microbatch is added to its sibling straight from `.grad` (the same work
as plain accumulation) and merged upwards. Sums are only ever inputs of the exchange: an abandoned exchange leaves them
intact, so a recovery recomputes nothing that survives (protocol, 8 and 10). Slot 0 of the memory is the outcome slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outlast.core.protocol import Node, merges
from outlast.errors import StepMisuse
from outlast.runtime._shared import Region
from outlast.tensors import Layout

__all__ = ["OUTCOME", "Accumulator", "Memory"]

OUTCOME = 0


class Memory:
    """Slots of one layout each: shared with the peers of the host (a region), or private on the layout's device."""

    def __init__(self, layout: Layout, num_slots: int, region: Region | None = None, shared: bool = True) -> None:
        self.layout, self.num_slots = layout, num_slots
        self.region = region if region is not None or not shared else Region(layout.total_bytes * num_slots)
        self._flats: dict[int, list[Tensor]] = {}
        self._views: dict[int, list[Tensor]] = {}

    def flats(self, slot: int) -> list[Tensor]:
        """The slot's buckets."""
        if slot not in self._flats:
            size = self.layout.total_bytes
            if self.region is None or size == 0:
                storage = torch.zeros(size, dtype=torch.uint8, device=self.layout.device)
            else:
                storage = torch.frombuffer(self.region.map, dtype=torch.uint8, count=size, offset=slot * size)
            self._flats[slot] = self.layout.flats(storage)
        return self._flats[slot]

    def views(self, slot: int) -> list[Tensor]:
        """The slot's gradients, one a parameter."""
        if slot not in self._views:
            self._views[slot] = self.layout.views(self.flats(slot))
        return self._views[slot]


class Accumulator:
    """Partial sums of one step. `num_leaves`: microbatches a step."""

    def __init__(
        self, params: Sequence[Tensor], layout: Layout, memory: Memory, num_leaves: int, num_rows: int = 1
    ) -> None:
        self.params, self.layout, self.memory, self.num_leaves = params, layout, memory, num_leaves
        self.num_rows = num_rows
        self.slots: dict[Node, int] = {}
        self.used = bytearray(-(-len(params) // 8))
        self._chain: list[tuple[int, int]] = []
        self._first: tuple[int, bool] = (1, True)
        self._folded = 0
        self._late = False
        self.paused = False  # a backward that is not of the step
        self._waiting: list[int] = []
        self._on_bucket: Callable[[int], None] | None = None
        self._weight = 1.0
        for index, param in enumerate(params):
            param.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    # --- one microbatch ------------------------------------------------------------------------------------------
    def begin(self, leaf: int, weight: float, on_bucket: Callable[[int], None] | None) -> None:
        """Before a backward. Buckets are folded as soon as their gradients are there, in fixed order; with `on_bucket`
        (the last microbatch before an exchange) each is announced then, under the backward."""
        for param in self.params:
            param.grad = None
        self._on_bucket, self._weight, self._folded, self._late = on_bucket, weight, 0, False
        self._waiting = [len(bucket.params) for bucket in self.layout.buckets]
        steps = merges(self.slots.keys(), leaf, self.num_leaves, self.num_rows)
        self._plan((leaf, leaf + 1), steps)

    def _plan(self, node: Node, steps: list[tuple[Node, Node, Node]]) -> None:
        """Which slot takes the leaf, and which slots are then added to which; the bookkeeping is done in `end`."""
        self._node, self._steps = node, steps
        if not steps:
            self._first = (self._free_slot(), True)
            self._chain = []
            return
        left, right, _ = steps[0]
        at = self.slots[left if right == node else right]
        self._first = (at, False)
        self._chain = []
        up = steps[0][2]
        for left, right, parent in steps[1:]:
            other = self.slots[left if right == up else right]
            self._chain.append((other, at))
            at, up = other, parent

    def _free_slot(self) -> int:
        taken = set(self.slots.values())
        return next(slot for slot in range(1, self.memory.num_slots) if slot not in taken)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        bucket = self.layout.bucket_of[index]

        def ready(_: Tensor) -> None:
            if self.paused:
                return
            self._late = self._late or bucket < self._folded  # hooks never raise (13): `end` does
            self._waiting[bucket] -= 1
            while self._folded < len(self._waiting) and self._waiting[self._folded] <= 0:
                self._fold(self._folded)  # at once: the gradients are still in cache, and their memory is free again

        return ready

    def after(self) -> dict[Node, int]:
        """Where the sums will lie once the microbatch that `begin` announced is in."""
        slots = dict(self.slots)
        for left, right, _ in self._steps:
            slots.pop(left, None)
            slots.pop(right, None)
        slot = self._chain[-1][0] if self._chain else self._first[0]
        slots[self._steps[-1][2] if self._steps else self._node] = slot
        return slots

    def end(self) -> None:
        """After the backward: fold what the hooks did not, and record the new sums."""
        if self._late:
            raise StepMisuse(
                "a parameter received its gradient in several parts in one backward",
                did="the step was not committed", remedy="activation checkpointing: use_reentrant=False",
            )  # fmt: skip
        while self._folded < len(self.layout.buckets):
            self._fold(self._folded)
        self.slots = self.after()
        self._on_bucket = None

    def _fold(self, number: int) -> None:
        """One bucket: the leaf into its slot, then up the chain."""
        bucket = self.layout.buckets[number]
        slot, fresh = self._first
        views = self.memory.views(slot)
        into: list[Tensor] = []
        grads: list[Tensor] = []
        for index, _, _ in bucket.params:
            grad = self.params[index].grad
            if grad is None:  # zero, not nothing: -0.0 + 0.0 has other bits than -0.0
                views[index].zero_() if fresh else views[index].add_(0.0)
                continue
            self.used[index >> 3] |= 1 << (index & 7)
            into.append(views[index])
            grads.append(grad.to(views[index].dtype) if grad.is_sparse is False else grad.to_dense())
            self.params[index].grad = None
        with torch.no_grad():
            if self._weight != 1.0 and grads:
                grads = list(torch._foreach_mul(grads, self._weight))
            if into:
                torch._foreach_copy_(into, grads) if fresh else torch._foreach_add_(into, grads)
            for target, source in self._chain:
                self.memory.flats(target)[number].add_(self.memory.flats(source)[number])
        self._folded += 1
        if self._on_bucket is not None:
            self._on_bucket(number)

    # --- a step --------------------------------------------------------------------------------------------------
    def keep(self, nodes: Sequence[Node]) -> None:
        """Forget every sum that is not among `nodes`."""
        self.slots = {node: slot for node, slot in self.slots.items() if node in set(nodes)}

    def clear(self) -> None:
        """A new step."""
        self.slots.clear()
        self.used = bytearray(len(self.used))
