"""Quantised tensors as plain ones and back: integers, scales and zero points. torch.

Role: the parts that a quantised tensor is kept as, and the tensor that they make. Invariants: integers are moved to
the bit, never dequantised; nothing is made before its parts fit together, for torch makes tensors whose axis or scales
lie outside, too. For the packed types (two or four elements in a byte, each row beginning a new one) torch has few
operations, and some of those crash: their bytes are read and written in the storage alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outlast.errors import ConfigError

__all__ = ["QUANTISED", "put_together", "taken_apart"]

_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}  # elements in a byte
_WHOLE = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
QUANTISED = {*_PACKED, *_WHOLE}


def taken_apart(value: torch.Tensor, name: str, number: Callable[[torch.Tensor, str], int]) -> dict[str, Any]:
    """The tree's node of a quantised tensor. `number` is given each part with its name. Raises `ConfigError`."""
    is_packed = value.dtype in _PACKED
    integers = _packed_bytes(value, name).clone() if is_packed else value.int_repr()
    payload: list[Any] = [str(value.dtype).removeprefix("torch."), number(integers, name)]
    if value.qscheme() == torch.per_tensor_affine:
        payload += [{"f": float(value.q_scale()).hex()}, value.q_zero_point()]
    else:
        scales, zeros, axis = (
            value.q_per_channel_scales(),
            value.q_per_channel_zero_points(),
            value.q_per_channel_axis(),
        )
        wrong = _misfit(value.shape, scales, zeros, axis)
        if wrong is not None:
            raise ConfigError(f"the {value.dtype} at {name!r} is not readable: {wrong}", remedy="quantise it anew")
        payload += [number(scales, f"{name}.scales"), number(zeros, f"{name}.zero_points"), axis]
    return {"qp": [value.shape[-1] if value.dim() else 1, payload]} if is_packed else {"q": payload}


def put_together(tag: str, payload: Any, tensors: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """The tensor of a node. `tensors` gives a part by its number. Raises `ValueError` if the parts do not fit."""
    columns, (name, place, *rest) = payload if tag == "qp" else (None, payload)
    integers = tensors(place)
    dtype, shape = _kind(name, integers, columns)
    if len(rest) == 3:
        scales, zeros, axis = tensors(rest[0]), tensors(rest[1]), int(rest[2])
        wrong = _misfit(shape, scales, zeros, axis)
        if wrong is not None:
            raise ValueError(wrong)
    try:
        if len(rest) == 3:
            return _per_channel(integers, dtype, shape, scales, zeros, axis)
        return _per_tensor(integers, dtype, shape, float.fromhex(rest[0]["f"]), int(rest[1]))
    except (RuntimeError, OverflowError) as error:  # torch's own complaints
        raise ValueError(str(error)) from None


def _per_tensor(
    integers: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], scale: float, zero: int
) -> torch.Tensor:
    if dtype in _WHOLE:
        whole: torch.Tensor = torch._make_per_tensor_quantized_tensor(integers, scale, zero)
        return whole
    made = torch._empty_affine_quantized(shape, scale=scale, zero_point=zero, dtype=dtype)
    _packed_bytes(made, "").copy_(integers)
    return made


def _per_channel(
    integers: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    scales: torch.Tensor,
    zeros: torch.Tensor,
    axis: int,
) -> torch.Tensor:
    if dtype in _WHOLE:
        whole: torch.Tensor = torch._make_per_channel_quantized_tensor(integers, scales, zeros, axis)
        return whole
    made = torch._empty_per_channel_affine_quantized(shape, scales=scales, zero_points=zeros, axis=axis, dtype=dtype)
    _packed_bytes(made, "").copy_(integers)
    return made


def _packed_bytes(value: torch.Tensor, name: str) -> torch.Tensor:
    """The bytes of a packed tensor, row by row: its own memory. Raises `ConfigError` for a view, whose place in the
    storage torch counts in elements and not in bytes.
    """
    shape, storage = _in_bytes(tuple(value.shape), _PACKED[value.dtype]), value.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=value.device)
    if value.storage_offset() or not value.is_contiguous() or storage.nbytes() != torch.Size(shape).numel():
        raise ConfigError(
            f"the {value.dtype} at {name!r} is not the whole of its storage", remedy="keep the tensor it is a view of"
        )
    return memory.set_(storage).view(shape)


def _in_bytes(shape: tuple[int, ...], each: int) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // each)) if shape else ()


def _kind(name: Any, integers: torch.Tensor, columns: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """(dtype, shape) that these integers are of: never more elements than there are bits for."""
    shape = tuple(integers.shape)
    if columns is None:
        found = {str(dtype): dtype for dtype, plain in _WHOLE.items() if plain == integers.dtype}
    else:
        shape = (*shape[:-1], _count(columns)) if shape else ()
        fits = integers.dtype == torch.uint8
        found = {str(d): d for d, each in _PACKED.items() if fits and _in_bytes(shape, each) == integers.shape}
    if f"torch.{name}" not in found:
        raise ValueError(f"{list(integers.shape)} of {integers.dtype} are no {name!r}")
    return found[f"torch.{name}"], shape


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of columns")
    return value


def _misfit(shape: tuple[int, ...], scales: torch.Tensor, zeros: torch.Tensor, axis: int) -> str | None:
    if not 0 <= axis < len(shape):
        return f"its axis is {axis}, of {len(shape)}"
    if scales.shape != (shape[axis],) or zeros.shape != (shape[axis],):
        return f"it has {list(scales.shape)} scales and {list(zeros.shape)} zero points for {shape[axis]} channels"
    return None
