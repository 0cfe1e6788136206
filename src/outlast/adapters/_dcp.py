"""Distributed Checkpoint (torch.distributed.checkpoint) to generations and back. torch.

Role: interchange with DCP's directory format: a pickled `.metadata` and files of torch-saved tensors. Reading its
metadata is the one place where outlast unpickles anything, through a list of the dozen classes that belong there.
Invariants: no class outside the list is ever built; a path in the metadata cannot leave the directory; memory is one
group on import and one tensor on export.
"""

from __future__ import annotations

import codecs
import importlib
import io
import os
import pathlib
import pickle
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from outlast.checkpoint.boxes import Box, check_cover, whole
from outlast.checkpoint.building import Item, build
from outlast.checkpoint.fs import Disk
from outlast.checkpoint.loading import fresh, rebuild
from outlast.checkpoint.manifest import DTYPE_BYTES, Damage, TensorSpec
from outlast.checkpoint.reader import Reader
from outlast.checkpoint.state_tensors import dtype_named, plain_leaf, raw
from outlast.checkpoint.store import Store
from outlast.checkpoint.tree import encode_tree
from outlast.errors import ConfigError

__all__ = ["export_dcp", "import_dcp", "is_dcp", "read_metadata"]

_MAX_METADATA_BYTES = 1 << 30
_META = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    _META: {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in DTYPE_BYTES if hasattr(torch, name))},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
}  # fmt: skip
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


class _Restricted(pickle.Unpickler):
    """Builds only what DCP's own metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into DCP metadata")
        return super().find_class(module, name)


def is_dcp(path: str) -> bool:
    return os.path.isfile(os.path.join(path, ".metadata"))


def read_metadata(path: str) -> Metadata:
    """The `.metadata` of a DCP directory. Raises `Damage` for anything but what DCP itself writes there."""
    file = pathlib.Path(path) / ".metadata"
    if not file.is_file():
        raise ConfigError(f"{path} is no DCP checkpoint: it has no .metadata", remedy="give the directory that has one")
    if file.stat().st_size > _MAX_METADATA_BYTES:
        raise Damage("is too large for metadata", file=".metadata")
    try:
        found = _Restricted(io.BytesIO(file.read_bytes())).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        ImportError,
        MemoryError,
        OverflowError,
        RecursionError,
        UnicodeDecodeError,
    ) as error:
        raise Damage(f"is not DCP metadata: {type(error).__name__}: {error}", file=".metadata") from error
    if not isinstance(found, Metadata):
        raise Damage(f"holds a {type(found).__name__}", file=".metadata")
    return found


class _Blobs:
    """Items of the data files, by (name, offsets)."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        self._path = path
        self._places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for index, info in (metadata.storage_data or {}).items():
            offset = None if index.offset is None else tuple(index.offset)
            self._places[index.fqn, offset] = info

    def place(self, name: str, offset: tuple[int, ...] | None, least_bytes: int = 0) -> tuple[str, int, int]:
        """(file, offset, length) of an item of at least so many bytes, inside the directory and inside the file."""
        info = self._places.get((name, offset))
        if info is None:
            raise Damage(f"says nothing of where {name[:80]!r} {offset} is", file=".metadata")
        file = str(info.relative_path)
        if not _PLAIN.fullmatch(file) or info.transform_descriptors:
            raise Damage(f"keeps {name[:80]!r} in {file[:80]!r}, or transformed: not readable here", file=".metadata")
        size = Disk().size(os.path.join(self._path, file)) or 0
        if not (info.offset >= 0 and least_bytes <= info.length and info.offset + info.length <= size):
            raise Damage(f"{name[:80]!r} does not fit at {info.offset}+{info.length} of {file}", file=".metadata")
        return file, info.offset, info.length

    def load(self, name: str, offset: tuple[int, ...] | None) -> Any:
        file, at, length = self.place(name, offset)
        fd = Disk().open(os.path.join(self._path, file), "read")
        try:
            blob = io.BytesIO(os.pread(fd, length, at))
        finally:
            os.close(fd)
        try:
            # Stored, never compressed, is how torch writes: anything else could unpack to any size.
            with zipfile.ZipFile(blob) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise Damage(f"item {name[:80]!r} is compressed", file=file)
                _check_sums(archive)
            blob.seek(0)
            with torch.serialization.safe_globals(_array_parts()):
                return torch.load(blob, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise Damage(f"item {name[:80]!r} cannot be read: {first}", file=file) from error


def _check_sums(archive: zipfile.ZipFile) -> None:
    """Read every record against its CRC-32, which torch writes and never looks at: a flipped bit would be imported, and
    be right by our digests from then on. Zero is what `set_crc32_options(False)` leaves in its place."""
    for entry in archive.infolist():
        if entry.CRC:
            with archive.open(entry) as record:  # the last read raises BadZipFile
                while record.read(1 << 20):
                    pass


def _array_parts() -> list[Any]:
    """What numpy arrays and numbers are rebuilt from; each holds bytes, none runs anything."""
    kinds = [type(np.dtype(code)) for code in "?bhilqBHILQefdFD"]
    multiarray: Any = importlib.import_module("numpy._core.multiarray")
    return [np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar, codecs.encode, *kinds]


class _Ref(NamedTuple):
    """Stands for a tensor in a tree that is being put together."""

    number: int


class _Plan:
    """What an import will read: specs, boxes, and the tree they hang in; nothing is read before it is whole."""

    def __init__(self, metadata: Metadata, blobs: _Blobs) -> None:
        self.specs: list[TensorSpec] = []
        self.items: list[Item] = []
        self.held: dict[int, torch.Tensor] = {}  # tensors inside of saved objects: small, read already
        values: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                values[name] = _Ref(self._add(name, entry, blobs))
            elif isinstance(entry, BytesStorageMetadata):
                values[name] = blobs.load(name, None)
        self.tree = encode_tree(_nest(values, metadata.planner_data), self._leaf)

    def _add(self, name: str, entry: TensorStorageMetadata, blobs: _Blobs) -> int:
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"{name!r} is {dtype}, which checkpoints do not hold", remedy="import it without this one"
            )
        spec = TensorSpec(name, dtype, tuple(entry.size))
        boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
        wrong = check_cover(spec.shape, [box for box in boxes if box.volume]) if spec.bytes else None
        if wrong is not None:
            raise Damage(f"tensor {name[:80]!r}: {wrong}", file=".metadata")
        for box in boxes if spec.bytes else []:
            blobs.place(name, box.offset, box.volume * DTYPE_BYTES[dtype])
            self.items.append(Item(len(self.specs), box))
        self.specs.append(spec)
        return len(self.specs) - 1

    def _leaf(self, value: Any, name: str) -> Any:
        if isinstance(value, _Ref):
            return {"T": value.number}
        if isinstance(value, np.ndarray | np.generic):
            node = self._leaf(torch.from_numpy(np.array(value, order="C")), name)
            return {"N" if isinstance(value, np.ndarray) else "n": node["T"]}
        if isinstance(value, torch.Tensor):
            number = len(self.specs)
            self.specs.append(TensorSpec(f"{name}#object", str(value.dtype).removeprefix("torch."), tuple(value.shape)))
            self.items.append(Item(number, whole(value.shape)))
            self.held[number] = value
            return {"T": number}
        return plain_leaf(value)


def _nest(values: dict[str, Any], paths: Any) -> Any:
    """Undo DCP's flattening: its paths have str for keys and int for places in lists."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        path = paths.get(name, (name,)) if isinstance(paths, dict) else (name,)
        if not isinstance(path, tuple) or not path or not all(type(key) in {str, int} for key in path):
            raise Damage(f"gives {name[:80]!r} a path that is none", file=".metadata")
        here = root
        for key in path[:-1]:
            here = here.setdefault(key, _Branch())
            if not isinstance(here, _Branch):
                raise Damage(f"hangs {name[:80]!r} below a value", file=".metadata")
        if path[-1] in here:
            raise Damage(f"gives {name[:80]!r} a place that is taken", file=".metadata")
        here[path[-1]] = value
    return _settle(root, 0)


class _Branch(dict[Any, Any]):
    """A container of DCP's, as opposed to a dict that was a value."""


def _settle(branch: dict[Any, Any], depth: int) -> Any:
    if depth > 200:
        raise Damage("nests its names too deeply", file=".metadata")
    items = {key: _settle(value, depth + 1) if isinstance(value, _Branch) else value for key, value in branch.items()}
    if items and all(type(key) is int for key in items):
        return [items[key] for key in sorted(items)]
    return items


def import_dcp(
    path: str,
    store: Store,
    *,
    step: int,
    created_s: float,
    nonce: str,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """A DCP directory becomes a generation; returns its number. Raises `ConfigError`, `Damage`, `OSError`.

    DCP turns integer keys of dicts into strings when it saves; they come back as it has them.
    """
    metadata = read_metadata(path)
    blobs = _Blobs(path, metadata)
    plan = _Plan(metadata, blobs)
    total, done = sum(spec.bytes for spec in plan.specs), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    def fill(number: int, buffer: memoryview) -> None:
        tensor, box = plan.items[number]
        spec = plan.specs[tensor]
        found = plan.held[tensor] if tensor in plan.held else blobs.load(spec.name, box.offset)
        dtype = str(getattr(found, "dtype", "")).removeprefix("torch.")
        if not isinstance(found, torch.Tensor) or (dtype, tuple(found.shape)) != (spec.dtype, box.shape):
            raise Damage(f"{spec.name[:80]!r} at {box.offset} is not what the metadata says", file=".metadata")
        values: Any = raw(found).contiguous().view(-1).view(torch.uint8).numpy()
        buffer[:] = memoryview(values)

    extra = {"imported_from": os.path.basename(os.path.normpath(path)), "format": "dcp"}
    return build(
        store,
        plan.specs,
        plan.tree,
        plan.items,
        fill,
        step=step,
        created_s=created_s,
        nonce=nonce,
        extra=extra,
        progress=advance,
    )


# export


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors that have no values, and reads each when DCP comes to write it."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return self._read(found) if isinstance(found, torch.Tensor) and found.is_meta else found


def export_dcp(
    reader: Reader, directory: str, numbers: Sequence[int], *, progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """Write a DCP directory: the whole state as it was, or a flat dict of some of its tensors. One tensor at a time."""
    hollow = {
        n: torch.empty(reader.tensors[n].shape, dtype=dtype_named(reader.tensors[n].dtype), device="meta")
        for n in numbers
    }
    total, done = sum(reader.tensors[n].bytes for n in numbers), 0
    of = {id(tensor): number for number, tensor in hollow.items()}

    def read(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal done
        number = of[id(tensor)]
        done += reader.tensors[number].bytes
        if progress is not None:
            progress(min(done, total), total)
        return fresh(reader, [number])[number]

    if len(numbers) == len(reader.tensors):
        needed = sorted(_with_values(reader.tree))
        state = rebuild(reader, {**hollow, **fresh(reader, needed)}, "was not read")
        state = state if isinstance(state, dict) else {"state": state}
    else:
        state = {reader.tensors[n].name: tensor for n, tensor in hollow.items()}
    os.makedirs(directory, exist_ok=True)
    writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1)
    save_dcp(state, storage_writer=writer, planner=_LazyPlanner(read), no_dist=True)
    return sorted(os.listdir(directory))


def _with_values(node: Any) -> set[int]:
    """Tensors behind arrays and quantised tensors, which cannot be rebuilt without their values."""
    if isinstance(node, list):
        return {number for item in node for number in _with_values(item)}
    if not isinstance(node, dict):
        return set()
    found: set[int] = set()
    for tag, payload in node.items():
        if tag in {"N", "n"}:
            found.add(payload)
        elif tag in {"q", "qp"}:
            parts = payload if tag == "q" else payload[1]
            found |= {parts[1], *(parts[2:4] if len(parts) == 5 else [])}
        else:
            found |= _with_values(payload)
    return found
