"""Look closer at a step that cannot be right: was it the data and the model, or the device? Which sample, which line?

Only after a hit. Whose sums are not finite computes their microbatches once more, watched, until one fails again: that
names sample, module and operation. After a spike everybody computes its own share once more: sums that come out with
other bits were corrupted. The loop sees these as extra batches of the same step; losses, sums, buffers and registered
state are as if they had not been. What is found is told to all (`core/protocol/step/verdict.py`), and decides nothing.
The ranks of a replica look together, each at its own microbatch, and what they saw is folded (`lane_checks.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.policy import Culprit
from outlast.core.protocol import Header
from outlast.core.protocol.tree import Node, leaves_of, merges
from outlast.runtime.checks._extra_batches import apart, gradients, prepare
from outlast.runtime.checks._nonfinite_operation import OperationWatch, bad_rows, float_tensors
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.checks.lane_checks import LaneChecks, RankLook, seen_by_ranks
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.losses import missing_backward
from outlast.runtime.view.port import Bench
from outlast.tensors import fingerprint

__all__ = ["Inspection", "bad_samples"]


class Inspection:
    """One rank's part, and for a lead that of its replica. `active`: a backward now belongs to it."""

    def __init__(self, port: Bench, engine: Engine, guards: Guarding, others: LaneChecks | None = None) -> None:
        self._port, self._engine, self._guards = port, engine, guards
        self._others = others if others is not None else LaneChecks()
        self.findings: list[Culprit] = []  # what came of the last look
        self._at: tuple[int, int, Any] = (0, 0, None)
        self._watch: OperationWatch | None = None
        self.seen: RankLook | None = None  # by this rank, of the microbatch computed last
        self._again: dict[Node, list[Tensor]] = {}
        self._awaited = self.active = False

    def batches(self, headers: Sequence[Header]) -> Iterator[Any]:
        """Microbatches of mine, each to see one backward. `findings` holds what came of it."""
        engine, guards = self._engine, self._guards
        policy, step = guards.policy, headers[0].step
        self.findings = []
        if policy is None or not policy.inspect:
            return
        watched = guards.is_nonfinite(headers)
        if not watched and not guards.is_spike(headers):
            return
        leaves = self._suspected(headers) if watched else leaves_of(engine.sums.slots)
        with apart(engine, paused=True):
            for leaf in (leaf for leaf in leaves if not engine.is_empty(step, leaf)):
                self._others.look(step, leaf, watched=watched)
                yield from self._one(step, leaf, watched=watched)
                if watched and self.seen is not None:
                    self.findings += seen_by_ranks([self.seen, *self._others.looked()])
                if self.findings and self.findings[-1].reproduced:
                    break
        if not watched:
            self.findings += [*self.unlike(), *self._others.unlike(step)]
        self.findings = [seen for seen in self.findings if seen.reproduced] or self.findings[:1]

    def follow(self, step: int, leaf: int, *, watched: bool) -> Iterator[Any]:
        """My microbatch of a leaf that the lead of my replica looks at."""
        with apart(self._engine, paused=True):
            yield from self._one(step, leaf, watched=watched)

    def _one(self, step: int, leaf: int, *, watched: bool) -> Iterator[Any]:
        """My microbatch of the leaf, to see one backward, in which its gradients go nowhere."""
        watch = OperationWatch.over(self._engine.state.model) if watched else None
        batch = prepare(self._port, self._engine, step, leaf, Phase.RECOMPUTE)
        self._at, self._watch, self.seen, self._awaited = (step, leaf, batch), watch, None, True
        self.active = True
        with watch or contextlib.nullcontext():
            yield batch
        self.active = False
        if self._awaited:
            raise missing_backward(step, leaf)

    def _suspected(self, headers: Sequence[Header]) -> list[int]:
        """Leaves of mine with a loss that is not finite; if all losses are, those under sums of mine that are not, or
        whose norm is too large to be."""
        sums, width = self._engine.sums, self._engine.shards.width
        bad = {at // width for header in headers for at, loss, _ in header.losses if not math.isfinite(loss)}
        if bad:
            return sorted(bad.intersection(leaves_of(sums.slots)))
        return sorted({*self.overflowing(), *self._others.suspects(headers[0].step)})

    def overflowing(self) -> list[int]:
        """Leaves under sums of mine that are not finite, or whose norm is too large to be."""
        sums, memory = self._engine.sums, self._engine.memory
        return leaves_of(node for node, slot in sums.slots.items() if any(map(_overflows, memory.flats(slot))))

    def taken(self) -> list[Culprit]:
        """What was found, once: it is told in one round only."""
        found, self.findings = self.findings, []
        return found

    def backward(self, loss: Tensor) -> None:
        """The backward of such a microbatch: look at the gradients, and forget them."""
        step, leaf, _ = self._at
        self._awaited = False
        grads = gradients(self._engine, loss, 1.0 if self._alone else self._weight(step, leaf))
        if self._watch is None:
            self._add(grads)
        else:
            self._tell(grads, float(loss.detach()), self._watch)

    @property
    def _alone(self) -> bool:
        return self._engine.shards.width == 1

    def _weight(self, step: int, leaf: int) -> float:
        return self._engine.weight(step, self._engine.mine(leaf))

    def _tell(self, grads: Sequence[Tensor | None], loss: float, watch: OperationWatch) -> None:
        step, leaf, batch = self._at
        names, mine = self._engine.state.names, self._engine.mine(leaf)
        bad = [name for name, grad in zip(names, grads, strict=True) if grad is not None and _overflows(grad)]
        samples, sure = bad_samples(batch, watch.rows, self._engine.samples.read_here(step, mine))
        found = self._culprit(
            microbatch=mine,
            samples=tuple(samples),
            sure=sure,
            reproduced=bool(bad) or not math.isfinite(loss),
            parameter=bad[-1] if bad else "",
            module=watch.module,
            operation=watch.operation,
            where=watch.where,
        )
        self.seen = RankLook(found, bool(watch.operation) or sure or not math.isfinite(loss))

    def _culprit(self, **what: Any) -> Culprit:
        env = self._port.env
        return Culprit(replica=env.me, host=env.agent, device=self._port.device, **what)

    # --- the same share once more --------------------------------------------------------------------------------
    def _add(self, grads: Sequence[Tensor | None]) -> None:
        """Into a tree of its own: the same additions as the accumulator's, hence the same bits."""
        step, leaf, _ = self._at
        weight = self._weight(step, leaf) if self._alone else 1.0
        views = self._engine.memory.views(0)
        mine = []
        for grad, view in zip(grads, views, strict=True):
            part = torch.zeros_like(view) if grad is None else grad.to_dense().to(view)
            mine.append(part * weight if weight != 1.0 and grad is not None else part)
        steps = merges(self._again.keys(), leaf, self._engine.num_leaves, self._engine.num_rows)
        self._again[leaf, leaf + 1] = mine
        for left, right, parent in steps:
            pairs = zip(self._again.pop(left), self._again.pop(right), strict=True)
            self._again[parent] = [a + b for a, b in pairs]

    def unlike(self) -> list[Culprit]:
        """Sums that came out otherwise, by the first parameter that differs. Forgets what was computed again."""
        names, memory = self._engine.state.names, self._engine.memory
        found = []
        for node, slot in self._engine.sums.slots.items():
            if node not in self._again:
                continue  # it holds a microbatch without samples
            rows = zip(names, memory.views(slot), self._again[node], strict=True)
            differ = [name for name, old, new in rows if fingerprint(old) != fingerprint(new)]
            if differ:
                one = self._alone and node[1] - node[0] == 1
                found.append(self._culprit(microbatch=node[0] if one else -1, parameter=differ[0]))
        self._again.clear()
        return found


def bad_samples(batch: Any, rows: Sequence[tuple[int, int]], indices: Sequence[int]) -> tuple[list[int], bool]:
    """(sample indices, whether their own values are not finite). `rows`: (row, of how many) of an activation.

    Where neither the data nor the activation's first dimension tells samples apart, all of the microbatch.
    """
    count = len(indices)
    own = {row for tensor in float_tensors(batch) if tensor.dim() and len(tensor) == count for row in bad_rows(tensor)}
    if own:
        return [indices[row] for row in sorted(own)], True
    if rows and count and rows[0][1] % count == 0 and rows[0][1]:
        each = rows[0][1] // count
        return [indices[at] for at in sorted({row // each for row, _ in rows})], False
    return list(indices), False


def _overflows(tensor: Tensor) -> bool:
    """Whether its norm, in its own precision, is no number."""
    return not math.isfinite(float(torch.linalg.vector_norm(tensor.detach())))
