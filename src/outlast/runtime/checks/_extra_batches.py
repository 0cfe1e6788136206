"""Computing a microbatch beside the step: the loop sees one batch more, and nothing that it registered shows it.

Each caller has its own use for the gradient: the check before the first step (`reproducibility.py`, and of the plain
loop `plain_checks.py`), audits (`audits.py`) and the closer look after a hit (`inspection.py`). The random state is the
microbatch's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from outlast.core.phases import Phase
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.loop_state import LoopState
from outlast.runtime.training.state import State
from outlast.runtime.view.port import Bench
from outlast.tensors import local

__all__ = ["apart", "gradients", "gradients_of", "prepare", "put_back"]


@contextmanager
def put_back(loop: LoopState) -> Iterator[None]:
    """What the loop registered, and its settings, are afterwards as before. Outlast's own parts of the state know of no
    microbatch, and are left alone."""
    extra = loop.registered()
    saved, settings = {key: copy.deepcopy(part.state_dict()) for key, part in extra.items()}, loop.read()
    yield
    for key, values in saved.items():
        extra[key].load_state_dict(values)
    loop.write(settings)


@contextmanager
def apart(engine: Engine, *, paused: bool) -> Iterator[None]:
    """As `put_back`. `paused`: gradients go nowhere."""
    with put_back(engine.loop):
        engine.sums.paused = paused
        yield
        engine.sums.paused = False


def prepare(port: Bench, engine: Engine, step: int, leaf: int, phase: Phase) -> Any:
    """The microbatch's batch, with everything that its computation starts from; the loop's body is next."""
    port.enter(phase, leaf)
    batch = engine.prepare(step, leaf)
    port.enter(Phase.BODY, leaf)
    return batch


def gradients(engine: Engine, loss: Tensor, weight: float = 1.0) -> list[Tensor | None]:
    """As `gradients_of`. `weight`: of the microbatch, where the ranks of a replica add up theirs."""
    engine.shards.begin(weight)
    return gradients_of(engine.state, loss)


def gradients_of(state: State, loss: Tensor) -> list[Tensor | None]:
    """Gradients of the loss for all parameters, dense, None for an unused one; the parameters have none afterwards."""
    params = state.params
    for param in params:
        param.grad = None
    state.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
    grads = [None if param.grad is None else local(param.grad).to_dense() for param in params]
    for param in params:
        param.grad = None
    return grads
