"""What a loop does at an epoch's start is done once: who comes in amid the epoch goes through it again, to no effect.

The state that it came in with has been through it already. So settings and registered state are put back before the
epoch's next step; what cannot be put back is refused. What is drawn there is what those drew who began the epoch. Does
not know why the replica came in here.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outlast.errors import LoopUnrepeatable
from outlast.runtime.loop._iterators import values_of
from outlast.runtime.loop._own_lines import OwnLines
from outlast.runtime.training.loop_state import LoopState
from outlast.runtime.training.state import State
from outlast.tensors import local

__all__ = ["kept"]


def kept(loop: LoopState, lines: OwnLines, number: int, size: int) -> Callable[[], None]:
    """Remember what the loop may change; step `number` is next, of epochs of `size` steps. What is returned puts it
    back, and raises LoopUnrepeatable where parameters, or what optimizers keep, were written."""
    state, settings, registered = loop.state, loop.read(), loop.registered_now()
    written = values_of(_unkept(state))
    lines.before(number // size * size)

    def put_back() -> None:
        if values_of(_unkept(state)) != written:
            raise LoopUnrepeatable(
                "the code at the start of an epoch wrote parameters or what the optimizer keeps, and this replica came "
                f"in at step {number}, amid the epoch: the same would be done to them twice",
                did="nothing more was trained",
                remedy="do it after the loop over the epoch before: `for epoch in training.epochs(n):` `for step in "
                "epoch:` … and then this; that is done once, with the epoch's last step",
            )
        loop.write(settings)
        loop.put_registered(registered)
        lines.before(number)

    return put_back


def _unkept(state: State) -> list[Tensor]:
    held = [t for o in state.optimizers for row in o.state.values() if isinstance(row, dict) for t in row.values()]
    return [local(t) for t in (*state.params, *held) if isinstance(t, Tensor)]
