"""Walk back from a number that is not finite: to the replica, microbatch, sample, module, operation and line.

Only after a hit. Who holds a partial sum that is not finite computes its microbatches once more, watched: the loop sees
them as extra batches of the same step; losses, sums, buffers and registered state are as if they had not been. What the
second computation shows is told to all (`_ruling.py`); if it is finite, the first was not the model's fault.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.policy import Culprit
from outlast.core.protocol import Header
from outlast.errors import StepMisuse
from outlast.runtime._guarding import KEY, device_of
from outlast.runtime._operations import Watch
from outlast.runtime._replica import Replica
from outlast.tensors import find_nonfinite

__all__ = ["Inspection", "bad_samples"]


class Inspection:
    """One replica's part. `active`: a backward now belongs to it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._seen: Culprit | None = None
        self._at: tuple[int, int, Any, Watch | None] | None = None
        self.active = False

    def batches(self, headers: Sequence[Header]) -> Iterator[Any]:
        """My suspected microbatches, one after the other until one fails again; each must see one backward."""
        engine, replica = self._replica.engine, self._replica
        policy, step = engine.guards.policy, headers[0].step
        replica.findings = []
        if policy is None or not policy.inspect:
            return
        leaves = self._suspected(headers)
        saved = {k: copy.deepcopy(p.state_dict()) for k, p in engine.state.extra.items() if k != KEY} if leaves else {}
        engine.sums.paused = self.active = bool(leaves)
        for leaf in leaves:
            replica.enter(Phase.RECOMPUTE, leaf)
            batch = engine.prepare(step, leaf)
            watch = Watch.over(engine.state.model)
            self._seen, self._at = None, (step, leaf, batch, watch)
            replica.enter(Phase.BODY, leaf)
            with watch:
                yield batch
            if self._seen is None:
                raise StepMisuse(f"microbatch {leaf} of step {step} got no backward", remedy="one for each batch")
            replica.findings.append(self._seen)
            if self._seen.reproduced:
                break
        replica.findings = [seen for seen in replica.findings if seen.reproduced] or replica.findings[:1]
        engine.sums.paused = self.active = False
        for key, values in saved.items():
            engine.state.extra[key].load_state_dict(values)

    def _suspected(self, headers: Sequence[Header]) -> list[int]:
        """My microbatches whose loss is not finite; if all losses are, those under my sums that are not."""
        engine, replica = self._replica.engine, self._replica
        rows = [(leaf, loss) for header in headers for leaf, loss, _ in header.losses]
        bad = {leaf for leaf, loss in rows if not math.isfinite(loss)}
        mine = {leaf for node in engine.sums.slots for leaf in range(*node)}
        if bad:
            return sorted(bad & mine)
        nodes = [n for n, slot in engine.sums.slots.items() if find_nonfinite(_named(engine.memory.views(slot)))]
        found = sorted(leaf for node in nodes for leaf in range(*node))
        sizes = engine.samples.sizes(replica.member.committed)
        return [leaf for leaf in found if sizes[leaf]]

    def backward(self, loss: Tensor) -> None:
        """The watched backward: look at the gradients, and forget them."""
        assert self._at is not None
        step, leaf, batch, watch = self._at
        state, engine = self._replica.engine.state, self._replica.engine
        for param in state.params:
            param.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [(n, p.grad) for n, p in zip(state.names, state.params, strict=True) if p.grad is not None]
        bad = find_nonfinite(grads)
        for param in state.params:
            param.grad = None
        indices = engine.samples.indices(step, leaf)
        samples, sure = bad_samples(batch, watch.rows if watch is not None else (), indices)
        self._seen = Culprit(
            replica=self._replica.env.me, host=self._replica.env.agent, device=device_of(engine), microbatch=leaf,
            samples=tuple(samples), sure=sure, reproduced=bool(bad) or not math.isfinite(float(loss.detach())),
            parameter=bad[-1].name if bad else "", module=watch.module if watch is not None else "",
            operation=watch.operation if watch is not None else "", where=watch.where if watch is not None else "",
        )  # fmt: skip


def bad_samples(batch: Any, rows: Sequence[tuple[int, int]], indices: Sequence[int]) -> tuple[list[int], bool]:
    """(sample indices, whether their own values are not finite). `rows`: (row, of how many) of an activation.

    Where neither the data nor the activation's first dimension tells samples apart, all of the microbatch.
    """
    count = len(indices)
    own = {row for tensor in _tensors(batch) if tensor.dim() and len(tensor) == count for row in _bad_rows(tensor)}
    if own:
        return [indices[row] for row in sorted(own)], True
    if rows and count and rows[0][1] % count == 0 and rows[0][1]:
        each = rows[0][1] // count
        return [indices[at] for at in sorted({row // each for row, _ in rows})], False
    return list(indices), False


def _bad_rows(tensor: Tensor) -> list[int]:
    if not tensor.is_floating_point():
        return []
    bad = ~torch.isfinite(tensor.reshape(len(tensor), -1)).all(dim=1) if tensor.numel() else torch.zeros(0)
    return [int(row) for row in bad.nonzero()]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _named(views: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((str(index), view) for index, view in enumerate(views))
