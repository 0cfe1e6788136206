"""Adding gradients to sums and fingerprinting them in one pass over memory, by `_fold.c`; without it in two.

Role: what an audit costs where nothing is audited. Both ways give the same bits and the same fingerprints, so a caller
may meet either at any time. Not here: what is added to what (`runtime/_gradients.py`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from outlast.tensors import _native
from outlast.tensors._fingerprint import block_prints, combine, fingerprint_all

__all__ = ["add_and_print", "add_and_print_blocks", "prepare_fold"]

SOURCE = "_fold.c"
SHORTEST = 61  # elements: XXH3 has other rules for 240 bytes and less


def prepare_fold(*, wait: bool = True) -> bool:
    """Have the one pass compiled, as `Rule.prepare` does; True when it is ready."""
    if wait:
        return _native.build(SOURCE)
    if _native.library(SOURCE) is None:
        threading.Thread(target=_native.build, args=(SOURCE,), name="outlast-compile").start()
    return _native.library(SOURCE) is not None


def add_and_print(into: Sequence[Tensor], grads: Sequence[Tensor], keys: Sequence[int], *, fresh: bool) -> int:
    """into += grads, or = if `fresh`; the sum mod 2^64 of the gradients' fingerprints, each with its key."""
    native = _native.library(SOURCE)
    fast = [native is not None and _plain(a) and _plain(b) for a, b in zip(into, grads, strict=True)]
    slow = [i for i, one in enumerate(fast) if not one]
    prints = fingerprint_all([grads[i] for i in slow], [keys[i] for i in slow])
    if slow:
        sums, parts = [into[i] for i in slow], [grads[i] for i in slow]
        torch._foreach_copy_(sums, parts) if fresh else torch._foreach_add_(sums, parts)
    if native is not None and len(slow) < len(fast):
        rows = [(into[i], grads[i], keys[i]) for i, one in enumerate(fast) if one]
        count = len(rows)
        pointers, numbers = ctypes.c_void_p * count, ctypes.c_int64 * count
        added = native.add_all(
            pointers(*[a.data_ptr() for a, _, _ in rows]), pointers(*[b.data_ptr() for _, b, _ in rows]),
            numbers(*[a.numel() for a, _, _ in rows]), (ctypes.c_uint64 * count)(*[key for _, _, key in rows]), count,
            int(fresh),
        )  # fmt: skip
        prints = combine((prints, added))
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


def _plain(tensor: Tensor) -> bool:
    """Whether the one pass can read it: it knows float32 on a CPU."""
    long = tensor.numel() >= SHORTEST
    return long and tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
