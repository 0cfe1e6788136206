"""The files of safetensors: which they are, and where each tensor's bytes lie in them. No torch.

Role: read the headers of a file, an index or a directory of shards. Invariant: a header is checked whole (offsets
contiguous, sizes equal to shapes, inside the file) before a byte of a tensor is read. What becomes of the tensors is
the adapter's matter (generations), or the runtime's (the weights that a run begins with).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from typing import Any, NamedTuple

import msgspec

from outlast.checkpoint.fs import Disk
from outlast.checkpoint.manifest import UNREADABLE, Damage, TensorSpec
from outlast.errors import ConfigError

__all__ = ["NAMES", "TensorPlace", "is_safetensors", "open_file", "read_at", "sources_of"]

NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""The format's dtypes, by torch's names."""

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES = 256 << 20
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorPlace(NamedTuple):
    """Where a tensor's bytes are."""

    path: str
    at: int
    spec: TensorSpec


def is_safetensors(path: str) -> bool:
    return bool(_files(path))


def _files(path: str) -> list[str]:
    """The shards of a file, of an index, or of a directory with either."""
    where = pathlib.Path(path)
    if where.is_dir():
        found = sorted(where.glob("*.safetensors.index.json")) or sorted(where.glob("*.safetensors"))
        return _files(str(found[0])) if found and found[0].name.endswith(".json") else [str(f) for f in found]
    if where.name.endswith(".safetensors.index.json"):
        return [str(where.parent / name) for name in _shards(where)]
    return [path] if where.name.endswith(".safetensors") else []


def _shards(index: pathlib.Path) -> list[str]:
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise Damage("is too large for an index", file=index.name)
    try:
        names = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"].values()
        shards = sorted(set(names))
    except (KeyError, AttributeError, TypeError, *UNREADABLE) as error:
        raise Damage(f"is not a safetensors index: {error}", file=index.name) from error
    for name in shards:
        if not isinstance(name, str) or not _PLAIN.fullmatch(name) or not name.endswith(".safetensors"):
            raise Damage(f"names the shard {str(name)[:80]!r}, which is no plain file name", file=index.name)
    return shards


def sources_of(path: str) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """The tensors of a file, an index, or a directory of shards, by name; and the files' metadata.

    Raises `ConfigError` if there is nothing of the kind, `Damage` for a file that is not what it should be.
    """
    shards = _files(path)
    if not shards:
        raise ConfigError(
            f"{path} holds no safetensors files", remedy="give a .safetensors file, its index or its directory"
        )
    sources: dict[str, TensorPlace] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        found, notes = _header(shard)
        for source in found:
            if source.spec.name in sources:
                raise Damage(f"holds {source.spec.name[:80]!r} for the second time", file=os.path.basename(shard))
            sources[source.spec.name] = source
        metadata |= notes
    return sources, metadata


def open_file(path: str, stack: contextlib.ExitStack) -> int:
    fd = Disk().open(os.path.realpath(path), "read")
    stack.callback(os.close, fd)
    return fd


def read_at(fd: int, at: int, buffer: memoryview, path: str) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], at + done)
        if count == 0:
            raise Damage("ends too early", file=os.path.basename(path), offset=at + done, bytes=len(buffer) - done)
        done += count


def _header(path: str) -> tuple[list[TensorPlace], dict[str, str]]:
    name = os.path.basename(path)
    with contextlib.ExitStack() as stack:
        fd = open_file(path, stack)
        size = os.fstat(fd).st_size
        if size < 8:
            raise Damage(f"holds {size} bytes, less than a header's length", file=name)
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise Damage(f"states a header of {length} bytes in a file of {size}", file=name)
        text = bytearray(length)
        read_at(fd, 8, memoryview(text), path)
    try:
        document = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        notes = msgspec.json.decode(document.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {key: msgspec.json.decode(value, type=_Entry) for key, value in document.items()}
    except UNREADABLE as error:
        raise Damage(f"has a header that is none: {error}", file=name) from error
    return _check(entries, name, path, 8 + length, size), notes


def _check(entries: dict[str, _Entry], name: str, path: str, start: int, size: int) -> list[TensorPlace]:
    sources, end = [], 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in NAMES or any(n < 0 for n in entry.shape) or len(entry.shape) > 64:
            raise Damage(f"tensor {key[:80]!r} has dtype {entry.dtype[:20]!r}, shape {entry.shape[:8]}", file=name)
        spec = TensorSpec(key, NAMES[entry.dtype], entry.shape)
        low, high = entry.data_offsets
        if low != end or high - low != spec.bytes or start + high > size:
            raise Damage(f"tensor {key[:80]!r} does not lie where its offsets say", file=name)
        end = high
        sources.append(TensorPlace(path, start + low, spec))
    if start + end != size:
        raise Damage(f"holds {size - start - end} bytes that belong to no tensor", file=name)
    return sources
