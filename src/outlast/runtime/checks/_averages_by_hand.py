"""Is a tensor an average of a parameter? Told from two looks at it, one step apart, and from the parameter (41).

An average takes a step towards the parameter: what it became lies between what it was and the parameter, in all
elements at the same fraction. That holds for decayed and for equally weighted ones, in place or as a new tensor,
whoever wrote it; a copy of a parameter, of now or of before, or anything else of its shape does not do so. Compared are
up to `_MOST` elements, to the rounding of their type. What it cannot tell apart from rounding it leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["LEAST", "Look", "Values", "average_of", "nearest", "sampled"]

Values = NDArray[np.float64]
_MOST = 512  # elements of a tensor
LEAST = 16
"""Elements of a tensor that tell something."""
_ULPS = 4.0  # of rounding, in an average's step
_CLEAR = 32.0  # times above rounding, before it is called a step
_MANY = 8.0  # elements that a step has to be of, at least: of one or two anything is a multiple
_STRAIGHT = 1e-7  # of the cosine
_STEP = 1e-6, 0.95  # as a fraction of the way: more is a copy
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Look:
    """Elements of a tensor as they were. `eps`: of its type."""

    values: Values
    eps: float


def sampled(tensor: Tensor) -> Look:
    """Elements of it, in double precision on the host; the same ones of each tensor of its shape. No tensors, which
    might be taken for what is looked for."""
    flat = tensor.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // _MOST)][:_MOST].to("cpu", torch.float64)
    return Look(chosen.numpy().copy(), torch.finfo(tensor.dtype).eps)


def nearest(look: Look, others: Sequence[Look]) -> Look | None:
    """Which of others, all of its shape, it is nearest to."""
    if not others:
        return None
    distances = np.square(np.stack([other.values for other in others]) - look.values).sum(1)
    return others[int(distances.argmin())]


@np.errstate(all="ignore")
def average_of(before: Look, after: Look, params: Values, eps: float, copies: Values, moves: Values) -> int:
    """Which of `params`, one a row, it took a step towards, -1 for none. `eps`: of their type. `copies`: what
    parameters were so far, a row each: who is one of them is no average. `moves`: how the parameters moved last. On a
    straight line copies of other times lie between as well, so that tells nothing."""
    step = after.values - before.values
    if not step.any() or not before.values.any():  # from zero, any multiple lies between
        return -1
    own, size = _ULPS * max(before.eps, after.eps), np.maximum(abs(after.values), abs(before.values))
    if (abs(after.values - copies) <= own * size + _TINY).all(1).any():
        return -1
    way = params - before.values
    fraction = (way @ step) / np.square(way).sum(1)
    between = (fraction > _STEP[0]) & (fraction < _STEP[1])
    rounding = own * np.maximum(size, abs(params)) + _ULPS * eps * abs(fraction)[:, None] * abs(params) + _TINY
    in_line = (abs(step - fraction[:, None] * way) <= rounding).all(1)
    clear = _length(step) >= _CLEAR * _length(rounding)
    sizes = _length(way) * _length(moves)
    straight = (sizes > 0.0) & (abs((way * moves).sum(1)) >= (1.0 - _STRAIGHT) * sizes)
    rows = np.flatnonzero(between & in_line & clear & ~straight)
    return next((int(row) for row in rows if _has_many_sizes(way[row])), -1)


def _length(values: Values) -> Any:
    return np.sqrt(np.square(values).sum(-1))


def _has_many_sizes(way: Values) -> bool:
    """Whether many elements count, and not all alike: else a step is a multiple of it by accident."""
    squares = np.square(way)
    sizes = abs(way)[squares > squares.max() * 1e-6]
    counting = float(squares.sum() ** 2 / np.square(squares).sum())
    return counting >= _MANY and float(sizes.std()) > 0.05 * float(sizes.mean())
