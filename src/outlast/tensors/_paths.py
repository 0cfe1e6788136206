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
from typing import Any

import torch
from torch import Tensor

from outlast.tensors import _eager, _native
from outlast.tensors._eager import Row
from outlast.tensors._layout import BLOCK
from outlast.tensors._mixture import Mixture
from outlast.tensors._program import Program

__all__ = ["compiled_path", "gram_blocks", "mix", "nonfinite_rows", "reduce_rows"]


MOST_COPIED = 32 << 20  # bytes of rows copied at a time
compiled_path: ContextVar[bool] = ContextVar("compiled_path", default=True)


def reduce_rows(program: Program, rows: Sequence[Tensor], out: Tensor) -> bool:
    """out[:] = program(rows). True when some row is non-finite somewhere."""
    native = _native_for(program, rows)
    if native is None:
        return _eager_columns(lambda part: _eager.run_program(program, part), rows, out)
    return _shared_out(native, _native.COORDINATE, rows, out)


def mix(mixture: Mixture, program: Program | None, anything: Program, rows: Sequence[Row], out: Tensor) -> bool:
    """out[:] = the first mixed row, or the program's value of all of them. True when a mixed row is non-finite.

    Without a program the compiled path borrows the object of `anything`, a program that is compiled in any case.
    """
    native = _native_for(program or anything, rows)
    if native is None:
        return _eager_columns(partial(_mixed_chunk, mixture, program, out), rows, out)
    what = _native.ALONE if program is None else _native.MIXED
    return _shared_out(native, what, rows, out, **mixture.compressed, num_mixed=len(mixture.weights))


def gram_blocks(program: Program, rows: Sequence[Row]) -> Tensor:
    """Gram matrices (blocks, n, n), float64 on the rows' device, centred by the program of the first rows."""
    like = next(row for row in rows if row is not None)
    num_columns, n = like.numel(), len(rows)
    num_blocks = -(-num_columns // BLOCK)
    native = _native_for(program, rows)
    if native is not None:
        grams = torch.zeros(num_blocks, n, n, dtype=torch.float64)
        _shared_out(native, _native.GRAM, rows, grams, num_data=program.num_rows)
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


def _native_for(program: Program, rows: Sequence[Row]) -> ctypes.CDLL | None:
    if not compiled_path.get():
        return None
    like = next(row for row in rows if row is not None)
    if like.device.type != "cpu" or _eager.compute_dtype(like.dtype) != torch.float32 or like.numel() == 0:
        return None
    return _native.library(program)


def _shared_out(native: ctypes.CDLL, what: int, rows: Sequence[Row], out: Tensor, **settings: Any) -> bool:
    """One task, or one for each piece where rows must be copied to be read. True when something is not finite."""
    like, threads, bad = next(row for row in rows if row is not None), torch.get_num_threads(), False
    for lo, hi in _pieces(rows, like.numel(), threads):
        held = [None if row is None else row[lo:hi].to(torch.float32).contiguous() for row in rows]
        pointers = (ctypes.c_void_p * len(rows))(*[None if row is None else row.data_ptr() for row in held])
        result = out[lo // BLOCK :] if what == _native.GRAM else _writable(out, lo, hi)
        task = _native.Task(
            num_columns=hi - lo, what=what, rows=ctypes.addressof(pointers), num_rows=len(rows), **_addresses(settings)
        )
        setattr(task, "grams" if what == _native.GRAM else "out", result.data_ptr())
        _native.run(native, task, -(-(hi - lo) // BLOCK), threads)
        if what != _native.GRAM and result.data_ptr() != out[lo:hi].data_ptr():
            out[lo:hi] = result
        bad = bad or bool(task.bad)
    return bad


def _addresses(settings: dict[str, Any]) -> dict[str, int]:
    return {name: value if isinstance(value, int) else ctypes.addressof(value) for name, value in settings.items()}


def _pieces(rows: Sequence[Row], num_columns: int, threads: int) -> list[tuple[int, int]]:
    """One piece when the compiled path can read the rows where they lie, else pieces of a few blocks to be copied."""
    if all(row is None or (row.dtype == torch.float32 and row.stride(0) == 1) for row in rows):
        return [(0, num_columns)]
    step = max(1, min(threads, MOST_COPIED // (4 * BLOCK * len(rows)))) * BLOCK
    return [(at, min(at + step, num_columns)) for at in range(0, num_columns, step)]


def _writable(out: Tensor, lo: int, hi: int) -> Tensor:
    direct = out.dtype == torch.float32 and out.stride(0) == 1
    return out[lo:hi] if direct else torch.empty(hi - lo, dtype=torch.float32)
