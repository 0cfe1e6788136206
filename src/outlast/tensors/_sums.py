"""Checksums of matrix products: does a product add up to what its factors say, within what rounding can do?

Role: the arithmetic of checked sums. The sums of B's rows (`Sums`) are taken once and hold for every A; a row of
C = A B must add up to A's row times them. What is left over is compared with the spread that rounding gives it, from
the error analysis below, in double precision. It does not compute products, and decides nothing.

Tolerance. A dot product of K terms makes K roundings, each of at most u times the partial sum. With signs at random a
partial sum after t terms has the mean square t/K q, q the sum of the squared products, and the roundings add up to the
variance u^2/3 * K/2 * q. With one sign it grows to the result c evenly: u^2/3 * K/3 * c^2. Both are added, as the signs
are not known. An output of b bits adds (2 u_out^2 / 3) c^2 for two roundings; inputs that are cut to fewer bits before
they are multiplied (TF32) add 2 u_in^2 / 3 q. Source: Higham and Mary, A new approach to probabilistic rounding error
analysis, SIAM J. Sci. Comput. 41 (2019). Kernels that sum in parts make fewer roundings in a row: the spread is an
upper one.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outlast.tensors import _native

__all__ = ["Misfit", "Rounding", "Sums", "prepare_sums", "product_misfit", "spread_of", "sums_of", "within_bound"]

SOURCE = "_sums.c"
LANES, SPAN = 16, 512
"""Where the output has few bits its rounding hides much of a whole row's sum, and columns are added up in blocks of at
most 32: column j belongs to block j // SPAN * LANES + j % LANES."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
_UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_TINY = {torch.float64: 5e-324, torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def prepare_sums() -> bool:
    """Have the compiled path ready; False where there is no compiler, and torch's operations do it instead."""
    return _native.build(SOURCE)


class _Matrix(ctypes.Structure):
    """`struct matrix` of `_sums.c`."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("type", "rows", "cols", "row_stride", "col_stride")),
    )

    @classmethod
    def of(cls, x: Tensor) -> _Matrix:
        return cls(x.data_ptr(), _TYPES[x.dtype], *x.shape, *x.stride())


class _Limits(ctypes.Structure):
    """`struct limits` of `_sums.c`."""

    _fields_ = tuple((name, ctypes.c_double) for name in ("alpha", "beta", "products", "values", "least"))


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding may do to a product of these types. `length`: K, terms of a dot product."""

    products: float
    """Variance for each unit of q, the sum of squared products."""
    values: float
    """Variance for each unit of the squared output."""
    least: float

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, dtype: torch.dtype, length: int, width: int, cut: float, ignored: float) -> Rounding:
        """`cut`: unit roundoff to which inputs are cut first, 0 if they are not; `ignored`: see `product_misfit`."""
        unit = _UNIT[torch.float64] if dtype == torch.float64 else _UNIT[torch.float32]
        out = 0.0 if dtype in (torch.float32, torch.float64) else _UNIT[dtype]
        own = length + width if dtype == torch.float64 else 0  # roundings of the sums themselves
        products = unit**2 * (max(length, 1) + own) / 6 + 2 * cut**2 / 3
        values = unit**2 * ((max(length, 1) + own) / 9 + 1) + 2 * out**2 / 3 + ignored**2
        # Near zero each addition rounds to a multiple of the least number; what is below half of it vanishes each time.
        vanished = width * max(length, 1) * (_TINY[torch.float64] if dtype == torch.float64 else _TINY[torch.float32])
        return cls(products, values, max(vanished**2 + width * _TINY[dtype] ** 2, 1e-290))


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of a matrix's rows: `sums`, `squares` (rows), in double; `blocks` (rows, `num_blocks`) in float32 where rows
    are added up in blocks."""

    sums: Tensor
    squares: Tensor
    num_blocks: int
    blocks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Misfit:
    """Where a product fits its factors' sums least: row and block of columns, and how many standard deviations off."""

    row: int
    block: int
    deviations: float


def spread_of(
    dtype: torch.dtype, length: int, width: int, cut: float = 0.0, ignored: float = 0.0
) -> tuple[float, float, float]:
    """Variance of a sum's rounding: for each unit of squared products, of squared outputs, and at least."""
    rounding = Rounding.of(dtype, length, width, cut, ignored)
    return rounding.products, rounding.values, rounding.least


def _count_blocks(dtype: torch.dtype, columns: int) -> int:
    """Into how many blocks the columns of an output of this type are added up."""
    return 1 if dtype in (torch.float32, torch.float64) else LANES * max(1, -(-columns // SPAN))


def sums_of(matrix: Tensor, out_dtype: torch.dtype, *, exact: bool = False) -> Sums:
    """Sums of the rows of B (K, N), for checking outputs of `out_dtype`. `exact`: `sums`, `squares` are so exact that
    the change of one bit can be told from them, whatever the type."""
    num_blocks = _count_blocks(out_dtype, matrix.shape[1])
    sums, squares = _weigh(matrix, num_blocks)
    if num_blocks > 1:
        if exact:
            whole, whole_squares = _weigh(matrix, 1)
            return Sums(whole.reshape(-1), whole_squares.reshape(-1), num_blocks, sums.to(torch.float32))
        return Sums(sums.sum(1), squares.sum(1), num_blocks, sums.to(torch.float32))
    if out_dtype == torch.float64:  # these sums are no more exact than the product is
        squares = squares + sums * sums
    return Sums(sums.reshape(-1), squares.reshape(-1), 1)


def _native_for(*matrices: Tensor) -> Any:
    """The compiled path, if it can read these."""
    for x in matrices:
        if not x.is_cpu or x.dtype not in _TYPES or 1 not in x.stride() or 0 in x.stride() or not x.numel():
            return None
    return _native.library(SOURCE)


def _weigh(matrix: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """(sums, sums of squares), (rows, blocks), in double."""
    rows, columns = matrix.shape
    native = _native_for(matrix) if num_blocks == 1 or matrix.dtype != torch.float64 else None
    if native is None:
        wide = matrix.double()
        if num_blocks > 1:
            wide = torch.nn.functional.pad(wide, (0, num_blocks // LANES * SPAN - columns))
            wide = wide.reshape(rows, num_blocks // LANES, SPAN // LANES, LANES)
            return wide.sum(2).reshape(rows, -1), (wide * wide).sum(2).reshape(rows, -1)
        return wide.sum(1, keepdim=True), (wide * wide).sum(1, keepdim=True)
    sums = torch.empty((rows, num_blocks), dtype=torch.float64)
    squares = torch.empty_like(sums)
    seen = _Matrix.of(matrix)
    native.weigh(ctypes.byref(seen), None, None, num_blocks, sums.data_ptr(), squares.data_ptr())
    return sums, squares


def product_misfit(
    c: Tensor,
    a: Tensor,
    sums: Sums,
    *,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    cut: float = 0.0,
    ignored: float = 0.0,
) -> Misfit:
    """How badly C (M, N) fits alpha A B + beta bias, given A (M, K) and the sums of B (K, N); `bias`: (N).

    `ignored`: standard deviation that is of no interest, as a share of the root of a block's squared outputs."""
    told = torch.mm(a.to(torch.float32), sums.blocks) if sums.blocks is not None else None
    blocks = sums.num_blocks
    biases = _weigh(bias.reshape(1, -1), blocks) if bias is not None else (None, None)
    rounding = Rounding.of(c.dtype, a.shape[1], c.shape[1], cut, ignored)
    native = _native_for(c, a)
    if native is None or sums.sums.device.type != "cpu":
        return _eager_misfit(c, a, sums, told, biases, rounding, alpha, beta)
    work, worst = torch.empty(2 * c.shape[0] * (1 + blocks), dtype=torch.float64), ctypes.c_double()
    limits = _Limits(alpha, beta, rounding.products, rounding.values, rounding.least)
    mine, theirs = _Matrix.of(c), _Matrix.of(a)
    place = native.check_product(
        ctypes.byref(mine),
        ctypes.byref(theirs),
        sums.sums.data_ptr(),
        sums.squares.data_ptr(),
        _address(told),
        _address(biases[0]),
        _address(biases[1]),
        ctypes.byref(limits),
        blocks,
        work.data_ptr(),
        ctypes.byref(worst),
    )
    return Misfit(place // blocks, place % blocks, math.sqrt(worst.value))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _eager_misfit(
    c: Tensor, a: Tensor, sums: Sums, told: Tensor | None, biases: Any, rounding: Rounding, alpha: float, beta: float
) -> Misfit:
    """The same by torch's operations, on any device; one wait for it."""
    found, found_squares = _weigh(c, sums.num_blocks)
    wide = a.double()
    expected = (wide @ sums.sums)[:, None] if told is None else told.double()
    spread = ((wide * wide) @ sums.squares)[:, None]
    bias_sums, bias_squares = biases if biases[0] is not None else (0.0, 0.0)
    left = found - (alpha * expected + beta * bias_sums)
    q = alpha * alpha * spread + beta * beta * bias_squares
    ratio = left * left / (rounding.products * q + rounding.values * found_squares + rounding.least)
    ratio = torch.where(torch.isfinite(ratio), ratio, math.inf).reshape(-1)
    if not ratio.numel():
        return Misfit(0, 0, 0.0)
    place = int(ratio.argmax())
    return Misfit(place // found.shape[1], place % found.shape[1], math.sqrt(float(ratio[place])))


def within_bound(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    *,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    cut: float = 0.0,
) -> bool:
    """Whether some rows of C are what a correct kernel may give, by the bound that no rounding can exceed.

    |c - exact| <= (K + 2) u (|A| |B|) + 2 u_out |c| + (K + 2) n (1 + max |A| + max |B|), element by element, where n is
    the least normal number: kernels may take what is below it for zero, in factors, products and sums. What is beyond
    was computed wrongly, whatever the order of summation; what is not may still be wrong in its lowest bits. Not finite
    counts as within where the exact value is not finite either.
    """
    left, right = a[rows].double(), b.double()
    exact = alpha * (left @ right)
    size = abs(alpha) * (left.abs() @ right.abs())
    if bias is not None:
        exact, size = exact + beta * bias.double(), size + abs(beta) * bias.double().abs()
    unit = _UNIT[torch.float64] if c.dtype == torch.float64 else _UNIT[torch.float32]
    out = 0.0 if c.dtype in (torch.float32, torch.float64) else _UNIT[c.dtype]
    found = c[rows].double()
    bound = ((a.shape[1] + 2) * unit + 2 * cut) * size + (2 * out + 2 * unit) * found.abs() + 4 * _TINY[c.dtype]
    normal = torch.finfo(torch.float64 if c.dtype == torch.float64 else torch.float32).tiny
    sizes = [float(x.detach().abs().nan_to_num(posinf=0.0).max()) if x.numel() else 0.0 for x in (left, right)]
    bound += (a.shape[1] + 2) * normal * (1.0 + abs(alpha)) * (1.0 + sum(sizes))
    largest = float(torch.finfo(c.dtype).max)
    overflows = (exact.abs() + bound >= largest) | ~torch.isfinite(exact)
    return bool((((found - exact).abs() <= bound) | overflows).all())
