"""What a fleet of one looks for in the first steps, for the plain loop: the same sentences from the same habits.

A script that was tried with `OUTLAST=off` shall not end in its first protected minute, nor the other way round. Works
on what is there, with no engine: one process, gradients that add up in `.grad`. Not done with bitwise = false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outlast.core.protocol.step.verdict import PartRows
from outlast.runtime.checks._extra_batches import gradients_of, put_back
from outlast.runtime.checks.rehearsal import Rehearsal
from outlast.runtime.checks.reproducibility import check_alike, printed, samples_of
from outlast.runtime.checks.unseen_averages import UnseenAverages
from outlast.runtime.training.loop_state import LoopState
from outlast.runtime.training.losses import missing_backward, second_backward, several_parts
from outlast.runtime.training.samples import Samples, batch_digest
from outlast.tensors import is_shard

__all__ = ["PlainChecks"]

_ROUNDS = 2


class PlainChecks:
    """Goes with one plain loop. `name`: of the process; `bitwise`: as in the configuration; `asked`: how often the loop
    has asked whether it writes. `active`: a backward now belongs to a check."""

    def __init__(
        self, loop: LoopState, samples: Samples, name: str, *, bitwise: bool, asked: Callable[[], int]
    ) -> None:
        self._loop, self._state, self._samples, self._name = loop, loop.state, samples, name
        self._bitwise, self._asked = bitwise, asked
        self._rehearsal: Rehearsal | None = None
        self._averages: UnseenAverages | None = None
        self._rows: list[PartRows] = []
        self._wanted: PartRows = ()  # of the batch under way, what is known before its backward
        self._looked_at_parts = False
        self.active = False
        samples.doubted = bitwise

    def start(self) -> None:
        """The loop begins; nothing is loaded yet."""
        self._loop.find_schedulers()
        alone = lambda: True  # noqa: E731
        if self._bitwise:
            self._rehearsal = Rehearsal(self._state, alone)
            self._averages = UnseenAverages(self._state, alone, alone, self._asked)

    def begun(self, step: int) -> None:
        """The inner loop of this step begins."""
        if self._rehearsal is not None:
            self._rehearsal.begun(step, self._loop.written())
        self._loop.begin(step)

    def again(self, prepare: Callable[[], Any]) -> Iterator[Any]:
        """The first microbatch of the first step twice more, each to see one backward; `prepare` gives its batch.
        Raises what `check_alike` does. Module buffers, settings and registered state are afterwards as before."""
        if not self._bitwise:
            return
        buffers = [(buffer, buffer.clone()) for buffer in self._state.buffers.values()]
        self._rows, self.active = [], True
        with put_back(self._loop):
            for number in range(_ROUNDS):
                batch = prepare()
                self._wanted = ((samples_of(0), batch_digest(batch)),)
                yield batch
                if len(self._rows) == number:
                    raise missing_backward(0, 0)
                with torch.no_grad():
                    for buffer, was in buffers:
                        buffer.copy_(was)
        self.active = False
        rows = {f"{self._name}, time {number + 1}": found for number, found in enumerate(self._rows)}
        check_alike(rows, self._samples, (0,))

    def backward(self, loss: Tensor) -> None:
        """Fingerprint the gradients and forget them."""
        if not self._wanted:
            raise second_backward()
        self._rows.append((*self._wanted, *printed(self._state.names, gradients_of(self._state, loss))))
        self._wanted = ()

    @contextmanager
    def parts(self) -> Iterator[None]:
        """Around a backward of the step. Raises StepMisuse if it comes to a parameter more than once; looked at in the
        first one, where a habit shows."""
        if self._looked_at_parts or any(map(is_shard, self._state.params)):
            yield
            return
        seen: list[int] = []
        hooks = [
            param.register_post_accumulate_grad_hook(lambda held: seen.append(id(held)))  # type: ignore[no-untyped-call]
            for param in self._state.params
            if param.requires_grad
        ]
        yield
        for hook in hooks:
            hook.remove()
        self._looked_at_parts = True
        if len({*seen}) < len(seen):
            raise several_parts()

    def computed(self) -> None:
        """All microbatches are; raises LoopUnrepeatable for what was changed meanwhile."""
        self._loop.check()

    def replay(self) -> None:
        """Before the optimizers' step, with the gradients in place."""
        if self._rehearsal is not None:
            self._rehearsal.replay()

    def compare(self, step: int) -> None:
        """After it. Raises what `Rehearsal.compare` does."""
        if self._rehearsal is not None:
            self._rehearsal.compare(step)

    def applied(self, *, overflow: bool) -> None:
        """The step is applied; `overflow`: to no effect."""
        self._loop.committed()
        if overflow:
            return
        if self._averages is not None:
            self._averages.applied()
        if self._rehearsal is not None and not self._rehearsal.applied():
            self._rehearsal = None

    def over(self) -> None:
        """The loop is."""
        if self._averages is not None:
            self._averages.over()
