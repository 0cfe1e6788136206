"""From a microbatch's backward to partial sums of the fixed tree, in memory that peers may read.

A replica keeps a stack of partial sums: a new microbatch is added to its sibling straight from `.grad` (the same work
as plain accumulation) and merged upwards. Sums are only ever inputs of the exchange: an abandoned exchange leaves them
intact, so a recovery recomputes nothing that survives (protocol, 8 and 10). Slot 0 of the memory is the outcome slot.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from outlast.core.protocol import Node, merges
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.training._staging import DEPTH, Arrival, Staging
from outlast.runtime.training.losses import several_parts
from outlast.runtime.training.stages import Stages
from outlast.runtime.training.step_checks import StepChecks
from outlast.tensors import (
    BLOCK,
    Bucket,
    Fold,
    Layout,
    add_and_print_blocks,
    combine,
    fingerprint_all,
    gradient_of,
    is_shard,
    local,
    packed_prints,
)

__all__ = ["Accumulator"]


class Accumulator:
    """Partial sums of one step. `num_leaves`: microbatches a step. `staging`: how gradients come to the host's memory,
    where sums lie there and gradients do not."""

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: Layout,
        memory: Memory,
        num_leaves: int,
        num_rows: int = 1,
        checks: StepChecks | None = None,
        staging: Staging | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.params, self.layout, self.memory, self.num_leaves = params, layout, memory, num_leaves
        self.num_rows = num_rows
        self.slots: dict[Node, int] = {}
        self.first, num = (0, len(params)) if stages is None else (stages.first, stages.num_trained)
        self.used = bytearray(-(-num // 8))  # a bit for each parameter; in a pipeline for those of all stages
        self._chain: list[tuple[int, int]] = []
        self._first: tuple[int, bool] = (1, True)
        self._staging = staging
        self._sharded = any(map(is_shard, params))
        self._coming: deque[tuple[list[int], Arrival]] = deque()  # taken and not folded yet, in the buckets' order
        self._taken = self._folded = 0  # buckets
        self._late = False
        self.paused = False  # a backward that is not of the step
        self.printing = False  # fingerprint each microbatch's gradient as it is added, and sums that others read
        self._compared = memory.region is not None and num_rows == 1  # others read sums where they lie
        self.print = 0  # of the last microbatch
        self._checks = checks if checks is not None else StepChecks()
        self._sent: dict[tuple[Node, int], bytes] = {}
        self._folds: dict[tuple[int, int], Fold] = {}
        self._beside = False
        self._waiting: list[int] = []
        self._on_bucket: Callable[[int], None] | None = None
        self._weight = 1.0
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(params)
        ]
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def over(self) -> None:
        """No microbatch follows: the parameters know nothing of it any more."""
        _remove(self._hooks)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Gradients that come in here come in parts: hooks leave them until all is there, and `end` takes them."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    # --- one microbatch ------------------------------------------------------------------------------------------
    def begin(self, leaf: int, weight: float, on_bucket: Callable[[int], None] | None, beside: bool = False) -> None:
        """Before a backward. Buckets are folded as soon as their gradients are there, in fixed order; with `on_bucket`
        (the last microbatch before an exchange) each is announced then, under the backward. `beside`: the gradient is
        fingerprinted as one that counts, and counts nowhere."""
        for param in self.params:
            param.grad = None
        self._on_bucket, self._weight, self._late = on_bucket, weight, False
        self._taken = self._folded = 0
        self._coming.clear()
        self._waiting = [len(bucket.params) for bucket in self.layout.buckets]
        self.print, self._beside = 0, beside
        if beside:
            return
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
        """No collector finds a cycle through such a hook: if it held this object, a training that is given up before
        `over` would be kept for ever, and its parameters."""
        bucket, held = self.layout.bucket_of[index], weakref.ref(self)

        def ready(_: Tensor) -> None:
            found = held()
            if found is not None:
                found._ready(bucket)

        return ready

    def _ready(self, bucket: int) -> None:
        """A gradient of this bucket is there."""
        if self.paused or not self._waiting:  # nothing has begun: the loop's own backward, which `_one` will miss
            return
        self._late = self._late or bucket < self._taken  # hooks never raise (13): `end` does
        self._waiting[bucket] -= 1
        while self._taken < len(self._waiting) and self._waiting[self._taken] <= 0:
            self._take()

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
            raise several_parts()
        while self._taken < len(self.layout.buckets):
            self._take()
        while self._coming:
            self._fold()
        if not self._beside:
            self.slots = self.after()
        self._on_bucket = None
        self._beside = False

    def _take(self) -> None:
        """The next bucket: its gradients to where sums lie, and into them as soon as they are there. That is at once
        where they need no copy: they are still in cache, and their memory is free again."""
        while len(self._coming) >= DEPTH:
            self._fold()
        bucket = self.layout.buckets[self._taken]
        self._taken += 1
        self._coming.append(self._gradients(bucket))
        while self._coming and self._coming[0][1].is_here():
            self._fold()

    def _fold(self) -> None:
        """The next bucket that was taken, once its gradients are there. One that counts nowhere is fingerprinted, and
        nothing else."""
        indices, arrival = self._coming[0]
        bucket = self.layout.buckets[self._folded]
        grads = self._addends(arrival.wait(), bucket)
        if self._beside:
            self.print = combine((self.print, fingerprint_all(grads, indices)))
        else:
            self._add(bucket, indices, grads)
        self._coming.popleft()
        self._folded += 1
        if self._on_bucket is not None and not self._beside:
            self._on_bucket(bucket.index)

    def _add(self, bucket: Bucket, indices: list[int], grads: list[Tensor]) -> None:
        """The leaf into its slot, then up the chain."""
        slot, fresh = self._first
        views, there = self.memory.views(slot), set(indices)
        into: list[Tensor] = []
        for index, _, _ in bucket.params:
            if index not in there:  # zero, not nothing: -0.0 + 0.0 has other bits than -0.0
                views[index].zero_() if fresh else views[index].add_(0.0)
                continue
            bit = self.first + index
            self.used[bit >> 3] |= 1 << (bit & 7)
            into.append(views[index])
        with torch.no_grad():
            if into and self.printing:
                self.print = combine((self.print, self._fold_into(slot, bucket, indices, into).add(grads, fresh=fresh)))
            elif into:
                torch._foreach_copy_(into, grads) if fresh else torch._foreach_add_(into, grads)
            sends = self.printing and self._on_bucket is not None and self._compared
            for place, (target, source) in enumerate(self._chain, 1):
                to, flat = self.memory.flats(target)[bucket.index], self.memory.flats(source)[bucket.index]
                if sends and place == len(self._chain):
                    self._say(self._steps[-1][2], bucket, _added(to, flat, bucket), to)
                else:
                    to.add_(flat)

    def _fold_into(self, slot: int, bucket: Bucket, indices: list[int], into: list[Tensor]) -> Fold:
        """Kept for a whole bucket; which parameters have no gradient may change from step to step."""
        if len(indices) < len(bucket.params):
            return Fold(into, indices)
        if (slot, bucket.index) not in self._folds:
            self._folds[slot, bucket.index] = Fold(into, indices)
        return self._folds[slot, bucket.index]

    def _gradients(self, bucket: Bucket) -> tuple[list[int], Arrival]:
        """The parameters that have a gradient, and those on their way to where sums lie; nobody else has them then."""
        indices: list[int] = []
        grads: list[Tensor] = []
        for index, _, _ in bucket.params:
            param = self.params[index]
            grad = gradient_of(param) if self._sharded else param.grad
            if grad is None:
                continue
            if self._sharded:
                if self._checks.flips.active and is_shard(grad):
                    self._checks.flips.after_backward(index, local(grad))
                grad = local(grad)
            indices.append(index)
            grads.append(grad if grad.layout is torch.strided else grad.to_dense())
            param.grad = None
        staged, device = self._staging.bring(grads) if self._staging is not None else None, self.layout.device
        return indices, staged or Arrival([grad if grad.device == device else grad.to(device) for grad in grads])

    def _addends(self, grads: list[Tensor], bucket: Bucket) -> list[Tensor]:
        """What is added of gradients that are where sums lie: in the dtype of the sums, weighted."""
        grads = [grad if grad.dtype == bucket.dtype else grad.to(dtype=bucket.dtype) for grad in grads]
        if self._weight != 1.0 and grads:
            with torch.no_grad():
                grads = list(torch._foreach_mul(grads, self._weight))
        return grads

    def sent(self, node: Node, slot: int, bucket: int) -> bytes:
        """Fingerprints of a sum's blocks, taken once, when it was made: what changes it afterwards shows."""
        if (node, bucket) not in self._sent:
            flat, layout = self.memory.flats(slot)[bucket], self.layout.buckets[bucket]
            runs = layout.stretches(0, layout.numel)
            self._say(node, layout, b"".join(packed_prints(flat[lo:hi], BLOCK, first) for lo, hi, first in runs), flat)
        return self._sent[node, bucket]

    def _say(self, node: Node, bucket: Bucket, prints: bytes, flat: Tensor) -> None:
        self._sent[node, bucket.index] = prints
        self._checks.flips.after_sum(bucket.index, flat)

    # --- a step --------------------------------------------------------------------------------------------------
    def keep(self, nodes: Sequence[Node]) -> None:
        """Forget every sum that is not among `nodes`."""
        self._sent = {key: prints for key, prints in self._sent.items() if key[0] in set(nodes)}
        self.slots = {node: slot for node, slot in self.slots.items() if node in set(nodes)}

    def clear(self) -> None:
        """A new step."""
        self._sent.clear()
        self.slots.clear()
        self.used = bytearray(len(self.used))


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _added(to: Tensor, source: Tensor, bucket: Bucket) -> bytes:
    """to += source, of a whole bucket; fingerprints of the blocks of the result."""
    if bucket.runs:  # what lies between them belongs to no block
        to.add_(source)
        return b"".join(packed_prints(to[lo:hi], BLOCK, first) for lo, hi, first in bucket.stretches(0, bucket.numel))
    return add_and_print_blocks(to, source, BLOCK, bucket.first_block)
