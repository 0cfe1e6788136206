"""Tensors of which this process holds a part: what is here of them, and a grid that does not depend on how many share.

A parameter that is sharded over the ranks of a replica (torch's DTensor) is, for everything that adds, copies or
fingerprints, what lies here. Tensor parallelism cuts first, along a dimension of its own; FSDP then shares the rows of
what it leaves. Norms and fingerprints must not depend on the number of ranks, so their blocks
are cut and numbered on the finest grid that any number of ranks up to `WIDEST` makes: no block straddles two cells of
it, and the cells of a rank follow each other. Nothing here communicates, but for `whole`.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "TENSOR_PARALLEL",
    "WIDEST",
    "Grid",
    "gradient_of",
    "grid_of",
    "grid_of_params",
    "is_shard",
    "like",
    "local",
    "on_mesh",
    "part_of",
    "reshard",
    "whole",
]

TENSOR_PARALLEL = "tp"
"""Name of the mesh's dimension over which tensor parallelism spreads a module; all others share rows."""

WIDEST = 8
"""Ranks of a replica, at most: their number divides the grid."""


def _kind() -> Any:
    """DTensor, if anybody has loaded it: that takes a second, and most runs need none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is spread over the ranks of a replica."""
    return isinstance(tensor, _kind())


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        held: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return held


def like(value: Tensor, param: Any) -> Tensor:
    """The values of this process as a tensor that is spread as `param` is; `value` itself where that is not spread."""
    if not is_shard(param) or is_shard(value):
        return value
    made: Tensor = _kind().from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return made


def part_of(value: Tensor, param: Any) -> Tensor:
    """What lies here of a whole parameter's values, sharing its memory; any other value as it is."""
    if not is_shard(param) or is_shard(value) or value.shape != param.shape:
        return value
    mesh = param.device_mesh
    cuts = list(zip(param.placements, mesh.shape, mesh.get_coordinate(), strict=True))
    for placement, size, where in sorted(cuts, key=lambda cut: hasattr(cut[0], "split_factor")):
        if not placement.is_replicate():  # FSDP's cut comes after that of a later dimension, and says so
            value = _chunk(value, placement.dim, size, where)
    return value


def _chunk(value: Tensor, dim: int, size: int, where: int) -> Tensor:
    """Part `where` of `size`, as `torch.chunk` cuts."""
    total = value.shape[dim]
    length = -(-total // size)
    start = min(where * length, total)
    return value.narrow(dim, start, min(length, total - start))


def gradient_of(param: Any) -> Tensor | None:
    """A parameter's gradient, spread as it is. What tensor parallelism left as a sum to be made is made: of that all
    ranks of the dimension must ask, in the same order."""
    grad = param.grad
    if is_shard(grad) and is_shard(param) and tuple(grad.placements) != tuple(param.placements):
        grad = grad.redistribute(placements=param.placements)
    return grad  # type: ignore[no-any-return]


def on_mesh(tensor: Tensor, mesh: Any) -> Tensor:
    """A tensor that is spread over some dimensions of a mesh, and equal over the others, as one of all of it."""
    if not is_shard(tensor) or tensor.device_mesh.ndim == mesh.ndim:  # type: ignore[attr-defined]
        return tensor
    from torch.distributed.tensor import Replicate

    spread: Any = tensor
    over = dict(zip(spread.device_mesh.mesh_dim_names or (), spread.placements, strict=False))
    where = [over.get(name, Replicate()) for name in mesh.mesh_dim_names]
    made: Tensor = _kind().from_local(
        spread.to_local(), mesh, where, run_check=False, shape=spread.shape, stride=spread.stride()
    )
    return made


def _parts_of(param: Any) -> tuple[list[tuple[int, ...]], int]:
    """(shapes of the parts that tensor parallelism has cut a parameter into, which of them is here). One, of the whole,
    where it has not."""
    shape = tuple(param.shape) or (1,)
    if is_shard(param):
        mesh = param.device_mesh
        for name, size, where, placement in zip(
            mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, mesh.get_coordinate(), param.placements, strict=True
        ):
            if name == TENSOR_PARALLEL and not placement.is_replicate():
                cut = [list(shape) for _ in range(size)]
                for row in cut:
                    row[placement.dim] //= size
                return [tuple(row) for row in cut], where
    return [shape], 0


def whole(tensor: Any) -> Tensor:
    """All of a tensor. Of one that is spread every rank must ask, in the same order."""
    found: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor
    return found


def reshard(model: torch.nn.Module) -> None:
    """Let go of what FSDP gathered for a forward that no backward followed. Until then the model's parameters are whole
    copies, which an optimizer's step does not reach and what is written to them is lost with."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in model.modules():
        if isinstance(module, kind):
            module.reshard()


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the blocks of one rank's shards are. `cells`: of each parameter, in the order of its rows: elements, and
    the number of the first block; `num_blocks`: over all ranks."""

    cells: tuple[tuple[tuple[int, int], ...], ...]
    num_blocks: int


def grid_of(shapes: Sequence[Sequence[int]], place: int, width: int, block: int) -> Grid:
    """The cells of rank `place` of `width`, of parameters of these (whole) shapes, sharded by rows as `torch.chunk`
    does. Blocks of up to `block` elements are numbered by cells from the first rows to the last, and in a cell from the
    last parameter to the first."""
    found: list[tuple[int, int, int, int]] = []  # (the cell's place, parameter from behind, rows)
    for index, shape in enumerate(shapes):
        rows = shape[0]
        finest = max(1, -(-rows // WIDEST))
        widths = [1 << power for power in range(WIDEST.bit_length())]
        edges = sorted({min(i * -(-rows // k), rows) for k in widths for i in range(k + 1)})
        found += [(lo // finest, len(shapes) - index, lo, hi) for lo, hi in itertools.pairwise(edges)]
    cells: list[list[tuple[int, int]]] = [[] for _ in shapes]
    number = 0
    for _, behind, lo, hi in sorted(found):
        shape = shapes[len(shapes) - behind]
        chunk, elements = -(-shape[0] // width), (hi - lo) * math.prod(shape[1:])
        if place * chunk <= lo < (place + 1) * chunk and elements:
            cells[len(shapes) - behind].append((elements, number))
        number += -(-elements // block)
    return Grid(tuple(tuple(row) for row in cells), number)


def grid_of_params(params: Sequence[Any], place: int, width: int, block: int) -> Grid:
    """`grid_of` for parameters as they are here. The parts of tensor parallelism follow each other as parameters would;
    what is equal on all its ranks has the same blocks on all of them."""
    parts = [_parts_of(param) for param in params]
    grid = grid_of([shape for shapes, _ in parts for shape in shapes], place, width, block)
    before = itertools.accumulate((len(shapes) for shapes, _ in parts), initial=0)
    cells = tuple(grid.cells[first + mine] for first, (_, mine) in zip(before, parts, strict=False))
    return Grid(cells, grid.num_blocks)
