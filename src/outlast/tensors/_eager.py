"""The eager path: programs, mixtures and Gram blocks in plain torch operations, on any device.

Role: the semantics. What `_kernels.c` computes for float32 rows on a CPU is what this file computes, bit for bit;
everything else (CUDA, float64, no compiler) runs here. Works in chunks of columns so that extra memory is a few
megabytes whatever the length of the rows.

Invariants: every float64 sum, difference and quotient is an elementwise operation in a written order, except the sums
inside a Gram tile, which are exact in any order (see `center_and_round`). Nothing here writes to a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outlast.tensors._mixture import Mixture
from outlast.tensors._program import Program

__all__ = ["TILE", "center_and_round", "compute_dtype", "gram_block", "mix_rows", "run_program", "tree_sum"]

TILE = 128  # elements of a tile: sums over one are exact
CHUNK = {"cpu": 1 << 14, "cuda": 1 << 20}

Row = Tensor | None  # None: a row of zeros


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The narrow type of rows of this dtype: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(num_columns: int, device: torch.device, lo: int = 0) -> list[tuple[int, int]]:
    step = CHUNK.get(device.type, 1 << 18)
    return [(at, min(at + step, num_columns)) for at in range(lo, num_columns, step)]


def run_program(program: Program, rows: Sequence[Tensor], out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Run a program on short rows (w,). Returns the result in the narrow type, and the rows' least and largest value.

    The caller cuts long rows into chunks: every operation of the program makes a tensor of the rows' length.
    """
    narrow = compute_dtype(rows[0].dtype)
    last, values = program.last_uses(), list[Tensor | float | None]()
    for place, op in enumerate(program.ops):
        args = [values[arg] for arg in op.args]
        if op.kind == "row":
            value: Tensor | float = _entering(rows[int(op.const)].to(narrow))
        elif op.kind == "const":
            value = op.const
        else:
            value = _apply(op.kind, args, op.const)
        values.append(value)
        for arg in op.args:
            if last[arg] == place:
                values[arg] = None
    result, low, high = values[program.result], values[program.low], values[program.high]
    assert isinstance(result, Tensor)
    assert isinstance(low, Tensor)
    assert isinstance(high, Tensor)
    return result.to(narrow), low, high


def _entering(row: Tensor) -> Tensor:
    return torch.nan_to_num(row, nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))


def _apply(kind: str, args: list[Tensor | float | None], const: float) -> Tensor | float:
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
    tensors = [arg if isinstance(arg, Tensor) else _number(arg, device) for arg in args]
    a, b = tensors[0], tensors[-1]
    if kind == "wide":
        return a.double()
    if kind == "div":  # by a tensor: dividing by a number may become a product with its reciprocal on CUDA
        return a / _number(const, device)
    if kind == "pick":
        return torch.where(a < tensors[1], tensors[2], tensors[3])
    if kind == "add":
        return a + b
    if kind == "sub":
        return a - b
    return torch.minimum(a, b) if kind == "min" else torch.maximum(a, b)


def _number(value: float | None, device: torch.device) -> Tensor:
    assert value is not None
    return torch.full((), value, dtype=torch.float64, device=device)


def mix_rows(rows: Sequence[Row], mixture: Mixture, like: Tensor) -> list[Tensor]:
    """The mixed rows (w,) in the narrow type: each a sum in float64, in the mixture's order, rounded once."""
    pairs, sums = mixture.shared
    wide = {
        place: row.double() for place, row in enumerate(rows) if row is not None and mixture.weights[:, place].any()
    }
    for place, (left, right) in enumerate(pairs, start=len(rows)):
        both = [wide[side] for side in (left, right) if side in wide]
        if both:
            wide[place] = both[0] + both[1] if len(both) == 2 else both[0]
    mixed = []
    for numbers, (_, weights, equal) in zip(sums, mixture.entries(), strict=True):
        total = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        for number, weight in zip(numbers, weights, strict=False):
            if number in wide:
                total = total + (wide[number] if equal else wide[number] * weight)
        mixed.append((total * weights[0] if equal else total).to(compute_dtype(like.dtype)))
    return mixed


def center_and_round(rows: Sequence[Row], center: Tensor) -> list[Tensor]:
    """Rows minus the centre, (n, tiles, TILE), as one or two terms whose products add up without rounding.

    Each term is a multiple of 2^-21 of the power of two below the row's largest value in the tile, so it has 22 bits
    and a sign, a product has 44, and the sum of 128 products fits float64's 53: exact in any order, with or without
    fused operations, on any processor. The rest below the grid is dropped for float32 rows (whose own grid is hardly
    finer), and kept as a second term, on a grid 2^-22 finer, for float64 rows. A centre that is not finite counts as
    zero: only more bad rows than are tolerated can make it so, and no other row must look like them.
    """
    narrow = center.dtype
    center = torch.where(torch.isfinite(center), center, 0.0)
    data = torch.stack([torch.zeros_like(center) if row is None else row.to(narrow) for row in rows]) - center
    tiles = torch.nn.functional.pad(data, (0, -center.numel() % TILE)).view(len(rows), -1, TILE)
    top = tiles.abs().amax(dim=2, keepdim=True)
    if narrow == torch.float32:
        magic = (top.view(torch.int32) & 0x7F800000).view(narrow) * 6.0
        return [((tiles + magic) - magic).double()]
    magic = (top.view(torch.int64) & 0x7FF0000000000000).view(narrow) * (1.5 * 2.0**31)
    first = (tiles + magic) - magic
    magic = magic * 2.0**-22
    return [first, ((tiles - first) + magic) - magic]


def gram_block(rows: Sequence[Row], center: Tensor) -> Tensor:
    """The Gram matrix (n, n) of at most one block of columns, centred; tiles are added as a balanced tree."""
    terms = [term.transpose(0, 1).contiguous() for term in center_and_round(rows, center)]
    tiles = torch.bmm(terms[0], terms[0].transpose(1, 2))
    if len(terms) == 2:
        cross = torch.bmm(terms[0], terms[1].transpose(1, 2))
        tiles = (tiles + (cross + cross.transpose(1, 2))) + torch.bmm(terms[1], terms[1].transpose(1, 2))
    return tree_sum(tiles)


def tree_sum(parts: Tensor) -> Tensor:
    """Sum over the first axis: neighbours first, then pairs of neighbours. Zeros at the end change nothing."""
    while parts.shape[0] > 1:
        if parts.shape[0] % 2:
            parts = torch.cat([parts, torch.zeros_like(parts[:1])])
        parts = parts[0::2] + parts[1::2]
    return parts[0] if parts.shape[0] else torch.zeros(parts.shape[1:], dtype=parts.dtype, device=parts.device)
