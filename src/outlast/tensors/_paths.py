"""Programs, mixtures and Gram matrices over long rows, by whichever path is there: compiled or eager.

Role: cut rows into chunks, choose the path, and give rows that the compiled path cannot read (half precision, strided)
as float32 copies one block at a time. Both paths give the same bits, so the choice is only a matter of time.

Invariants: extra memory is a few blocks of rows, never a copy of the stack; rows are never written. Not here: what is
computed (`_program.py`, `_eager.py`), and when to compile (`_rules.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor

from outlast.tensors import _eager, _native
from outlast.tensors._eager import Row
from outlast.tensors._layout import BLOCK
from outlast.tensors._mixture import Mixture
from outlast.tensors._program import Program

__all__ = ["compiled_path", "gram_blocks", "mix", "nonfinite_rows", "reduce_rows"]


compiled_path: ContextVar[bool] = ContextVar("compiled_path", default=True)


def reduce_rows(program: Program, rows: Sequence[Tensor], out: Tensor) -> bool:
    """out[:] = program(rows). True when some row is non-finite somewhere."""
    native = _native_for(program, rows)
    if native is None:
        return _eager_columns(lambda part: _eager.run_program(program, part), rows, out)
    bad = ctypes.c_int(0)
    _in_ranges(partial(_coordinate_range, native, rows, out, bad), rows[0].numel())
    return bool(bad.value)


def mix(mixture: Mixture, program: Program | None, anything: Program, rows: Sequence[Row], out: Tensor) -> bool:
    """out[:] = the first mixed row, or the program's value of all of them. True when a mixed row is non-finite.

    Without a program the compiled path borrows the object of `anything`, a program that is compiled in any case.
    """
    native = _native_for(program or anything, rows)
    if native is None:
        return _eager_columns(partial(_mixed_chunk, mixture, program, out), rows, out)
    bad = ctypes.c_int(0)
    _in_ranges(partial(_mixed_range, native, mixture, program is None, rows, out, bad), out.numel())
    return bool(bad.value)


def gram_blocks(program: Program, rows: Sequence[Row]) -> Tensor:
    """Gram matrices (blocks, n, n), float64 on the rows' device, centred by the program of the first rows."""
    like = next(row for row in rows if row is not None)
    num_columns, n = like.numel(), len(rows)
    num_blocks = -(-num_columns // BLOCK)
    native = _native_for(program, rows)
    if native is not None:
        grams = torch.zeros(num_blocks, n, n, dtype=torch.float64)
        _in_ranges(partial(_gram_range, native, program.num_rows, rows, grams), num_columns)
        return grams + 0.0
    blocks = [torch.zeros(0, n, n, dtype=torch.float64, device=like.device)]
    for at in range(0, num_columns, BLOCK):
        part = _part(rows, at, min(at + BLOCK, num_columns))
        data = [row for row in part[: program.num_rows] if row is not None]
        center = torch.cat(
            [_eager.run_program(program, _cut(data, c))[0] for c in _eager.chunks(len_of(data), like.device)]
        )
        blocks.append(_eager.gram_block(part, center)[None])
    return torch.cat(blocks) + 0.0


def nonfinite_rows(rows: Sequence[Tensor]) -> list[int]:
    """Numbers of the rows that hold a NaN or an infinity. Reads everything: called once a program found one."""
    return [i for i, row in enumerate(rows) if not _finite(row)]


def _finite(row: Tensor) -> bool:
    return row.numel() == 0 or all(
        bool(torch.isfinite(row[lo:hi]).all()) for lo, hi in _eager.chunks(row.numel(), row.device)
    )


def len_of(rows: Sequence[Tensor]) -> int:
    return rows[0].numel()


def _cut(rows: Sequence[Tensor], part: tuple[int, int]) -> list[Tensor]:
    return [row[part[0] : part[1]] for row in rows]


def _part(rows: Sequence[Row], lo: int, hi: int) -> list[Row]:
    return [None if row is None else row[lo:hi] for row in rows]


def _eager_columns(work, rows: Sequence[Row], out: Tensor) -> bool:  # type: ignore[no-untyped-def]
    worst: list[Tensor] = []
    limit = torch.finfo(_eager.compute_dtype(out.dtype)).max
    for lo, hi in _eager.chunks(out.numel(), out.device):
        result, low, high = work(_part(rows, lo, hi))
        out[lo:hi] = result
        if low is not None:
            worst.append((high.amax() > limit) | (low.amin() < -limit))
    return bool(worst) and bool(torch.stack(worst).any())


def _mixed_chunk(
    mixture: Mixture, program: Program | None, like: Tensor, part: list[Row]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    width = next(row for row in part if row is not None)
    mixed = _eager.mix_rows(part, mixture, width)
    return (mixed[0], None, None) if program is None else _eager.run_program(program, mixed)


def _native_for(program: Program, rows: Sequence[Row]) -> _native.Library | None:
    if not compiled_path.get():
        return None
    like = next(row for row in rows if row is not None)
    if like.device.type != "cpu" or _eager.compute_dtype(like.dtype) != torch.float32 or like.numel() == 0:
        return None
    return _native.library(program)


def _in_ranges(work: partial[None], num_columns: int) -> None:
    _native.run_ranges(work, num_columns, BLOCK, torch.get_num_threads())


def _readable(rows: Sequence[Row]) -> bool:
    return all(row is None or (row.dtype == torch.float32 and row.stride(0) == 1) for row in rows)


def _pieces(rows: Sequence[Row], lo: int, hi: int) -> list[tuple[int, int]]:
    """One piece when the compiled path can read the rows where they lie, else pieces of a block to be copied."""
    return [(lo, hi)] if _readable(rows) else [(at, min(at + BLOCK, hi)) for at in range(lo, hi, BLOCK)]


def _pointers(rows: Sequence[Row], lo: int, hi: int) -> tuple[ctypes.Array[ctypes.c_void_p], list[Tensor]]:
    """Addresses of the rows' elements lo to hi as contiguous float32, and what must stay alive for them."""
    held = [torch.zeros(0) if row is None else row[lo:hi].to(torch.float32).contiguous() for row in rows]
    return (ctypes.c_void_p * len(rows))(
        *[None if row is None else h.data_ptr() for row, h in zip(rows, held, strict=True)]
    ), held


def _result(out: Tensor, lo: int, hi: int) -> Tensor:
    direct = out.dtype == torch.float32 and out.stride(0) == 1
    return out[lo:hi] if direct else torch.empty(hi - lo, dtype=torch.float32)


def _coordinate_range(
    native: _native.Library, rows: Sequence[Tensor], out: Tensor, bad: ctypes.c_int, lo: int, hi: int
) -> None:
    for a, b in _pieces([*rows, out], lo, hi):
        pointers, held = _pointers(rows, a, b)
        found, result = ctypes.c_int(0), _result(out, a, b)
        native.coordinate(pointers, len(rows), 0, b - a, result.data_ptr(), ctypes.addressof(found))
        _keep(out, result, a, b, found, bad)
        del held


def _mixed_range(
    native: _native.Library,
    mixture: Mixture,
    alone: bool,
    rows: Sequence[Row],
    out: Tensor,
    bad: ctypes.c_int,
    lo: int,
    hi: int,
) -> None:
    plan = mixture.compressed
    for a, b in _pieces([*rows, out], lo, hi):
        pointers, held = _pointers(rows, a, b)
        found, result = ctypes.c_int(0), _result(out, a, b)
        failed = native.mixed(
            pointers, len(rows), *plan, len(mixture.weights), int(alone),
            0, b - a, result.data_ptr(), ctypes.addressof(found),
        )  # fmt: skip
        if failed:
            raise MemoryError("the rules' compiled path could not have a few hundred kilobytes of memory")
        _keep(out, result, a, b, found, bad)
        del held


def _keep(out: Tensor, result: Tensor, lo: int, hi: int, found: ctypes.c_int, bad: ctypes.c_int) -> None:
    if result.data_ptr() != out[lo:hi].data_ptr():
        out[lo:hi] = result
    if found.value:
        bad.value = 1


def _gram_range(native: _native.Library, num_data: int, rows: Sequence[Row], grams: Tensor, lo: int, hi: int) -> None:
    found = ctypes.c_int(0)
    for a, b in _pieces(rows, lo, hi):
        pointers, held = _pointers(rows, a, b)
        for at in range(a, b, BLOCK):
            end = min(at + BLOCK, b)
            target = grams[at // BLOCK]
            failed = native.gram(
                pointers, len(rows), num_data, at - a, end - a, target.data_ptr(), ctypes.addressof(found)
            )
            if failed:
                raise MemoryError("the rules' compiled path could not have a few megabytes of memory")
        del held
