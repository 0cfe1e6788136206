"""Computing a microbatch beside the step: the loop sees one batch more, and nothing that it registered shows it.

Three callers, each with its own use for the gradient: the check before the first step (`reproducibility.py`), audits
(`audits.py`) and the closer look after a hit (`inspection.py`). The random state is the microbatch's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from outlast.core.phases import Phase
from outlast.runtime.training.engine import Engine
from outlast.runtime.view.port import Bench
from outlast.tensors import local

__all__ = ["apart", "gradients", "prepare"]


@contextmanager
def apart(engine: Engine, *, paused: bool) -> Iterator[None]:
    """What the loop registered is afterwards as before. `paused`: gradients go nowhere. Outlast's own parts of the
    state know of no microbatch, and are left alone."""
    extra = engine.loop.registered()
    saved, settings = {key: copy.deepcopy(part.state_dict()) for key, part in extra.items()}, engine.loop.read()
    engine.sums.paused = paused
    yield
    engine.sums.paused = False
    for key, values in saved.items():
        extra[key].load_state_dict(values)
    engine.loop.write(settings)


def prepare(port: Bench, engine: Engine, step: int, leaf: int, phase: Phase) -> Any:
    """The microbatch's batch, with everything that its computation starts from; the loop's body is next."""
    port.enter(phase, leaf)
    batch = engine.prepare(step, leaf)
    port.enter(Phase.BODY, leaf)
    return batch


def gradients(engine: Engine, loss: Tensor, weight: float = 1.0) -> list[Tensor | None]:
    """Gradients of the loss for all parameters, dense, None for an unused one; the parameters have none afterwards.
    `weight`: of the microbatch, where the ranks of a replica add up theirs."""
    params = engine.state.params
    engine.shards.begin(weight)
    for param in params:
        param.grad = None
    engine.state.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
    grads = [None if param.grad is None else local(param.grad).to_dense() for param in params]
    for param in params:
        param.grad = None
    return grads
