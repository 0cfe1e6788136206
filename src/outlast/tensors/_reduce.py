"""Adding partial sums: a slice of the fixed tree, whoever computed its leaves.

`reduce_slice` gives the same bits for any way of cutting the tree into nodes (protocol, 8). It never writes its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outlast.tensors._layout import BLOCK

__all__ = ["Node", "reduce_slice"]

Node = tuple[int, int]


def reduce_slice(
    parts: Mapping[Node, Tensor], schedule: Sequence[tuple[Node, Node, Node]], root: Node, scale: float, out: Tensor
) -> None:
    """out = scale · (the tree's root), from 1-D partial sums of equal length.

    `schedule`: the additions (left, right, parent) still to be done, children before parents. Works in blocks that
    stay in cache where there is a processor's; needs one block of scratch per pending addition.
    """
    size = BLOCK if out.is_cpu else max(1, out.numel())  # elsewhere each block would be a kernel of its own
    scratch = [out.new_empty(min(size, out.numel())) for _ in range(max(0, len(schedule) - 1))]
    for start in range(0, out.numel(), size):
        stop = min(start + size, out.numel())
        have = {node: part[start:stop] for node, part in parts.items()}
        for index, (left, right, parent) in enumerate(schedule):
            last = index == len(schedule) - 1
            into = out[start:stop] if last else scratch[index][: stop - start]
            have[parent] = torch.add(have[left], have[right], out=into)
        if not schedule:
            torch.mul(have[root], scale, out=out[start:stop])
        elif scale != 1.0:
            out[start:stop].mul_(scale)
