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
_LOW = (1 << 32) - 1
_TOGETHER = 1 << 22
"""Words that are mixed at a time: some hundred megabytes of a device's memory."""


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
        return _mixed_blocks(flat.detach(), block, first)
    data, size = memoryview(_bytes(flat)), block * flat.element_size()
    places = enumerate(range(0, len(data), size), first)
    return tuple(xxhash.xxh3_64_intdigest(data[i : i + size], seed=n & _MASK) for n, i in places)


def fingerprint_all(tensors: Sequence[Tensor], keys: Sequence[int]) -> int:
    """Sum mod 2^64 of the fingerprints of several tensors, each with its key; few operations on a device, however many
    they are, and one wait for it at the end."""
    here = [fingerprint(t, key) for t, key in zip(tensors, keys, strict=True) if t.device.type == "cpu"]
    away = [(t, key) for t, key in zip(tensors, keys, strict=True) if t.device.type != "cpu"]
    return combine([*here, _mixed_all(away)] if away else here)


def fingerprint_named(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """A 64-bit fingerprint of a whole state: every tensor keyed by its name, shape and dtype."""
    rows = [(t, _name_key(name, t)) for name, t in tensors]
    return fingerprint_all([t for t, _ in rows], [key for _, key in rows])


def combine(parts: Sequence[int]) -> int:
    """Sum mod 2^64: independent of order and grouping."""
    return sum(parts) & _MASK


def _name_key(name: str, tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}".encode())


def _mixed(flat: Tensor, key: int) -> int:
    return int(_mixed_sum(flat, key).item()) & _MASK


def _mixed_sum(flat: Tensor, key: int) -> Tensor:
    words = _words([flat])
    index = torch.arange(words.numel(), device=words.device, dtype=torch.int64)
    return _mix(words, index + key % (1 << 32)).sum()


def _words(flats: Sequence[Tensor]) -> Tensor:
    """The bytes of flat tensors, end to end, each filled up with zeros to whole words."""
    rows: list[Tensor] = []
    for flat in flats:
        raw = flat.contiguous().view(torch.uint8)
        rows += [raw, raw.new_zeros(-raw.numel() % 8)] if raw.numel() % 8 else [raw]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).view(torch.int64)


def _mix(words: Tensor, index: Tensor) -> Tensor:
    """(low ^ k1) * (high ^ k2) of each word, NH-like: a flip in either half changes the product, a swap the sum."""
    keys = index * -7046029254386353131 + 1609587929392839161
    keys ^= keys >> 29
    mixed = words ^ keys
    product = ((mixed & _LOW) | 1) * (mixed >> 32) + mixed * -4417276706812531889
    product ^= product >> 31
    return product * -7046029254386353131


def _mixed_all(rows: Sequence[tuple[Tensor, int]]) -> int:
    """The sum of the fingerprints of (tensor, key), as other devices than processors take them."""
    groups: list[list[tuple[Tensor, int]]] = []
    size = 0
    for tensor, key in rows:
        words = -(-tensor.numel() * tensor.element_size() // 8)
        if not groups or size + words > _TOGETHER or groups[-1][0][0].device != tensor.device:
            groups.append([])
            size = 0
        groups[-1].append((tensor.detach().reshape(-1), key))
        size += words
    return combine([int(total.item()) for total in [_mixed_group(group) for group in groups]])


def _mixed_group(rows: Sequence[tuple[Tensor, int]]) -> Tensor:
    if len(rows) == 1:
        return _mixed_sum(*rows[0])
    words = _words([flat for flat, _ in rows])
    shifts: list[int] = []
    lengths: list[int] = []
    at = 0
    for flat, key in rows:
        shifts.append(key % (1 << 32) - at)
        lengths.append(-(-flat.numel() * flat.element_size() // 8))
        at += lengths[-1]
    told = torch.tensor([shifts, lengths], dtype=torch.int64, device=words.device)
    index = torch.arange(at, device=words.device, dtype=torch.int64)
    index += torch.repeat_interleave(told[0], told[1], output_size=at)
    return _mix(words, index).sum()


def _mixed_blocks(flat: Tensor, block: int, first: int) -> tuple[int, ...]:
    """The fingerprint of each block of a flat tensor, of many at a time, and one wait for them."""
    size = block * flat.element_size()
    if size % 8:
        return tuple(fingerprint(flat[i : i + block], n) for n, i in enumerate(range(0, flat.numel(), block), first))
    words, width = _words([flat]), size // 8
    whole = words.numel() // width
    place = torch.arange(width, device=words.device, dtype=torch.int64)
    found: list[Tensor] = []
    step = max(1, _TOGETHER // width)
    for lo in range(0, whole, step):
        hi = min(lo + step, whole)
        keys = torch.arange(first + lo, first + hi, device=words.device, dtype=torch.int64) & _LOW
        found.append(_mix(words[lo * width : hi * width].view(hi - lo, width), place + keys[:, None]).sum(1))
    rest = words[whole * width :]
    if rest.numel():
        found.append(_mix(rest, place[: rest.numel()] + ((first + whole) & _LOW)).sum().reshape(1))
    return tuple(value & _MASK for value in torch.cat(found).tolist()) if found else ()
