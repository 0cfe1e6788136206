"""Which tensors of two generations differ, where first, and by how much. numpy; no torch.

Role: `outlast ckpt diff`. Chunks whose digests agree are not read when both sides laid a tensor out alike. Numbers
are compared as numbers (bfloat16 and 8-bit floats are decoded here), everything else as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from outlast.checkpoint.manifest import DTYPE_BYTES, TensorSpec
from outlast.checkpoint.reader import Reader

__all__ = ["TensorDiff", "diff"]

_SMALL_FLOATS = {
    # (exponent bits, mantissa bits, bias, has infinities and IEEE NaNs, -0 is NaN)
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}
_NUMPY = {
    "complex64", "complex128", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64", "bool",
}  # fmt: skip


class TensorDiff(NamedTuple):
    """`num_differing` of `num_elements` (bit patterns); `first`: flat index; `max_abs`: None for non-numbers."""

    name: str
    kind: str  # "value", "only in a", "only in b", "dtype", "shape"
    detail: str
    num_differing: int = 0
    num_elements: int = 0
    first: int = -1
    max_abs: float | None = None


def diff(a: Reader, b: Reader, *, progress: Callable[[int, int], None] | None = None) -> list[TensorDiff]:
    """In a's order, then what only b has. `progress` is told (bytes of a compared, bytes of a in all).

    Raises `Damage` if bytes that must be compared are wrong.
    """
    found: list[TensorDiff] = []
    done, total = 0, sum(spec.bytes for spec in a.tensors)
    theirs = b.names
    for number, spec in enumerate(a.tensors):
        if spec.name not in theirs:
            found.append(TensorDiff(spec.name, "only in a", f"{spec.dtype}{list(spec.shape)}"))
            continue
        one = _compare(a, b, number, theirs[spec.name])
        if one is not None:
            found.append(one)
        done += spec.bytes
        if progress is not None:
            progress(done, total)
    ours = a.names
    missing = [s for s in b.tensors if s.name not in ours]
    return found + [TensorDiff(s.name, "only in b", f"{s.dtype}{list(s.shape)}") for s in missing]


def _compare(a: Reader, b: Reader, ours: int, theirs: int) -> TensorDiff | None:
    x, y = a.tensors[ours], b.tensors[theirs]
    if x.dtype != y.dtype:
        return TensorDiff(x.name, "dtype", f"{x.dtype} and {y.dtype}")
    if x.shape != y.shape:
        return TensorDiff(x.name, "shape", f"{list(x.shape)} and {list(y.shape)}")
    if x.bytes == 0 or _same_chunks(a, b, ours, theirs):
        return None
    left, right = a.read_tensor(ours), b.read_tensor(theirs)
    return None if left == right else _values(x, left, right)


def _same_chunks(a: Reader, b: Reader, ours: int, theirs: int) -> bool:
    """Same pieces at the same places of streams whose chunks there have the same digests: nothing to read."""
    mine, other = a.pieces[ours], b.pieces[theirs]
    if len(mine) != len(other):
        return False
    for p, q in zip(mine, other, strict=True):
        same_place = (p.piece.offset, p.piece.shape, p.piece.at) == (q.piece.offset, q.piece.shape, q.piece.at)
        size = math.prod(p.piece.shape) * DTYPE_BYTES[a.tensors[ours].dtype]
        if not same_place or _digests(a, p.part, p.piece.at, size) != _digests(b, q.part, q.piece.at, size):
            return False
    return True


def _digests(reader: Reader, part: int, at: int, size: int) -> list[tuple[int, int, str]]:
    return [(start, chunk.bytes, chunk.digest) for start, chunk in reader.chunks_in(part, at, size)]


def _values(spec: TensorSpec, left: bytearray, right: bytearray) -> TensorDiff:
    size = spec.bytes // max(1, math.prod(spec.shape))
    raw = np.frombuffer(left, np.uint8).reshape(-1, size) != np.frombuffer(right, np.uint8).reshape(-1, size)
    wrong = raw.any(axis=1)
    first = int(np.argmax(wrong))
    x, y = _decode(spec.dtype, left, wrong), _decode(spec.dtype, right, wrong)
    largest: float | None = None
    detail = f"first at flat index {first}"
    if x is not None and y is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            gaps = np.abs(x - y)
        largest = float("nan") if np.isnan(gaps).any() else float(gaps.max())
        detail += f": {x[0]} and {y[0]}"
    return TensorDiff(spec.name, "value", detail, int(wrong.sum()), len(wrong), first, largest)


def _decode(dtype: str, data: bytearray, where: Any) -> Any:
    """The elements at `where` as float64 (or complex128), None if the dtype is not a number."""
    if dtype in _NUMPY:
        values = np.frombuffer(data, np.dtype(dtype))[where]
        return values.astype(np.complex128 if dtype.startswith("complex") else np.float64)
    if dtype == "bfloat16":
        bits = np.frombuffer(data, np.uint16)[where].astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    if dtype in _SMALL_FLOATS:
        return _table(*_SMALL_FLOATS[dtype])[np.frombuffer(data, np.uint8)[where]]
    return None


def _table(exponent: int, mantissa: int, bias: int, ieee: bool, unsigned_zero: bool) -> Any:
    """All 256 values of an 8-bit float (OCP 8-bit floating point, and the `fnuz` variants)."""
    code = np.arange(256)
    sign = np.where(code >> 7, -1.0, 1.0)
    e, m = (code >> mantissa) & ((1 << exponent) - 1), code & ((1 << mantissa) - 1)
    normal = (1 + m / (1 << mantissa)) * np.exp2(e.astype(np.float64) - bias)
    small = m / (1 << mantissa) * np.exp2(1.0 - bias)
    values = sign * np.where(e == 0, small, normal)
    top = e == (1 << exponent) - 1
    if ieee:
        values = np.where(top & (m == 0), sign * np.inf, np.where(top, np.nan, values))
    elif unsigned_zero:
        values = np.where(code == 0x80, np.nan, values)
    else:
        values = np.where(top & (m == (1 << mantissa) - 1), np.nan, values)
    return values
