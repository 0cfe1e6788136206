"""What operations of torch gave: which of it can be wrong, whether it can be read, where two outputs differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outlast.health._convolutions import Convolution
from outlast.health._memory import WrongBits, wrong_bits
from outlast.health._products import Product

__all__ = ["all_real", "can_be_read", "draws_at_random", "name_of", "tensors_of", "where_unlike"]


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors of an operation's output that can be wrong."""
    found = out if isinstance(out, tuple | list) else [out]
    return [x for x in found if isinstance(x, Tensor) and x.numel()]


def can_be_read(product: Product | Convolution) -> bool:
    """Whether these are plain numbers in memory: no sparse or sharded tensors, nothing that only has a shape."""
    if isinstance(product, Convolution):
        tensors = [x for part in product.parts for x in (part.a, part.b, part.c)]
    else:
        tensors = [product.a, product.b, product.c, *([] if product.bias is None else [product.bias])]
    return all(
        type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and x.device.type in ("cpu", "cuda")
        and x.is_floating_point()
        and x.numel()
        for x in tensors
    )


def all_real(out: Any) -> bool:
    found = tensors_of(out)
    return bool(found) and all(x.is_floating_point() for x in found)


def where_unlike(first: Any, second: Any) -> WrongBits:
    """Where two outputs differ; of several tensors, the one with the most."""
    pairs = zip(tensors_of(first), tensors_of(second), strict=True)
    return max((wrong_bits(x, y) for x, y in pairs), key=lambda w: w.count)


def name_of(func: Any) -> str:
    return str(func._schema.name.rpartition("::")[2]).lstrip("_")


def draws_at_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a kernel draws random numbers: it drops out, or nobody can tell."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = kwargs.get("dropout_p", args[place] if place < len(args) else argument.default_value)
            return bool(value)
    return True
