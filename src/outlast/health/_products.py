"""Which operations of torch are products, and of what: one small function an operation.

Every product is brought to C (M, N) = alpha A (M, K) B (K, N) + beta bias (N), batches of them side by side. An
operation in a form that is not listed here is not checked; it counts as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ATTENTION", "PRODUCTS", "Product"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of an operation's inputs and its output. `a`, `b`, `c`: of two dimensions, or of three."""

    a: Tensor
    b: Tensor
    c: Tensor
    bias: Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0


def _mm(out: Tensor, a: Tensor, b: Tensor) -> Product:
    return Product(a, b, out)


def _addmm(out: Tensor, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Product | None:
    row = bias.reshape(-1) if bias.numel() == out.shape[-1] and bias.shape[-1] == out.shape[-1] else None
    if row is None:
        return None
    return Product(a, b, out, row, float(alpha), float(beta))


def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product | None:
    if weight.dim() != 2:
        return None
    return Product(x.reshape(-1, x.shape[-1]), weight.t(), out.reshape(-1, out.shape[-1]), bias)


def _baddbmm(out: Tensor, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Product | None:
    return Product(a, b, out, None, float(alpha), 1.0) if beta == 0 else None


PRODUCTS: Mapping[Any, Callable[..., Product | None]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.linear.default: _linear,
    aten.baddbmm.default: _baddbmm,
}
"""Operation -> its product; None where the form that it has is not one."""

_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
)  # fmt: skip
ATTENTION = frozenset(getattr(aten, name).default for name in _KERNELS if hasattr(aten, name))
"""Attention in one kernel."""
