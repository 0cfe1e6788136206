"""Checksums of convolutions: what an output adds up to over its channels is the convolution with one channel.

A convolution is linear in each of its two factors, whichever of them is asked for: the output (image, weights), the
gradient of the image (gradient, weights), that of the weights (gradient, image). So what the channels of a group add up
to is the same operation on a factor that is summed up over them; its cost is one channel's. Where the rounding of
outputs of few bits hides much, groups are not split further: wide layers are checked less closely there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outlast.tensors import Misfit, spread_of

__all__ = ["CONVOLUTIONS", "Convolution"]

aten = torch.ops.aten
_Bilinear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the three: `c` is `compute(a, b)`, and what `axes` of c and b add up to is checked. `length`: of a dot
    product. `summed`: sums up b over the axis, `split` brings c into (..., group's channels, ...) with `axis`."""

    c: Tensor
    a: Tensor
    b: Tensor
    one: _Bilinear
    whole: _Bilinear
    length: int
    add_c: Callable[[Tensor], Tensor]
    add_b: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Convolution:
    """What of an operation is checked."""

    parts: tuple[_Part, ...]

    def misfit(self, *, cut: float, ignored: float) -> Misfit:
        """The worst place; `row` counts through what is left of the output when channels are added up."""
        return max(
            (_misfit(p, cut, ignored) for p in self.parts), key=lambda m: m.deviations, default=Misfit(0, 0, 0.0)
        )

    def is_possible(self, *, cut: float) -> bool:
        """Whether the output is within the bound that no rounding can exceed (see `outlast.tensors.within_bound`)."""
        return all(_is_possible(part, cut) for part in self.parts)

    def kind(self) -> Any:
        """Shapes and type, to tell kinds of products apart."""
        return tuple((tuple(p.a.shape), tuple(p.b.shape), p.c.dtype) for p in self.parts)


def _misfit(part: _Part, cut: float, ignored: float) -> Misfit:
    work = torch.float64 if part.c.dtype == torch.float64 else torch.float32
    a, b, c = part.a.to(work), part.b.to(work), part.c.to(work)
    sums = part.add_b(b)
    left = part.add_c(c) - part.one(a, sums)
    products, values, least = spread_of(part.c.dtype, part.length, part.c.shape[1], cut, ignored)
    q = part.one(a * a, part.add_b(b * b) + sums * sums)
    ratio = left.double().square() / (products * q.double() + values * part.add_c(c * c).double() + least)
    ratio = torch.where(torch.isfinite(ratio), ratio, math.inf).reshape(-1)
    if not ratio.numel():
        return Misfit(0, 0, 0.0)
    place = int(ratio.argmax())
    return Misfit(place, 0, math.sqrt(float(ratio[place])))


def _is_possible(part: _Part, cut: float) -> bool:
    a, b, found = part.a.double(), part.b.double(), part.c.double()
    exact, size = part.whole(a, b), part.whole(a.abs(), b.abs())
    unit = 2.0**-53 if part.c.dtype == torch.float64 else 2.0**-24
    out = float(torch.finfo(part.c.dtype).eps)
    bound = ((part.length + 2) * unit + 2 * cut) * size + 2 * out * found.abs() + float(torch.finfo(part.c.dtype).tiny)
    return bool((((found - exact).abs() <= bound) | ~torch.isfinite(exact) | ~torch.isfinite(bound)).all())


def _forward(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Convolution | None:
    if transposed or x.dim() != weight.dim():
        return None
    if bias is not None:
        shape = (1, -1) + (1,) * (x.dim() - 2)
        if out.dtype not in (torch.float32, torch.float64):
            out = out.float()
        out = out - bias.to(out.dtype).reshape(shape)

    def convolve(a: Tensor, b: Tensor) -> Tensor:
        done: Tensor = aten.convolution(a, b, None, stride, padding, dilation, False, output_padding, groups)
        return done

    return Convolution(
        (
            _Part(
                out,
                x,
                weight,
                convolve,
                convolve,
                weight[0].numel(),
                lambda c: _groups(c, 1, groups),
                lambda b: _group_rows(b, groups),
            ),
        )
    )


def _groups(x: Tensor, axis: int, groups: int) -> Tensor:
    """Channels of each group added up: (N, G, ...)."""
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    return x.reshape(shape).sum(axis + 1)


def _group_rows(weight: Tensor, groups: int) -> Tensor:
    """Output channels of each group added up: (G, I/G, ...)."""
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).sum(1)


def _to_image(x: Tensor, channels: int, rest: tuple[Any, ...]) -> _Bilinear:
    """The gradient of an image like x, of so many channels, from (gradient, weights)."""

    def compute(a: Tensor, b: Tensor) -> Tensor:
        like = a.new_empty((x.shape[0], channels, *x.shape[2:]))
        done: Tensor = aten.convolution_backward(a, like, b, *rest, [True, False, False])[0]
        return done

    return compute


def _to_weight(weight: Tensor, channels: int, rest: tuple[Any, ...]) -> _Bilinear:
    """The gradient of weights like these, of so many channels, from (gradient, image)."""

    def compute(a: Tensor, b: Tensor) -> Tensor:
        like = a.new_empty((weight.shape[0], channels, *weight.shape[2:]))
        done: Tensor = aten.convolution_backward(a, b, like, *rest, [False, True, False])[1]
        return done

    return compute


def _backward(
    out: Any,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Any,
) -> Convolution | None:
    if transposed or x.dim() != weight.dim():
        return None
    rest = (None, stride, padding, dilation, False, output_padding, groups)
    parts = []
    if mask[0]:
        length = weight[:, 0].numel() // groups
        parts.append(
            _Part(
                out[0],
                grad,
                weight,
                _to_image(x, groups, rest),
                _to_image(x, x.shape[1], rest),
                length,
                lambda c: _groups(c, 1, groups),
                lambda b: b.sum(1, keepdim=True),
            )
        )
    if mask[1]:
        length = grad[:, 0].numel()
        parts.append(_Part(
            out[1], grad, x, _to_weight(weight, 1, rest), _to_weight(weight, weight.shape[1], rest), length,
            lambda c: c.sum(1, keepdim=True), lambda b: _groups(b, 1, groups),
        ))  # fmt: skip
    return Convolution(tuple(parts))


CONVOLUTIONS = {aten.convolution.default: _forward, aten.convolution_backward.default: _backward}
"""Operation -> what of it is checked; None where its form is not."""
