"""Computing a microbatch beside the step: the loop sees one batch more, and nothing that it registered shows it.

Three callers, each with its own use for the gradient: the check before the first step (`_repeat.py`), audits
(`_auditing.py`) and the closer look after a hit (`_inspection.py`). The random state is the microbatch's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from outlast.core.phases import Phase
from outlast.errors import StepMisuse

if TYPE_CHECKING:
    from outlast.runtime._engine import Engine
    from outlast.runtime._replica import Replica

__all__ = ["apart", "gradients", "missing", "prepare"]


@contextmanager
def apart(engine: Engine, *, paused: bool) -> Iterator[None]:
    """What the loop registered is afterwards as before. `paused`: gradients go nowhere. Outlast's own parts of the
    state know of no microbatch, and are left alone."""
    extra = {key: part for key, part in engine.state.extra.items() if not key.startswith("outlast.")}
    saved = {key: copy.deepcopy(part.state_dict()) for key, part in extra.items()}
    engine.sums.paused = paused
    yield
    engine.sums.paused = False
    for key, values in saved.items():
        extra[key].load_state_dict(values)


def prepare(replica: Replica, step: int, leaf: int, phase: Phase) -> Any:
    """The microbatch's batch, with everything that its computation starts from; the loop's body is next."""
    replica.enter(phase, leaf)
    batch = replica.engine.prepare(step, leaf)
    replica.enter(Phase.BODY, leaf)
    return batch


def missing(step: int, leaf: int) -> StepMisuse:
    """The loop did not do with such a batch what it does with others."""
    return StepMisuse(
        f"microbatch {leaf} of step {step} got no backward", remedy="call step.backward(loss) once for each batch"
    )


def gradients(engine: Engine, loss: Tensor) -> list[Tensor | None]:
    """Of all parameters, which have none afterwards."""
    params = engine.state.params
    for param in params:
        param.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    return grads
