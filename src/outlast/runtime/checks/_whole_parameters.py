"""What tensor parallelism leaves whole: does every rank train it alike?

Replicas are compared lane by lane, and nobody compares the ranks of one with each other. A parameter that they hold
whole goes apart in silence where its gradient is of a part of the sequence alone, which nobody adds up.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor

from outlast.errors import LoopUnrepeatable
from outlast.runtime.training.state import State
from outlast.tensors import fingerprint, local

__all__ = ["WholeParameters"]

_DIMENSION = "tp"


class WholeParameters:
    """Compares what the ranks along "tp" hold whole of `state`; where no parameter is spread along it, nothing. Every
    rank must call what is here, at the same places of the same steps."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._alike: list[str] = []

    def before(self) -> None:
        """Before the optimizers' step."""
        self._alike = self._alike_now()

    def after(self, step: int) -> None:
        """After it. Raises LoopUnrepeatable for what was alike on all ranks and is not any more."""
        before, self._alike = self._alike, []
        now = set(self._alike_now()) if before else set()
        apart = [name for name in before if name not in now]
        if apart:
            more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
            raise LoopUnrepeatable(
                f'{apart[0]}{more}: whole on each rank along "{_DIMENSION}", and since step {step} not the same on '
                "all of them, as if each had the gradient of its own part of a sequence",
                did="it was found in the first steps, before any fault",
                remedy="SequenceParallel() in parallelize_module for a module that is given a part; if each rank "
                "shall have values of its own, make the parameter a DTensor, or give it a name of its own on each",
            )

    def _alike_now(self) -> list[str]:
        rows = list(zip(self._state.names, self._state.params, strict=True))
        group = next((_mesh(param).get_group(_DIMENSION) for _, param in rows if _is_cut(param)), None)
        whole = {name: local(param.detach()) for name, param in rows if not _is_cut(param)}
        if group is None:
            return []
        values = [fingerprint(tensor.cpu()) for tensor in whole.values()]
        named = [len(values), xxhash.xxh3_64_intdigest("\n".join(whole).encode())]
        if not all(_same(named, group)) or not values:  # where ranks hold others, nothing is compared
            return []
        return [name for name, alike in zip(whole, _same(values, group), strict=True) if alike]


def _mesh(param: Tensor) -> Any:
    return getattr(param, "device_mesh", None)


def _is_cut(param: Tensor) -> bool:
    return _DIMENSION in (getattr(_mesh(param), "mesh_dim_names", None) or ())


def _same(values: list[int], group: Any) -> list[bool]:
    """Whether each of these, of 64 bits, is the same on all ranks of the group."""
    from torch import distributed as dist

    least = torch.tensor([value - (1 << 63) for value in values])
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    found: list[bool] = (least == most).tolist()
    return found
