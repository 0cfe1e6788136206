"""Before a replica that came in by replaying takes part: does its loop compute what the others' loops computed (41)?

It goes through the newest step with that step's outcome in hand and not yet applied. So it can compute a microbatch of
the step and hold the loss against the one that the run had. If the loss, or what it was computed from, follows from
something that was never handed on (a count that nobody registered, a hook's own memory, a sample kept from an earlier
epoch), another one comes out. Two microbatches have to say so, which other members computed as a rule: a wrong number
of one device is no fault of the loop. Told once the states of the view were compared, which may find this replica's
own state to be the wrong one. Not done with a robust rule, where a loss may be a lie, nor with bitwise = false.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from outlast.errors import LoopUnrepeatable
from outlast.runtime.checks._extra_batches import apart
from outlast.runtime.host.environment import Environment
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.losses import missing_backward
from outlast.tensors import reshard

__all__ = ["Entrance"]


class Entrance:
    """One replica's way in. `prepare`: a microbatch of a step; `active`: a backward now belongs to it."""

    def __init__(self, env: Environment, engine: Engine, prepare: Callable[[int, int], Any]) -> None:
        self._env, self._engine, self._prepare = env, engine, prepare
        self._loss: float | None = None
        self._found = ""
        self.active = False

    def batches(self) -> Iterator[Any]:
        """The extra batches, one if all is well; each must see one backward."""
        engine, unlike = self._engine, list[str]()
        late = engine.rewound() if self._env.config.bitwise else None
        if late is None:
            return
        self._found = ""
        self.active = True
        with apart(engine, paused=True):
            for leaf, loss in late.probes:
                self._loss = None
                yield self._prepare(late.step, leaf)
                if self._loss is None:
                    raise missing_backward(late.step, leaf)
                if _bits(self._loss) == _bits(loss):
                    break
                unlike.append(f"{self._loss!r} for {loss!r} in microbatch {leaf}")
            else:
                self._found = f"the loss of step {late.step} is another one: {', '.join(unlike)}" if unlike else ""
        self.active = False
        reshard(engine.state.model)  # no backward has
        engine.restore_buffers()

    def backward(self, loss: Tensor) -> None:
        """Only the loss is of use."""
        self._loss = float(loss.detach())

    def conclude(self) -> None:
        """Before the first step with others is decided. Raises LoopUnrepeatable for what was found."""
        if self._found:
            raise LoopUnrepeatable(
                f"on {self._env.me}, which has just joined, {self._found}",
                did="nothing more was committed",
                remedy="register what the loop, a hook or a weight of the loss remembers: protect(..., state={...}); "
                "draw random numbers of a dataset from torch, numpy or random, and keep none of them",
            )


def _bits(value: float) -> bytes:
    return struct.pack("<d", value) if value == value else b""
