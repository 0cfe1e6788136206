"""Tensors of which this process holds a part: what is here of them, and a grid that does not depend on how many share.

A parameter that is sharded by rows over the ranks of a replica (torch's DTensor) is, for everything that adds, copies
or fingerprints, the rows that lie here. Norms and fingerprints must not depend on the number of ranks, so their blocks
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

__all__ = ["WIDEST", "Grid", "grid_of", "is_shard", "like", "local", "part_of", "reshard", "whole"]

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
    """Of the values of a whole parameter the rows that lie here, sharing its memory; any other value as it is."""
    if not is_shard(param) or is_shard(value) or value.shape != param.shape:
        return value
    rows, place = -(-param.shape[0] // param.device_mesh.size()), param.device_mesh.get_local_rank()
    return value[place * rows : (place + 1) * rows]


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
