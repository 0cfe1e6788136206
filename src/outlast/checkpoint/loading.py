"""From a verified generation to tensors: whole or in part, plain or DTensor, into new memory or in place. torch.

Role: decide which bytes go where, by intersecting boxes, and have the reader fetch only those. Invariants: names,
shapes and dtypes are held against the target before a byte is read; what does not fit is listed, all of it; values
are moved as bytes, never converted.
"""

from __future__ import annotations

import fnmatch
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from outlast.checkpoint._arena import map_private
from outlast.checkpoint.boxes import Box, intersect
from outlast.checkpoint.manifest import DTYPE_BYTES, Damage, TensorSpec
from outlast.checkpoint.names import chosen
from outlast.checkpoint.patience import Stuck, kept
from outlast.checkpoint.reader import ByteRun, Reader, Skip, runs_of_box
from outlast.checkpoint.state_tensors import FlatState, Local, bytes_of, dtype_named, raw, unflatten
from outlast.errors import CheckpointError

__all__ = ["Difference", "LoadedState", "fill", "fill_in_place", "fresh", "match", "rebuild", "select"]

_GROUP_BYTES = 32 << 20
_MAX_RUNS = 1 << 16


class LoadedState(NamedTuple):
    """`tree`: the state (None for a load by name pattern); `tensors`: what was loaded, by name; sizes by tier."""

    tree: Any
    tensors: dict[str, torch.Tensor]
    step: int
    generation: int
    view: tuple[int, int]
    certified: bool
    tier: str
    extra: dict[str, str]
    skipped: list[Skip]
    bytes_read: dict[str, int]


class Difference(NamedTuple):
    """What a strict load objects to. `misfits`: (name, what the checkpoint has, what the target has)."""

    missing: list[str]
    unexpected: list[str]
    misfits: list[tuple[str, str, str]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misfits)

    def __str__(self) -> str:
        lines = [f"missing in the checkpoint: {name}" for name in self.missing]
        lines += [f"not wanted by the target: {name}" for name in self.unexpected]
        lines += [f"{name}: the checkpoint has {a}, the target {b}" for name, a, b in self.misfits]
        more = len(lines) - 50
        return "\n".join(lines[:50] + ([f"… and {more} more"] if more > 0 else []))


def select(specs: Sequence[TensorSpec], names: Sequence[str] | None) -> list[int]:
    """Numbers of the tensors whose name matches one of the patterns. Raises ConfigError for one that none matches."""
    return list(range(len(specs))) if names is None else chosen([spec.name for spec in specs], names) if names else []


def match(reader: Reader, target: FlatState, names: Sequence[str] | None) -> tuple[dict[int, int], Difference]:
    """Target tensor number → checkpoint tensor number, and what does not fit."""
    theirs = {reader.tensors[i].name: i for i in select(reader.tensors, names)}
    wanted = [spec.name for spec in target.specs]
    ours = {n: i for i, n in enumerate(wanted) if names is None or any(fnmatch.fnmatchcase(n, p) for p in names)}
    pairs, misfits = {}, []
    for name in ours.keys() & theirs.keys():
        a, b = reader.tensors[theirs[name]], target.specs[ours[name]]
        if (a.dtype, a.shape) == (b.dtype, b.shape):
            pairs[ours[name]] = theirs[name]
        else:
            misfits.append((name, f"{a.dtype}{list(a.shape)}", f"{b.dtype}{list(b.shape)}"))
    missing, unexpected = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    return pairs, Difference(missing, unexpected, sorted(misfits))


def fill(
    reader: Reader,
    pairs: Mapping[int, int],
    local: Sequence[Sequence[Local]],
    progress: Callable[[int], None] | None = None,
    *,
    apart: bool = False,
) -> None:
    """Fill the target's tensors in place with the checkpoint's. `pairs`: target number → checkpoint number.

    After `Stuck` the tensors are lost: a read that was given up may still write into them, and they are never freed.
    With `apart` it cannot, and they may be filled again.
    """
    try:
        _fill_all(reader, pairs, local, progress, apart)
    except Stuck:
        if not apart:
            kept.append([held.values for number in pairs for held in local[number]])
        raise


def fill_in_place(
    reader: Reader,
    target: FlatState,
    names: Sequence[str] | None,
    strict: bool,
    progress: Callable[[int], None] | None,
    touched: dict[str, int],
    *,
    where: str,
) -> dict[int, torch.Tensor]:
    """Fill what fits of the target; what it lacks comes in new memory. Tensors by the checkpoint's numbers.

    `touched`: names of the target's tensors that a generation (its number) was to fill, over all tries of a load: one
    that failed half way leaves no whole value, so the next must fill all of those. Raises `CheckpointError` if it
    would not, or if something does not fit and `strict`.
    """
    generation = reader.head.generation
    pairs, difference = match(reader, target, names)
    wanted = [target.specs[ours].name for ours in pairs]
    torn = sorted(touched.keys() - set(wanted))
    if strict and difference:
        raise CheckpointError(
            f"the state does not fit generation {generation}:\n{difference}",
            where=where,
            did="nothing was loaded" if not touched else _half_filled(touched),
            remedy="load with strict=False to take what fits, or name patterns to take a part",
        )
    if torn:
        listed = ", ".join(torn[:8]) + (f" and {len(torn) - 8} more" if len(torn) > 8 else "")
        raise CheckpointError(
            f"generation {generation} has no values for {listed}",
            where=where,
            did=_half_filled(touched),
            remedy=f"make the state anew and load generation={generation} into it",
        )
    touched.update(dict.fromkeys(wanted, generation))
    fill(reader, pairs, target.local, progress, apart=True)
    tensors = {theirs: cast(torch.Tensor, target.tensors[ours]) for ours, theirs in pairs.items()}
    rest = [i for i in select(reader.tensors, names) if i not in tensors]
    return tensors | (fresh(reader, rest, progress) if rest else {})


def _half_filled(touched: Mapping[str, int]) -> str:
    tried = ", ".join(map(str, sorted(set(touched.values()))))
    return f"the state was being filled from generation {tried}, which failed: it is not to be trained on"


def _fill_all(
    reader: Reader,
    pairs: Mapping[int, int],
    local: Sequence[Sequence[Local]],
    progress: Callable[[int], None] | None,
    apart: bool,
) -> None:
    runs: list[ByteRun] = []
    later: list[tuple[int, Local]] = []
    for ours, theirs in sorted(pairs.items(), key=lambda pair: pair[1]):
        for held in local[ours]:
            direct = _direct(reader, theirs, held)
            if direct is None:
                later.append((theirs, held))
            else:
                runs += direct
    reader.read(runs, progress=progress, apart=apart)
    for number, held in later:
        _fill_one(reader, number, held, progress)


def _direct(reader: Reader, number: int, held: Local) -> list[ByteRun] | None:
    """Runs straight into the tensor's memory, if it is contiguous host memory and they are not too many."""
    values = held.values.detach()
    plain = values.device.type == "cpu" and values.is_contiguous() and not values.is_conj() and not values.is_neg()
    if not plain:
        return None
    runs: list[ByteRun] = []
    for run in runs_of_box(reader, number, held.box, _memory(values)):
        runs.append(run)
        if len(runs) > _MAX_RUNS:
            return None
    return runs


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor. It must outlive the view."""
    import ctypes

    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _fill_one(reader: Reader, number: int, held: Local, progress: Callable[[int], None] | None) -> None:
    """Strided or remote memory: piece by piece through one buffer of at most a piece's rows."""
    spec = reader.tensors[number]
    dtype, size = dtype_named(spec.dtype), DTYPE_BYTES[spec.dtype]
    if held.values.is_conj() or held.values.is_neg():  # a lazy view: its memory is not its values
        plain = torch.empty_like(held.values).resolve_conj().resolve_neg()
        _fill_one(reader, number, Local(held.box, plain), progress)
        with torch.no_grad():
            held.values.copy_(plain)
        return
    target = raw(held.values)
    for part, piece in reader.pieces[number]:
        source = Box(piece.offset, piece.shape)
        common = intersect(source, held.box)
        if common is None or common.volume == 0:
            continue
        for rows in _bands(common, source, size):
            first = (rows.offset[0] - source.offset[0]) * math.prod(source.shape[1:]) if rows.shape else 0
            count = (rows.shape[0] if rows.shape else 1) * math.prod(source.shape[1:])
            buffer = bytearray(count * size)
            reader.read([ByteRun(part, piece.at + first * size, memoryview(buffer))], progress=progress)
            band = bytes_of(memoryview(buffer), dtype, (rows.shape[0], *source.shape[1:]) if rows.shape else ())
            inside = tuple(
                slice(o - so, o - so + n)
                for o, so, n in zip(common.offset[1:], source.offset[1:], common.shape[1:], strict=True)
            )
            there = tuple(
                slice(o - ho, o - ho + n) for o, ho, n in zip(rows.offset, held.box.offset, rows.shape, strict=True)
            )
            with torch.no_grad():
                target[there].copy_(band[(slice(None), *inside)] if rows.shape else band)


def _bands(common: Box, source: Box, itemsize: int) -> Iterator[Box]:
    """Cut along the first dimension so that a band of whole source rows stays near 32 MiB."""
    if not common.shape:
        yield common
        return
    row = max(1, math.prod(source.shape[1:]) * itemsize)
    step = max(1, _GROUP_BYTES // row)
    for low in range(0, common.shape[0], step):
        count = min(step, common.shape[0] - low)
        yield Box((common.offset[0] + low, *common.offset[1:]), (count, *common.shape[1:]))


def fresh(
    reader: Reader, numbers: Sequence[int], progress: Callable[[int], None] | None = None
) -> dict[int, torch.Tensor]:
    """New tensors for these numbers, filled. Small ones share mappings of 32 MiB; all lie on huge pages if they can."""
    specs = {number: reader.tensors[number] for number in numbers}
    _check_fits(sum(spec.bytes for spec in specs.values()), reader.head.parts[0].name)
    memory = _allocate([(number, spec.bytes) for number, spec in specs.items()])
    local, pairs, tensors = [], {}, {}
    for place, (number, spec) in enumerate(specs.items()):
        dtype = dtype_named(spec.dtype)
        tensor = bytes_of(memory[number], dtype, spec.shape).view(dtype)
        tensors[number] = tensor
        local.append([Local(Box((0,) * len(spec.shape), spec.shape), tensor)] if tensor.numel() else [])
        pairs[place] = number
    fill(reader, pairs, local, progress)
    return tensors


def _check_fits(size_bytes: int, file: str) -> None:
    """A small file may claim a large state (chunks can be shared): never ask for more than this machine has."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > limit:
        raise Damage(f"states tensors of {size_bytes} bytes; this machine has {limit}", file=file)


def _allocate(sizes: Sequence[tuple[int, int]]) -> dict[int, memoryview]:
    placed: dict[int, memoryview] = {}
    group: list[tuple[int, int, int]] = []
    used = 0
    for number, size in [*sizes, (-1, _GROUP_BYTES + 1)]:
        if group and used + size > _GROUP_BYTES:
            area: mmap.mmap = map_private(used)
            placed |= {n: memoryview(area)[at : at + length] for n, at, length in group}
            group, used = [], 0
        group.append((number, used, size))
        used += -(-size // 64) * 64
    return placed


def rebuild(reader: Reader, tensors: Mapping[int, torch.Tensor], absent: str) -> Any:
    """The state's tree with these tensors in it; a tensor that was not asked for is None."""
    file = reader.head.parts[0].name

    def get(number: int) -> torch.Tensor:
        if number >= len(reader.tensors):
            raise ValueError(f"there is no tensor number {number}")
        if number not in tensors:
            raise CheckpointError(f"tensor {reader.tensors[number].name!r} {absent}")
        return tensors[number]

    return unflatten(reader.tree, get, file=file)
