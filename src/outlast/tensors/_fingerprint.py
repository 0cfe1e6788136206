"""Position-dependent fingerprints of tensors, at memory speed (protocol, 17).

On a CPU each 32 Ki-element block, or each whole tensor, is hashed with XXH3 (33 GiB/s; order matters, unlike an XOR),
keyed by what it is; on other devices words are mixed with a key of their index and summed. Keyed values are added mod
2^64, so shares computed by different members combine in any order. Equal only on equal devices: the numerics signature
keeps those apart. Not for adversaries: a hash that anyone can compute proves no identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

__all__ = ["block_prints", "combine", "fingerprint", "fingerprint_all", "fingerprint_named"]

_MASK = (1 << 64) - 1


def fingerprint(tensor: Tensor, key: int = 0) -> int:
    """64-bit fingerprint of the values in their order; `key` tells apart what they belong to."""
    if not tensor.is_cpu:
        return _mixed(tensor.detach().reshape(-1), key)
    plain = tensor.dtype == torch.float32 and tensor.is_contiguous()
    data: Any = tensor.detach().numpy() if plain else _bytes(tensor)
    return xxhash.xxh3_64_intdigest(data, seed=key & _MASK)


def _bytes(tensor: Tensor) -> Any:
    """Its values in their order. Few calls: for a small tensor they cost more than the hash does."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # also of a single element, whose stride means nothing, but which `view` asks for
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def block_prints(flat: Tensor, block: int, first: int) -> tuple[int, ...]:
    """The fingerprint of each block of a flat tensor, keyed by its number counted from `first`."""
    if not flat.is_cpu:
        return tuple(fingerprint(flat[i : i + block], n) for n, i in enumerate(range(0, flat.numel(), block), first))
    data, size = memoryview(_bytes(flat)), block * flat.element_size()
    places = enumerate(range(0, len(data), size), first)
    return tuple(xxhash.xxh3_64_intdigest(data[i : i + size], seed=n & _MASK) for n, i in places)


def fingerprint_all(tensors: Sequence[Tensor], keys: Sequence[int]) -> int:
    """Sum mod 2^64 of the fingerprints of several tensors, each with its key; one wait for the device at the end."""
    here = [fingerprint(t, key) for t, key in zip(tensors, keys, strict=True) if t.device.type == "cpu"]
    rows = zip(tensors, keys, strict=True)
    away = [_mixed_sum(t.detach().reshape(-1), key) for t, key in rows if t.device.type != "cpu"]
    return combine([*here, int(torch.stack(away).sum().item())] if away else here)


def fingerprint_named(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Of a whole state: every tensor keyed by its name, shape and dtype."""
    return combine([fingerprint(t, _name_key(name, t)) for name, t in tensors])


def combine(parts: Sequence[int]) -> int:
    """Sum mod 2^64: independent of order and grouping."""
    return sum(parts) & _MASK


def _name_key(name: str, tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}".encode())


def _mixed(flat: Tensor, key: int) -> int:
    return int(_mixed_sum(flat, key).item()) & _MASK


def _mixed_sum(flat: Tensor, key: int) -> Tensor:
    """(low ^ k1) * (high ^ k2) of each word, NH-like: a flip in either half changes the product, a swap the sum."""
    raw = flat.contiguous().view(torch.uint8)
    spare = -raw.numel() % 8
    words = torch.cat([raw, raw.new_zeros(spare)]).view(torch.int64) if spare else raw.view(torch.int64)
    index = torch.arange(words.numel(), device=words.device, dtype=torch.int64)
    keys = (index + key % (1 << 32)) * -7046029254386353131 + 1609587929392839161
    keys ^= keys >> 29
    mixed = words ^ keys
    product = ((mixed & 0xFFFFFFFF) | 1) * (mixed >> 32) + mixed * -4417276706812531889
    product ^= product >> 31
    return (product * -7046029254386353131).sum()
