"""The sum over the ranks of one replica: all-to-all, then pairwise adds in the order of the microbatches' tree (36).

FSDP2 reduces the gradients of a microbatch over its ranks by a reduce-scatter. Here the library only moves bytes: each
rank gets every rank's part of its own shard and adds them in a fixed order, which is that of the lower part of the tree
over all microbatches. So one process that computes the microbatches one after the other ends with the same bits. It
does not know views, and nothing outside its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outlast.core.protocol import split
from outlast.errors import ConfigError, MembershipError, StepMisuse
from outlast.tensors import TENSOR_PARALLEL, is_shard

__all__ = ["OwnSums", "ShardSums", "sharded"]


class ShardSums:
    """What `set_custom_reduce_scatter` is given. Rank `place` of `width` computes the microbatches place, place +
    width, and so on; ranks of tensor parallelism, which compute each together, count as one. `weight`: of its
    microbatch, set before the backward; `calls`: gradients were reduced since."""

    def __init__(self, place: int = 0, width: int = 1) -> None:
        self.place, self.width = place, width
        self.weight, self.calls = 1.0, 0
        self.before_reducing: Callable[[], None] = lambda: None  # before FSDP looks for a gradient to add to

    def begin(self, weight: float) -> None:
        """A microbatch's backward is next."""
        self.weight, self.calls = weight, 0

    def attach(self, model: torch.nn.Module) -> None:
        """Have every module of `model` that `fully_shard` wrapped reduce its gradients here: their sum, undivided."""
        from torch.distributed.fsdp import FSDPModule  # takes a second to load; who comes here has it

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    # --- what FSDP calls -----------------------------------------------------------------------------------------
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's buffers. It asks for it first of all, and of one rank nothing else."""
        self.before_reducing()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """output = the sum, over the ranks of `group` in their order, of my shard of `input_tensor`."""
        self.calls += 1
        if input_tensor.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"gradients would be summed over the ranks in {str(input_tensor.dtype).removeprefix('torch.')}, and "
                "over microbatches in float32: the sum would depend on the number of ranks",
                remedy="fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype="
                "torch.float32))",
            )
        if not self.weight:
            input_tensor.zero_()  # also what is not finite, or below zero
        elif self.weight != 1.0:
            input_tensor.mul_(self.weight)
        from torch import distributed as dist

        received = torch.empty_like(input_tensor)
        try:
            dist.all_to_all_single(received, input_tensor, group=group)
        except RuntimeError as error:
            raise MembershipError(
                f"the ranks of this replica could not exchange gradients ({error})",
                did="this replica ends",
                remedy="outlast why tells which of its ranks was lost first",
            ) from error
        output_tensor.copy_(_added(list(received.chunk(group.size())), (0, group.size())))

    def ended(self) -> None:
        """The microbatch's backward is over. Raises StepMisuse if no gradient was reduced in it."""
        if not self.calls:
            raise StepMisuse(
                "no gradient of this microbatch was reduced over the ranks",
                did="the step was not committed",
                remedy="leave set_requires_gradient_sync() of FSDP at True: outlast adds up microbatches itself",
            )


class OwnSums(ShardSums):
    """FSDP's own sums, as a plain loop has them: nothing but the moment before them is taken from it."""

    def attach(self, model: torch.nn.Module) -> None:
        """Have every module of `model` that `fully_shard` wrapped ask here before it reduces."""
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """As FSDP reduces where nobody else does."""
        from torch import distributed as dist

        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _added(rows: list[Tensor], node: tuple[int, int]) -> Tensor:
    """The sum of rows lo..hi-1, in the tree's order; overwrites them."""
    lo, hi = node
    if hi - lo == 1:
        return rows[lo]
    left, right = split(node)
    return _added(rows, left).add_(_added(rows, right))


def sharded(named: Sequence[tuple[str, Tensor]], width: int, tensor_parallel: int = 1) -> bool:
    """Whether parameters are shards: by rows over `width` ranks, and by tensor parallelism over so many. ConfigError if
    they are not all spread so."""
    if width * tensor_parallel == 1 and not any(is_shard(param) for _, param in named):
        return False
    for name, param in named:
        if tensor_parallel > 1 and not _divides(param, tensor_parallel):
            raise ConfigError(
                f"{name} is not cut into equal parts by the {tensor_parallel} ranks of tensor parallelism",
                remedy='mesh=run.mesh(tp=...)["tp"], or run.mesh(tp=...) itself where it has no other dimension, for '
                "parallelize_module; and sizes that the number of ranks divides",
            )
        if not _by_rows(param, width):
            raise ConfigError(
                f"{name} is not sharded by rows over the {width} ranks of this replica",
                remedy="mesh = run.mesh(); fully_shard(model, mesh=mesh), before the optimizer is made and for every "
                "parameter that it trains, also beside tensor parallelism; ignored parameters are not done yet",
            )
    return True


def _dims(param: Any) -> list[tuple[str, int, Any]]:
    """(name, ranks, placement) of each dimension that a parameter is spread over."""
    if not is_shard(param):
        return []
    mesh = param.device_mesh
    return list(zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, param.placements, strict=True))


def _by_rows(param: Any, width: int) -> bool:
    rows = [(size, placement) for name, size, placement in _dims(param) if name != TENSOR_PARALLEL]
    if not rows:
        return width == 1
    return len(rows) == 1 and rows[0][0] == width and _along(rows[0][1]) == 0


def _along(placement: Any) -> int | None:
    """The dimension that a placement cuts; what FSDP cuts after tensor parallelism has is no `Shard` to torch."""
    return getattr(placement, "dim", None)


def _divides(param: Any, ranks: int) -> bool:
    for name, size, placement in _dims(param):
        along = _along(placement)
        whole = placement.is_replicate() or (along is not None and not param.shape[along] % ranks)
        if name == TENSOR_PARALLEL and (size != ranks or not whole):
            return False
    return True
