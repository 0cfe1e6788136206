"""One pass over memory instead of two, by `_fold.c`: adding and fingerprinting, fingerprinting and measuring.

Role: what audits and guards cost where nothing is wrong. Both ways give the same bits and the same fingerprints, so a
caller may meet either at any time. Not here: what is added to what (`runtime/_gradients.py`), nor what a norm is for.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from outlast.tensors import _native
from outlast.tensors._eager import tree_sum
from outlast.tensors._fingerprint import block_prints, combine, fingerprint, fingerprint_all

__all__ = ["Fold", "add_and_print_blocks", "look_at_block", "prepare_fold", "sum_of_squares"]

SOURCE = "_fold.c"
LANES = 64
LARGEST = float(torch.finfo(torch.float32).max)
SHORTEST = 61  # elements: XXH3 has other rules for 240 bytes and less


def prepare_fold(*, wait: bool = True) -> bool:
    """Have the one pass compiled, as `Rule.prepare` does; True when it is ready."""
    if wait:
        return _native.build(SOURCE)
    if _native.library(SOURCE) is None:
        threading.Thread(target=_native.build, args=(SOURCE,), name="outlast-compile").start()
    return _native.library(SOURCE) is not None


class Fold:
    """Adds gradients to the same sums again and again. `keys`: of the fingerprints of what is added."""

    def __init__(self, into: Sequence[Tensor], keys: Sequence[int]) -> None:
        self._into, self._keys = list(into), list(keys)
        self._slow = [i for i, tensor in enumerate(into) if not _plain(tensor)]
        self._fast = [i for i, tensor in enumerate(into) if _plain(tensor)]
        count = len(self._fast)
        self._from = (ctypes.c_void_p * count)()
        self._to = (ctypes.c_void_p * count)(*[into[i].data_ptr() for i in self._fast])
        self._lengths = (ctypes.c_int64 * count)(*[into[i].numel() for i in self._fast])
        self._seeds = (ctypes.c_uint64 * count)(*[keys[i] for i in self._fast])

    def add(self, grads: Sequence[Tensor], *, fresh: bool) -> int:
        """sums += grads, or = if `fresh`; the sum mod 2^64 of the gradients' fingerprints, each with its key."""
        native = _native.library(SOURCE)
        if native is None or not all(grads[i].dtype == torch.float32 and grads[i].is_contiguous() for i in self._fast):
            return self._in_two(range(len(grads)), grads, fresh)
        for place, i in enumerate(self._fast):
            self._from[place] = grads[i].data_ptr()
        count = len(self._fast)
        added = native.add_all(self._to, self._from, self._lengths, self._seeds, count, fresh)
        return combine((added, self._in_two(self._slow, grads, fresh))) if self._slow else int(added)

    def _in_two(self, which: Sequence[int], grads: Sequence[Tensor], fresh: bool) -> int:
        into, parts = [self._into[i] for i in which], [grads[i] for i in which]
        prints = fingerprint_all(parts, [self._keys[i] for i in which])
        if into:
            torch._foreach_copy_(into, parts) if fresh else torch._foreach_add_(into, parts)
        return prints


def add_and_print_blocks(to: Tensor, source: Tensor, block: int, first: int) -> tuple[int, ...]:
    """to += source, flat; the fingerprint of each block of the result, keyed by its number counted from `first`."""
    native, length = _native.library(SOURCE), to.numel()
    if native is None or not (_plain(to) and _plain(source)) or 0 < length % block < SHORTEST:
        to.add_(source)
        return block_prints(to, block, first)
    prints = (ctypes.c_uint64 * -(-length // block))()
    native.add_blocks(to.data_ptr(), source.data_ptr(), length, block, first, prints)
    return tuple(prints)


def look_at_block(block: Tensor, key: int) -> tuple[int, float]:
    """(fingerprint, sum of squares) of a block."""
    native = _native.library(SOURCE)
    if native is None or not _plain(block):
        return fingerprint(block, key), sum_of_squares(block)
    print_ = ctypes.c_uint64()
    squares = native.look(block.data_ptr(), block.numel(), key, ctypes.addressof(print_))
    return print_.value, _within(block, squares)


def sum_of_squares(block: Tensor) -> float:
    """In float64, the squares of float32 being exact there: a balanced tree over rows of 64 values, zeros following the
    last, and then over what is left in each lane. So it is the same on every device and processor. Infinite where
    float32 could not hold it, of values that are no wider: nothing good comes of such a gradient."""
    rows = torch.nn.functional.pad(block.double().square(), (0, -block.numel() % LANES)).view(-1, LANES)
    return _within(block, float(tree_sum(tree_sum(rows))))


def _within(block: Tensor, squares: float) -> float:
    return math.inf if squares > LARGEST and block.dtype != torch.float64 else squares


def _plain(tensor: Tensor) -> bool:
    """Whether the one pass can read it: it knows float32 on a CPU."""
    long = tensor.numel() >= SHORTEST
    return long and tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
