"""safetensors (Hugging Face shards with an index, or one file) to generations and back. No torch.

Role: interchange with the format that models travel in: an 8-byte length, a JSON header of names, dtypes, shapes and
offsets, then the bytes. Invariants: a header is checked whole (offsets contiguous, sizes equal to shapes, inside the
file) before a byte is read; nothing larger than a tensor's band is held in memory on export, nor than one group on
import; files appear under their names only when they are complete. safetensors has no state tree: an exported one
rides in the first file's metadata and comes back, a plain one comes as a flat dict.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from outlast.checkpoint._boxes import Box, rows, whole
from outlast.checkpoint._build import Item, build
from outlast.checkpoint._fs import Disk
from outlast.checkpoint._manifest import DTYPE_BYTES, UNREADABLE, Damage, TensorSpec
from outlast.checkpoint._reader import Reader, runs_of_box
from outlast.checkpoint._store import Store
from outlast.errors import ConfigError

__all__ = ["export_safetensors", "import_safetensors", "is_safetensors"]

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_CODES = {name: code for code, name in _NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES = 256 << 20
_BAND_BYTES = 32 << 20
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Source(NamedTuple):
    """Where a tensor's bytes are."""

    path: str
    at: int
    spec: TensorSpec


# import


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


def import_safetensors(
    path: str,
    store: Store,
    *,
    step: int,
    created_s: float,
    nonce: str,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """A file, an index, or a directory of shards becomes a generation; returns its number.

    Raises `ConfigError` if there is nothing of the kind, `Damage` for a file that is not what it should be.
    """
    shards = _files(path)
    if not shards:
        raise ConfigError(
            f"{path} holds no safetensors files", remedy="give a .safetensors file, its index or its directory"
        )
    sources: dict[str, _Source] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        found, notes = _header(shard)
        for source in found:
            if source.spec.name in sources:
                raise Damage(f"holds {source.spec.name[:80]!r} for the second time", file=os.path.basename(shard))
            sources[source.spec.name] = source
        metadata |= notes
    names, tree = _tree(metadata, sorted(sources))
    specs = [sources[name].spec for name in names]
    items = [Item(number, whole(spec.shape)) for number, spec in enumerate(specs)]
    total, done = sum(spec.bytes for spec in specs), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    with contextlib.ExitStack() as stack:
        fds = {shard: _open(shard, stack) for shard in shards}

        def fill(number: int, buffer: memoryview) -> None:
            source = sources[names[number]]
            _read(fds[source.path], source.at, buffer, source.path)

        extra = {"imported_from": os.path.basename(os.path.normpath(path)), "format": "safetensors"}
        return build(
            store, specs, tree, items, fill, step=step, created_s=created_s, nonce=nonce, extra=extra, progress=advance
        )


def _open(path: str, stack: contextlib.ExitStack) -> int:
    fd = Disk().open(os.path.realpath(path), "read")
    stack.callback(os.close, fd)
    return fd


def _read(fd: int, at: int, buffer: memoryview, path: str) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], at + done)
        if count == 0:
            raise Damage("ends too early", file=os.path.basename(path), offset=at + done, bytes=len(buffer) - done)
        done += count


def _header(path: str) -> tuple[list[_Source], dict[str, str]]:
    name = os.path.basename(path)
    with contextlib.ExitStack() as stack:
        fd = _open(path, stack)
        size = os.fstat(fd).st_size
        if size < 8:
            raise Damage(f"holds {size} bytes, less than a header's length", file=name)
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise Damage(f"states a header of {length} bytes in a file of {size}", file=name)
        text = bytearray(length)
        _read(fd, 8, memoryview(text), path)
    try:
        document = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        notes = msgspec.json.decode(document.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {key: msgspec.json.decode(value, type=_Entry) for key, value in document.items()}
    except UNREADABLE as error:
        raise Damage(f"has a header that is none: {error}", file=name) from error
    return _check(entries, name, path, 8 + length, size), notes


def _check(entries: dict[str, _Entry], name: str, path: str, start: int, size: int) -> list[_Source]:
    sources, end = [], 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _NAMES or any(n < 0 for n in entry.shape) or len(entry.shape) > 64:
            raise Damage(f"tensor {key[:80]!r} has dtype {entry.dtype[:20]!r}, shape {entry.shape[:8]}", file=name)
        spec = TensorSpec(key, _NAMES[entry.dtype], entry.shape)
        low, high = entry.data_offsets
        if low != end or high - low != spec.bytes or start + high > size:
            raise Damage(f"tensor {key[:80]!r} does not lie where its offsets say", file=name)
        end = high
        sources.append(_Source(path, start + low, spec))
    if start + end != size:
        raise Damage(f"holds {size - start - end} bytes that belong to no tensor", file=name)
    return sources


def _tree(metadata: dict[str, str], names: list[str]) -> tuple[list[str], Any]:
    """The exported state's own tree, if it is there and about these tensors; else a flat dict."""
    try:
        order = msgspec.json.decode(metadata["outlast.names"], type=list[str])
        if sorted(order) == names:
            return order, msgspec.json.decode(metadata["outlast.tree"])
    except (KeyError, *UNREADABLE):
        pass
    return names, {"d": [[name, {"T": number}] for number, name in enumerate(names)]}


# export


def export_safetensors(
    reader: Reader,
    directory: str,
    numbers: Sequence[int],
    *,
    shard_bytes: int = 5 << 30,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write these tensors as `model*.safetensors` (and an index if there are several); returns the file names.

    Raises `ConfigError` for a dtype that the format does not have, `Damage` if the generation is not right.
    """
    specs = [reader.tensors[number] for number in numbers]
    for spec in specs:
        if spec.dtype not in _CODES:
            raise ConfigError(
                f"safetensors has no {spec.dtype} ({spec.name!r})", remedy="leave it out with --names, or export to dcp"
            )
    os.makedirs(directory, exist_ok=True)
    groups = _split(list(zip(numbers, specs, strict=True)), shard_bytes)
    count = len(groups)
    files = (
        ["model.safetensors"] if count == 1 else [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
    )
    whole_state = len(numbers) == len(reader.tensors)
    total, done = sum(spec.bytes for spec in specs), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    for file, group in zip(files, groups, strict=True):
        notes = {"format": "pt"}
        if whole_state and file == files[0]:
            notes["outlast.names"] = msgspec.json.encode([spec.name for spec in reader.tensors]).decode()
            notes["outlast.tree"] = msgspec.json.encode(reader.tree).decode()
        with _atomic(os.path.join(directory, file)) as fd:
            _write_file(reader, fd, group, notes, advance)
    if count > 1:
        weights = {spec.name: file for file, group in zip(files, groups, strict=True) for _, spec in group}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        files.append("model.safetensors.index.json")
        with _atomic(os.path.join(directory, files[-1])) as fd:
            _write(fd, memoryview(msgspec.json.format(msgspec.json.encode(index), indent=2)))
    Disk().sync_dir(directory)
    return files


def _split(tensors: list[tuple[int, TensorSpec]], shard_bytes: int) -> list[list[tuple[int, TensorSpec]]]:
    groups: list[list[tuple[int, TensorSpec]]] = [[]]
    size = 0
    for number, spec in tensors:
        if groups[-1] and size + spec.bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append((number, spec))
        size += spec.bytes
    return groups


@contextlib.contextmanager
def _atomic(path: str) -> Iterator[int]:
    temporary = f"{path}.partial"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        yield fd
        os.fsync(fd)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    os.rename(temporary, path)


def _write(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def _write_file(
    reader: Reader,
    fd: int,
    group: list[tuple[int, TensorSpec]],
    notes: dict[str, str],
    advance: Callable[[int], None],
) -> None:
    header: dict[str, Any] = {"__metadata__": notes}
    at = 0
    # Wide elements first, so that every tensor is aligned to its element size, as readers that map the file expect.
    ordered = sorted(group, key=lambda pair: -DTYPE_BYTES[pair[1].dtype])
    for _, spec in ordered:
        offsets = [at, at + spec.bytes]
        header[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.bytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    _write(fd, memoryview(len(text).to_bytes(8, "little") + text))
    for number, spec in ordered:
        for band in _bands(spec):
            buffer = bytearray(band.volume * DTYPE_BYTES[spec.dtype])
            reader.read(list(runs_of_box(reader, number, band, memoryview(buffer))))
            _write(fd, memoryview(buffer))
            advance(len(buffer))


def _bands(spec: TensorSpec) -> list[Box]:
    if spec.bytes == 0:
        return []
    return rows(spec.shape, max(1, math.ceil(spec.bytes / _BAND_BYTES)))
