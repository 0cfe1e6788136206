"""One pass over memory instead of several, by `_fold.c`: adding, fingerprinting and measuring.

Role: what audits and guards cost where nothing is wrong. Both ways give the same bits and the same fingerprints, so a
caller may meet either at any time. But for one thing: which of two NaNs the sum of gradients keeps; of what is reduced
every member has the same one, for they compare it. Not here: what is added to what
(`runtime/training/_partial_sums.py`), nor what a norm is for.
"""

from __future__ import annotations

import array
import ctypes
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outlast.tensors import _native
from outlast.tensors._eager import tree_sum
from outlast.tensors._fingerprint import block_prints, combine, fingerprint_all
from outlast.tensors._layout import BLOCK
from outlast.tensors._reduce import Node, reduce_slice

__all__ = [
    "Fold", "Looked", "add_and_print_blocks", "look", "packed_prints", "prepare_fold", "reduce_and_look",
    "sum_of_squares",
]  # fmt: skip

SOURCE = "_fold.c"
LANES = 64
AT_A_TIME = 128  # blocks that are measured together, where no processor does it
LARGEST = float(torch.finfo(torch.float32).max)
MOST = 64  # parts of a sum
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


def packed_prints(flat: Tensor, block: int, first: int) -> bytes:
    """`block_prints`, eight bytes each."""
    return array.array("Q", block_prints(flat, block, first)).tobytes()


def add_and_print_blocks(to: Tensor, source: Tensor, block: int, first: int) -> bytes:
    """to += source, flat; `packed_prints` of the result."""
    native, length = _native.library(SOURCE), to.numel()
    if native is None or not (_plain(to) and _plain(source)) or 0 < length % block < SHORTEST:
        to.add_(source)
        return packed_prints(to, block, first)
    prints = (ctypes.c_uint64 * -(-length // block))()
    native.add_blocks(to.data_ptr(), source.data_ptr(), length, block, first, prints)
    return bytes(prints)


class Looked(NamedTuple):
    """A flat tensor, block by block, each block keyed by its number. `print`: sum mod 2^64 of their fingerprints;
    `squares`: each one's sum of squares, where asked for; `parts`: what was summed: `packed_prints` of it."""

    print: int
    squares: tuple[float, ...] = ()
    parts: dict[Node, bytes] = {}  # noqa: RUF012


def look(flat: Tensor, first: int, *, squares: bool) -> Looked:
    """`first`: number of the first block."""
    if _fast([flat]):
        return _in_one({(0, 1): flat}, [], 1.0, flat, first, squares, False)[0]
    prints = combine(block_prints(flat, BLOCK, first))
    if not squares:
        return Looked(prints)
    if not flat.is_cpu:
        return Looked(prints, _squares_of_blocks(flat))
    return Looked(prints, tuple(sum_of_squares(flat[i : i + BLOCK]) for i in range(0, flat.numel(), BLOCK)))


def reduce_and_look(
    parts: Mapping[Node, Tensor],
    schedule: Sequence[tuple[Node, Node, Node]],
    root: Node,
    scale: float,
    out: Tensor,
    first: int,
    *,
    squares: bool,
    compare: bool,
) -> Looked:
    """`reduce_slice`, and a look at the result, and with `compare` at the parts, as they are when they are added."""
    if len(schedule) + 1 == len(parts) <= MOST and _fast([out, *parts.values()]):
        looked, unsure = _in_one(parts, schedule, scale, out, first, squares, compare)
        if not unsure:
            return looked
    before = {node: packed_prints(part, BLOCK, first) for node, part in parts.items()} if compare else {}
    reduce_slice(parts, schedule, root, scale, out)
    return look(out, first, squares=squares)._replace(parts=before)


def _in_one(
    parts: Mapping[Node, Tensor],
    schedule: Sequence[tuple[Node, Node, Node]],
    scale: float,
    out: Tensor,
    first: int,
    squares: bool,
    compare: bool,
) -> tuple[Looked, bool]:
    """And whether NaNs came out, of which others may keep another."""
    number, steps = {node: i for i, node in enumerate(parts)}, []
    for left, right, parent in schedule:
        steps += [number[left], number[right]]
        number[parent] = len(number)
    count, length = len(parts), out.numel()
    num_blocks = -(-length // BLOCK)
    at = (ctypes.c_void_p * count)(*[part.data_ptr() for part in parts.values()])
    order = (ctypes.c_int32 * len(steps))(*steps)
    prints = (ctypes.c_uint64 * (num_blocks * count if compare else 0))()
    sums = (ctypes.c_double * (num_blocks if squares else 0))()
    work = _Slice(
        out=out.data_ptr(),
        parts=ctypes.addressof(at),
        steps=ctypes.addressof(order),
        prints=ctypes.addressof(prints) if compare else None,
        squares=ctypes.addressof(sums) if squares else None,
        num_parts=count,
        num_steps=len(schedule),
        length=length,
        block=BLOCK,
        first=first,
        scale=scale,
    )
    native = _native.library(SOURCE)
    assert native is not None
    found = native.reduce(ctypes.addressof(work))
    said, size = bytes(prints), 8 * num_blocks
    rows = {node: said[i * size : (i + 1) * size] for i, node in enumerate(parts)} if compare else {}
    return Looked(found, tuple(_within(out, value) for value in sums), rows), bool(work.unsure)


class _Slice(ctypes.Structure):
    """`slice` of `_fold.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "parts", "steps", "prints", "squares")),
        *((name, ctypes.c_long) for name in ("num_parts", "num_steps", "length", "block")),
        ("first", ctypes.c_uint64), ("scale", ctypes.c_double), ("unsure", ctypes.c_long),
    )  # fmt: skip


def sum_of_squares(block: Tensor) -> float:
    """In float64, the squares of float32 being exact there: a balanced tree over rows of 64 values, zeros following the
    last, and then over what is left in each lane. So it is the same on every device and processor. Infinite where
    float32 could not hold it, of values that are no wider: nothing good comes of such a gradient."""
    rows = torch.nn.functional.pad(block.double().square(), (0, -block.numel() % LANES)).view(-1, LANES)
    return _within(block, float(tree_sum(tree_sum(rows))))


def _squares_of_blocks(flat: Tensor) -> tuple[float, ...]:
    """`sum_of_squares` of each block, of many at a time and one wait for them: zeros at the end change nothing."""
    found: list[Tensor] = []
    for part in torch.split(flat, AT_A_TIME * BLOCK) if flat.numel() else ():
        squares = torch.nn.functional.pad(part.double().square(), (0, -part.numel() % BLOCK))
        lanes = tree_sum(squares.view(-1, BLOCK // LANES, LANES).transpose(0, 1))
        found.append(tree_sum(lanes.t()))
    return tuple(_within(flat, value) for value in (torch.cat(found).tolist() if found else ()))


def _within(block: Tensor, squares: float) -> float:
    return math.inf if squares > LARGEST and block.dtype != torch.float64 else squares


def _fast(tensors: Sequence[Tensor]) -> bool:
    """Whether all of them, of one length, go through the one pass."""
    short = 0 < tensors[0].numel() % BLOCK < SHORTEST
    return not short and _native.library(SOURCE) is not None and all(map(_plain, tensors))


def _plain(tensor: Tensor) -> bool:
    """Whether the one pass can read it: it knows float32 on a CPU."""
    long = tensor.numel() >= SHORTEST
    return long and tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
