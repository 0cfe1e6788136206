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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from outlast.checkpoint.boxes import Box, rows, whole
from outlast.checkpoint.building import Item, build
from outlast.checkpoint.fs import Disk
from outlast.checkpoint.manifest import DTYPE_BYTES, UNREADABLE, TensorSpec
from outlast.checkpoint.reader import Reader, runs_of_box
from outlast.checkpoint.safetensors_files import NAMES, is_safetensors, open_file, read_at, sources_of
from outlast.checkpoint.store import Store
from outlast.errors import ConfigError

__all__ = ["export_safetensors", "import_safetensors", "is_safetensors"]

_CODES = {name: code for code, name in NAMES.items()}
_BAND_BYTES = 32 << 20
# import


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
    sources, metadata = sources_of(path)
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
        fds = {path: open_file(path, stack) for path in {source.path for source in sources.values()}}

        def fill(number: int, buffer: memoryview) -> None:
            source = sources[names[number]]
            read_at(fds[source.path], source.at, buffer, source.path)

        extra = {"imported_from": os.path.basename(os.path.normpath(path)), "format": "safetensors"}
        return build(
            store, specs, tree, items, fill, step=step, created_s=created_s, nonce=nonce, extra=extra, progress=advance
        )


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
    named: Sequence[tuple[int, str]],
    *,
    shard_bytes: int = 5 << 30,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write these tensors, by number and the name to write, as `model*.safetensors` (and an index if there are
    several); returns the files' names.

    Raises `ConfigError` for a dtype that the format does not have, `Damage` if the generation is not right.
    """
    numbers = [number for number, _ in named]
    specs = [TensorSpec(name, reader.tensors[n].dtype, reader.tensors[n].shape) for n, name in named]
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
    whole_state = [spec.name for spec in specs] == [spec.name for spec in reader.tensors]
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
