"""Boxes of tensors in global coordinates: intersecting, covering, and cutting them. Pure integers; no torch.

Role: what resharding is made of. A box is (offset, shape), row-major. Invariant: `check_cover` accepts exactly the
sets of boxes that hold every element of a tensor once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Box", "check_cover", "contiguous_span", "intersect", "rows", "whole"]


class Box(NamedTuple):
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common box, or None. A box without dimensions meets every other such box."""
    low = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    high = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in ends)
    if any(h <= o for o, h in zip(low, high, strict=True)):
        return None
    return Box(low, tuple(h - o for o, h in zip(low, high, strict=True)))


def contiguous_span(inner: Box, outer: Box) -> tuple[int, int] | None:
    """(first, number) of `inner`'s elements within row-major `outer`, or None if they are not in one run."""
    first, stride, run = 0, 1, True
    open_dim = True  # trailing dimensions so far are all complete
    for i in reversed(range(len(outer.shape))):
        start = inner.offset[i] - outer.offset[i]
        first += start * stride
        stride *= outer.shape[i]
        if not open_dim and inner.shape[i] != 1:
            run = False
        open_dim = open_dim and inner.shape[i] == outer.shape[i]
    return (first, inner.volume) if run else None


def rows(shape: Sequence[int], parts: int) -> list[Box]:
    """Cut a tensor along its first dimension into at most `parts` boxes of nearly equal size, none empty."""
    if not shape or shape[0] == 0:
        return [whole(shape)]
    count = min(parts, shape[0])
    edges = [shape[0] * k // count for k in range(count + 1)]
    rest = tuple(shape[1:])
    return [Box((lo,) + (0,) * len(rest), (hi - lo, *rest)) for lo, hi in itertools.pairwise(edges)]


def check_cover(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not hold every element of a tensor of `shape` exactly once; None if they do."""
    all_of_it = whole(shape)
    for box in boxes:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape) or min(box.offset, default=0) < 0:
            return f"a box of {len(box.shape)} dimensions at {box.offset[:8]} does not fit {len(shape)} dimensions"
        if any(n <= 0 for n in box.shape) or intersect(box, all_of_it) != box:
            return f"the box {box.offset}+{box.shape} is empty or lies outside {tuple(shape)}"
    volume = sum(box.volume for box in boxes)
    if volume != all_of_it.volume:
        return f"its boxes hold {volume} elements of {all_of_it.volume}"
    # Sweep along the dimension with most cuts, so that few boxes are open at a time however the tensor is sharded.
    sweep = max(range(len(shape)), key=lambda i: len({b.offset[i] for b in boxes}), default=None)
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: 0 if sweep is None else b.offset[sweep]):
        if sweep is not None:
            active = [a for a in active if a.offset[sweep] + a.shape[sweep] > box.offset[sweep]]
        if any(intersect(a, box) for a in active):
            return f"the box {box.offset}+{box.shape} overlaps another"
        active.append(box)
    return None
