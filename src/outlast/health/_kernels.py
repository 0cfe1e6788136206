"""Kernels whose answers are known: what a device is asked, and what it must say.

Three kinds of answer. *Exact*: inputs are small whole numbers, so that every order of summation gives the same result,
on any device of any kind, and it is computed here in integers. *Pattern*: what was written to memory must be read back.
*Same*: the bits of functions such as `exp` differ between kinds of devices, but not between two of a kind, nor between
two times; they are compared with the answers that a device of this kind gave before, and held to the true value within
a few units of the last place. Inputs come from the host's generator, so all devices get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Case", "cases"]

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_PATTERNS = {"zeros": 0x00, "ones": 0xFF, "checker": 0xAA, "checker turned": 0x55}


@dataclass(frozen=True, slots=True)
class Case:
    """One question. `compute()`: the device's answer; `expected`: what it must be to the bit, where that is known;
    `near`: the true values and how far off they may be, where only these are known. `operations`: about how many."""

    name: str
    compute: Callable[[], Tensor]
    operations: float
    expected: Tensor | None = None
    near: tuple[Tensor, float] | None = None


def cases(device: torch.device, size: int = 256, seed: int = 0) -> Iterator[Case]:
    """All questions to a device; `size` is the side of its matrices, and more asks more of it."""
    draw = torch.Generator().manual_seed(seed)
    for name, dtype in FLOATS.items():
        if dtype == torch.float64 and device.type == "mps":
            continue
        yield from _products(name, dtype, device, size, draw)
        yield from _reductions(name, dtype, device, size, draw)
        yield from _functions(name, dtype, device, size, draw)
    yield from _integers(device, size, draw)
    yield from _memory(device, size)
    yield from _copies(device, size, draw)


def _whole(draw: torch.Generator, *shape: int, top: int = 3) -> Tensor:
    """Whole numbers from 1 - top to top - 1."""
    return torch.randint(1 - top, top, shape, generator=draw)


def _products(name: str, dtype: torch.dtype, device: torch.device, size: int, draw: torch.Generator) -> Iterator[Case]:
    """Matrix products with each side turned, batches, and convolutions; sums stay below 2^8, exact in any type."""
    depth = size if dtype in (torch.float32, torch.float64) else min(size, 60)
    a, b = _whole(draw, size, depth), _whole(draw, depth, size)
    exact = (a.double() @ b.double()).to(dtype)
    here, there = a.to(device, dtype), b.to(device, dtype)
    turned = here.t().contiguous().t(), there.t().contiguous().t()
    flops = 2.0 * size * size * depth
    yield Case(f"matmul {name}", lambda: here @ there, flops, exact)
    yield Case(f"matmul turned {name}", lambda: turned[0] @ turned[1], flops, exact)
    batch = here.reshape(4, size // 4, depth), there.expand(4, depth, size).contiguous()
    yield Case(f"batched matmul {name}", lambda: torch.bmm(*batch).reshape(size, size), flops, exact)
    image, kernel = _whole(draw, 4, 6, 24, 24, top=2), _whole(draw, 8, 6, 3, 3)
    answer = functional.conv2d(image.double(), kernel.double(), padding=1).to(dtype)
    x, w = image.to(device, dtype), kernel.to(device, dtype)
    yield Case(f"convolution {name}", lambda: functional.conv2d(x, w, padding=1), 2.0 * answer.numel() * 54, answer)


def _reductions(
    name: str, dtype: torch.dtype, device: torch.device, size: int, draw: torch.Generator
) -> Iterator[Case]:
    rows = _whole(draw, size, 4 * size if dtype in (torch.float32, torch.float64) else 64)
    here = rows.to(device, dtype)
    yield Case(f"sum {name}", lambda: here.sum(1), float(rows.numel()), rows.sum(1).to(dtype))
    yield Case(f"sum of columns {name}", lambda: here[:60].sum(0), float(rows[:60].numel()), rows[:60].sum(0).to(dtype))
    yield Case(f"largest {name}", lambda: here.amax(1), float(rows.numel()), rows.amax(1).to(dtype))
    short = here[:, :60]
    yield Case(f"running sum {name}", lambda: short.cumsum(1), float(short.numel()), rows[:, :60].cumsum(1).to(dtype))


def _functions(name: str, dtype: torch.dtype, device: torch.device, size: int, draw: torch.Generator) -> Iterator[Case]:
    x = (torch.rand(size, size, generator=draw) * 4 + 0.25).to(dtype)
    here, wide = x.to(device), x.double()
    eps = float(torch.finfo(dtype).eps)
    for title, function in (
        ("exp", torch.exp),
        ("log", torch.log),
        ("tanh", torch.tanh),
        ("erf", torch.erf),
        ("rsqrt", torch.rsqrt),
        ("gelu", functional.gelu),
    ):
        true = function(wide)
        yield Case(f"{title} {name}", _bound(function, here), float(x.numel()), near=(true, 16 * eps))
    true = torch.softmax(wide, -1)
    yield Case(f"softmax {name}", lambda: torch.softmax(here, -1), 5.0 * x.numel(), near=(true, 64 * eps))


def _bound(function: Callable[[Tensor], Tensor], here: Tensor) -> Callable[[], Tensor]:
    return lambda: function(here)


def _integers(device: torch.device, size: int, draw: torch.Generator) -> Iterator[Case]:
    x = torch.randint(-(2**31), 2**31 - 1, (size, size), generator=draw)
    here = x.to(device)
    answer = (x * 6364136223846793005 + 1442695040888963407) ^ (x >> 7)
    yield Case(
        "integers", lambda: (here * 6364136223846793005 + 1442695040888963407) ^ (here >> 7), 4.0 * x.numel(), answer
    )
    keys = torch.randperm(size * 16, generator=draw)
    mine = keys.to(device)
    yield Case("sort", lambda: mine.sort().values, 16.0 * size * 12, torch.arange(size * 16))
    yield Case("gather", lambda: mine[mine], 16.0 * size, keys[keys])


def _memory(device: torch.device, size: int) -> Iterator[Case]:
    """Patterns in 64 bytes for each of size x size places: 4 MiB for 256."""
    count = size * size * 64
    for name, byte in _PATTERNS.items():
        yield Case(f"memory {name}", _filled(count, byte, device), float(count), torch.full((count,), byte).byte())
    yield Case(
        "memory walking bit",
        lambda: 1 << (torch.arange(count // 8, device=device) % 63),
        float(count),
        1 << (torch.arange(count // 8) % 63),
    )
    yield Case(
        "memory own address", lambda: torch.arange(count // 8, device=device), float(count), torch.arange(count // 8)
    )


def _filled(count: int, byte: int, device: torch.device) -> Callable[[], Tensor]:
    return lambda: torch.full((count,), byte, dtype=torch.uint8, device=device)


def _copies(device: torch.device, size: int, draw: torch.Generator) -> Iterator[Case]:
    x = torch.randint(256, (size, size * 4), generator=draw).byte()
    here = x.to(device)
    yield Case("copy", lambda: here.clone(), float(x.numel()), x)
    yield Case("copy turned", lambda: here.t().contiguous().t().contiguous(), 2.0 * x.numel(), x)
    yield Case("copy to the device and back", lambda: x.to(device, copy=True).to("cpu", copy=True), 2.0 * x.numel(), x)
