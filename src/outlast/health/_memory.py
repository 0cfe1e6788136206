"""Bits that changed where they lay: what they were follows from a row's sum and its sum of squares.

If one element of a row went from x to y, the sum changed by y - x and the sum of squares by y^2 - x^2, both known in
double precision; only an element that is y now and a bit pattern that was x explain both. Another element may be y too,
so the sums of the columns say which of them it was. Nothing is guessed: where several elements of a row changed, or no
single one explains the sums, there is no answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outlast.tensors import Sums

__all__ = ["WrongBits", "repair", "same_sums", "wrong_bits"]

MOST_ROWS = 16
"""More rows than that were written by a program (through `.data`, which torch does not count), not by bad memory."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class WrongBits:
    """How many elements differ; of the first: its row and column, in two dimensions, and which bits."""

    count: int
    row: int
    column: int
    bits: tuple[int, ...]


def wrong_bits(wrong: Tensor, right: Tensor) -> WrongBits:
    """Where two tensors of one shape differ in bits."""
    words = [x.detach().contiguous().view(_WORDS[x.element_size()]).reshape(-1) for x in (wrong, right)]
    places = (words[0] != words[1]).nonzero().reshape(-1)
    if not places.numel():
        return WrongBits(0, -1, -1, ())
    first, width = int(places[0]), 8 * wrong.element_size()
    flipped = (int(words[0][first]) ^ int(words[1][first])) & ((1 << width) - 1)
    columns = wrong.shape[-1] if wrong.dim() else 1
    return WrongBits(
        int(places.numel()), first // columns, first % columns, tuple(i for i in range(width) if flipped >> i & 1)
    )


def repair(matrix: Tensor, before: tuple[Sums, Sums], now: tuple[Sums, Sums]) -> bool | None:
    """Put a matrix's changed bits back, in place. `before`, `now`: sums of its rows and of its columns.

    False: nothing had changed, or so much that somebody wrote it. None: it had changed, and how cannot be told."""
    rows, columns = (_changed(was, becomes) for was, becomes in zip(before, now, strict=True))
    if not 0 < len(rows) <= MOST_ROWS:
        return False
    found = [_element(matrix[row], before[0], row, columns) for row in rows.tolist()]
    if any(each is None for each in found):
        return None
    with torch.no_grad():
        for row, each in zip(rows.tolist(), found, strict=True):
            assert each is not None
            _set(matrix, row, *each)
    return True


def same_sums(left: Sums, right: Sums) -> bool:
    """Whether two matrices have the same sums, to the bit."""
    return not len(_changed(left, right))


def _changed(before: Sums, now: Sums) -> Tensor:
    """Rows whose sums are others."""
    differs = (_bits(before.sums) != _bits(now.sums)) | (_bits(before.squares) != _bits(now.squares))
    return differs.nonzero().reshape(-1)


def _bits(sums: Tensor) -> Tensor:
    return sums.view(torch.int64)  # a NaN equals itself


def _set(matrix: Tensor, row: int, column: int, word: int) -> None:
    """Write without a trace: versions count what was meant."""
    matrix.detach().data.view(_WORDS[matrix.element_size()])[row, column] = word


def _element(values: Tensor, before: Sums, row: int, columns: Tensor) -> tuple[int, int] | None:
    """(column, the bits that it had) of the one element of this row, in these columns, that changed by one bit."""
    if not len(columns):
        return None
    words = values.detach().contiguous().view(_WORDS[values.element_size()])
    width = 8 * values.element_size()
    total, squares = float(before.sums[row]), float(before.squares[row])
    best: list[tuple[float, int, int]] = []
    wide = values.detach().double()
    rest, rest_squares = _leave_one_out(wide)
    for bit in range(width):
        mask = (1 << bit) - (1 << width if bit == width - 1 else 0)
        flipped = (words ^ mask).view(values.dtype).double()
        off = (rest + flipped - total).abs() + (rest_squares + flipped * flipped - squares).abs()
        off = torch.where(torch.isfinite(off), off, torch.inf)[columns]
        for place in off.argsort()[:2].tolist():  # two of one bit: the second must be far worse as well
            column = int(columns[place])
            best.append((float(off[place]), column, int(words[column]) ^ mask))
    best.sort()
    size = abs(squares) + abs(total) + float(values.numel()) * 1e-300
    if best[0][0] <= 1e-11 * size and (len(best) < 2 or best[1][0] > 4 * best[0][0] or best[1][0] > 1e-11 * size):
        return best[0][1], best[0][2]
    return None


def _leave_one_out(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and sums of squares of all elements but each one; right also where one of them is huge."""
    zero = torch.zeros(1, dtype=wide.dtype)
    results = []
    for x in (wide, wide * wide):
        x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) if not bool(torch.isfinite(x).all()) else x
        below = torch.cat([zero, x.cumsum(0)[:-1]])
        above = torch.cat([x.flip(0).cumsum(0).flip(0)[1:], zero])
        results.append(below + above)
    return results[0], results[1]
