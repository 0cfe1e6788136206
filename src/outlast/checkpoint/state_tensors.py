"""Tensors of a state, whatever they are, as named boxes of bytes and back. The only module that knows dtypes in torch.

Role: turn leaves (tensors, DTensors, arrays, quantised tensors, dtypes) into tree nodes, specs and boxes, and rebuild
them. Invariants: bytes are moved, never converted: every tensor is viewed as an integer type of its element size; two
leaves that are one tensor stay one. Holds no file and no thread.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outlast.checkpoint._again import PLAIN, Outline, has_memory
from outlast.checkpoint._plan import Shard
from outlast.checkpoint._quantised import QUANTISED, put_together, taken_apart
from outlast.checkpoint.boxes import Box
from outlast.checkpoint.manifest import DTYPE_BYTES, TensorSpec, schema_digest
from outlast.checkpoint.tree import decode_tree, encode_tree, tensor_names
from outlast.errors import ConfigError

__all__ = ["Local", "FlatState", "OnRank", "bytes_of", "dtype_named", "flatten", "plain_leaf", "raw", "unflatten"]

_CARRIER = {
    1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128,
}  # fmt: skip
_HOST_OR_CUDA = {"cpu", "cuda"}  # elsewhere a tensor without an address may still have values
_NAMES_OF_QUANTISED = {str(dtype).removeprefix("torch.") for dtype in QUANTISED}  # as values: no tensor here has them
RankToWriter = Callable[[int], int | Sequence[int]]


class Local(NamedTuple):
    """A box of a tensor that this process holds, and the (strided) values of it."""

    box: Box
    values: torch.Tensor


class OnRank(NamedTuple):
    """A tensor that one rank of a mesh has whole, and no other any of. `values`: on that rank; elsewhere None."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None


class FlatState(NamedTuple):
    """A flattened state: the tree as JSON, and tensor by tensor what it is, who holds which box, what is held here.

    `shards[i]` is None for a tensor that every writer has whole.
    """

    tree: Any
    tensors: Sequence[torch.Tensor | OnRank]
    specs: list[TensorSpec]
    shards: list[list[Shard] | None]
    local: list[list[Local]]
    schema: Schema


class Schema(NamedTuple):
    """What a state looks like without its values: the same save after save, so it is worked out once.

    `given`: the tensors' names as the tree has them, `boxes`: each whole. `digest`: of `specs`. `outline`: by which it
    is recognised, if that can be.
    """

    given: list[str]
    specs: list[TensorSpec]
    boxes: list[Box]
    digest: str
    outline: Outline | None = None

    @staticmethod
    def of(given: list[str], tensors: Sequence[torch.Tensor | OnRank], like: Schema | None) -> Schema:
        """The schema of these tensors; `like` itself if it is that."""
        if like is not None and like.given == given and all(map(_fits, like.specs, tensors)):
            return like
        named = zip(tensor_names(given), tensors, strict=True)
        specs = [TensorSpec(name, _dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named]
        return Schema(given, specs, [Box((0,) * len(s.shape), s.shape) for s in specs], schema_digest(specs))


def _fits(spec: TensorSpec, tensor: torch.Tensor | OnRank) -> bool:
    return spec.shape == tensor.shape and spec.dtype == _dtype_name(tensor.dtype)


def dtype_named(name: str) -> torch.dtype:
    known = name in DTYPE_BYTES or name in _NAMES_OF_QUANTISED
    found = getattr(torch, name, None) if known else None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"this torch ({torch.__version__}) has no dtype {name!r}", remedy="install a newer torch")
    return found


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an integer type of the element's size, so that nothing is converted or refused."""
    plain = tensor.detach()
    if plain.is_complex() and plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    return plain.view(_CARRIER[plain.element_size()])


def bytes_of(view: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over a writable buffer, of `raw`'s integer type for this dtype."""
    carrier = _CARRIER[dtype.itemsize]
    if math.prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=carrier)
    return torch.frombuffer(view, dtype=carrier, count=math.prod(shape)).view(tuple(shape))


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plain_leaf(value: Any) -> Any:
    """The node of torch's own small values; None for anything else."""
    if isinstance(value, torch.Size):
        return {"sz": list(value)}
    if isinstance(value, torch.dtype):
        return {"dt": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"dev": str(value)}
    return None


class _Collector:
    """Gives each distinct tensor a number as the tree is walked."""

    def __init__(self, writer_of: RankToWriter) -> None:
        self._writer_of = writer_of
        self.names: list[str] = []
        self.tensors: list[torch.Tensor | OnRank] = []
        self._seen: dict[tuple[Any, ...], int] = {}
        self._first: dict[int, int] = {}

    def leaf(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, OnRank):
            if value.values is not None:
                self._check(value.values, name)
            return {"T": self._append(value, name)}
        if type(value).__module__ == "numpy":
            return self._array(value, name)
        return plain_leaf(value)

    def _array(self, value: Any, name: str) -> Any:
        import numpy as np

        if not isinstance(value, np.ndarray | np.generic) or value.dtype.hasobject:
            return None
        try:
            tensor = torch.from_numpy(np.array(value, order="C"))
        except TypeError:
            return None
        return {"N" if isinstance(value, np.ndarray) else "n": self._number(tensor, name)}

    def _tensor(self, value: torch.Tensor, name: str) -> Any:
        self._check(value, name)
        dtype = value.dtype
        if dtype in QUANTISED:
            return taken_apart(value, name, self._number)
        if _dtype_name(dtype) not in DTYPE_BYTES:
            raise ConfigError(f"checkpoints do not hold {value.dtype} ({name!r})", remedy="keep its unpacked values")
        return {"T": self._number(value, name)}

    def _check(self, value: torch.Tensor, name: str) -> None:
        if value.is_meta or value.is_nested or value.layout != torch.strided:
            kind = "meta" if value.is_meta else "nested" if value.is_nested else str(value.layout)
            raise ConfigError(
                f"the state holds a {kind} tensor at {name!r}",
                remedy="give it values, or keep its dense parts",
            )
        if type(value) not in PLAIN and is_traceable_wrapper_subclass(value) and not _is_dtensor(value):
            raise ConfigError(
                f"the state holds a {type(value).__qualname__} at {name!r}, whose parts are not known here",
                remedy="keep its plain tensors",
            )
        if value.device.type in _HOST_OR_CUDA and value.numel() and not _is_dtensor(value) and not has_memory(value):
            raise ConfigError(
                f"the tensor at {name!r} has no memory: it was freed", remedy="save it while it has values"
            )

    def _number(self, tensor: torch.Tensor, name: str) -> int:
        number = len(self.tensors)
        # Only two tensors that begin at one address can be the same: mostly there is nothing to compare.
        place = 0 if _is_dtensor(tensor) else tensor.data_ptr()
        first = self._first.setdefault(place, number)
        if first != number or place == 0:
            if place and first >= 0:
                self._first[place] = -1
                self._seen[_identity(cast(torch.Tensor, self.tensors[first]))] = first
            known = self._seen.setdefault(_identity(tensor), number)
            if known != number:
                return known
        return self._append(tensor, name)

    def _append(self, tensor: torch.Tensor | OnRank, name: str) -> int:
        self.tensors.append(tensor)
        self.names.append(name)
        return len(self.tensors) - 1

    def describe(self, tree: Any, like: Schema | None) -> FlatState:
        schema = Schema.of(self.names, self.tensors, like)
        shards: list[list[Shard] | None] = [None] * len(self.tensors)
        local: list[list[Local]] = []
        for number, (tensor, box) in enumerate(zip(self.tensors, schema.boxes, strict=True)):
            if isinstance(tensor, OnRank):
                writers = self._writer_of(tensor.rank)
                owners = (writers,) if isinstance(writers, int) else tuple(sorted(writers))
                shards[number] = [Shard(box, owners)]
                local.append([Local(box, tensor.values)] if tensor.values is not None else [])
                continue
            local.append([Local(box, tensor)])
            if type(tensor) not in PLAIN and _is_dtensor(tensor):
                shards[number], local[number] = _sharded(tensor, self._writer_of)
        return FlatState(tree, self.tensors, schema.specs, shards, local, schema)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two leaves that are the same elements of the same storage, and for nothing else."""
    if tensor.numel() == 0 or _is_dtensor(tensor):
        return (id(tensor),)
    same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return (*same, tensor.is_conj(), tensor.is_neg())


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor) not in PLAIN and hasattr(tensor, "_spec") and hasattr(tensor, "to_local")


def flatten(tree: Any, *, writer_of: RankToWriter | None = None, like: Schema | None = None) -> FlatState:
    """The state's tree and tensors. `writer_of` maps a global rank (of a DTensor's mesh) to the number of its
    writer, or to those of all writers that hold what it holds.
    `like`: what it looked like the last time.

    Raises `ConfigError` naming what cannot be kept.
    """
    if like is not None and like.outline is not None:
        again = like.outline.of_again(tree)
        if again is not None:
            node, tensors = again
            local = [[Local(box, tensor)] for tensor, box in zip(tensors, like.boxes, strict=True)]
            return FlatState(node, tensors, like.specs, [None] * len(tensors), local, like)
    collector = _Collector(writer_of if writer_of is not None else lambda rank: rank)
    state = collector.describe(encode_tree(tree, collector.leaf), like)
    outline = Outline.of(tree, state.tree, cast(Sequence[torch.Tensor], state.tensors))  # none where one is `OnRank`
    return state._replace(schema=state.schema._replace(outline=outline))


def unflatten(node: Any, tensors: Callable[[int], torch.Tensor], *, file: str) -> Any:
    """Inverse of `flatten`: `tensors(i)` gives tensor number i. Raises `Damage` for a tree that is none."""

    def make(tag: str, payload: Any) -> Any:
        if tag == "T":
            return tensors(_index(payload))
        if tag in {"N", "n"}:
            array = tensors(_index(payload)).numpy()
            return array if tag == "N" else array[()]
        if tag == "sz":
            return torch.Size([_index(n) for n in payload])
        if tag == "dt":
            return dtype_named(payload)
        if tag == "dev":
            return torch.device(payload)
        if tag in {"q", "qp"}:
            return put_together(tag, payload, lambda place: tensors(_index(place)))
        raise KeyError(tag)

    return decode_tree(node, make, file=file)


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number")
    return value


# DTensor


def _sharded(tensor: Any, writer_of: RankToWriter) -> tuple[list[Shard], list[Local]]:
    """Every rank's boxes follow from the mesh and the placements alone: nobody has to be asked."""
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    if any(p.is_partial() for p in placements):
        raise ConfigError("a DTensor with a partial placement has no value yet", remedy="redistribute it first")
    owners: dict[Box, list[int]] = {}
    sizes = tuple(mesh.mesh.shape)
    for coordinate in itertools.product(*(range(n) for n in sizes)):
        rank = int(mesh.mesh[coordinate])
        for box, _ in _boxes_at(shape, placements, sizes, coordinate):
            writers = writer_of(rank)
            owners.setdefault(box, []).extend((writers,) if isinstance(writers, int) else writers)
    local = tensor.to_local()
    mine = _boxes_at(shape, placements, sizes, mesh.get_coordinate() or ())
    held = [Local(box, _narrow(local, offset, box.shape)) for box, offset in mine]
    return [Shard(box, tuple(sorted(ranks))) for box, ranks in sorted(owners.items())], held


def _narrow(tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _boxes_at(
    shape: tuple[int, ...], placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[tuple[Box, tuple[int, ...]]]:
    """(global box, offset in the local tensor) of what the rank at `coordinate` holds, none empty."""
    if len(coordinate) != len(mesh):
        return []
    spans: list[list[tuple[int, int]]] = [[(0, n)] for n in shape]
    for size, where, placement in zip(mesh, coordinate, placements, strict=True):
        if not placement.is_replicate():
            spans[placement.dim] = _split(spans[placement.dim], size, where, placement)
    boxes = []
    offsets = [list(itertools.accumulate((n for _, n in dim), initial=0))[:-1] for dim in spans]
    for choice in itertools.product(*(range(len(dim)) for dim in spans)):
        picked = [spans[dim][k] for dim, k in enumerate(choice)]
        box = Box(tuple(start for start, _ in picked), tuple(length for _, length in picked))
        if box.volume:
            boxes.append((box, tuple(offsets[dim][k] for dim, k in enumerate(choice))))
    return boxes


def _split(spans: list[tuple[int, int]], size: int, where: int, placement: Any) -> list[tuple[int, int]]:
    """One mesh dimension's cut of one tensor dimension, given as (start, length) runs of global indices."""
    total = sum(length for _, length in spans)
    factor = getattr(placement, "split_factor", 1)
    if factor == 1:
        step = -(-total // size)
        return _cut(spans, min(total, where * step), min(total, (where + 1) * step))
    # FSDP over TP: the dimension counts as cut into `factor` pieces already, and each of those is cut again.
    outer = -(-total // factor)
    kept: list[tuple[int, int]] = []
    for k in range(factor):
        low, high = min(total, k * outer), min(total, (k + 1) * outer)
        step = -(-(high - low) // size)
        kept += _cut(spans, min(high, low + where * step), min(high, low + (where + 1) * step))
    return kept


def _cut(spans: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """The runs of positions low..high of a list of runs."""
    kept, at = [], 0
    for start, length in spans:
        a, b = max(low, at), min(high, at + length)
        if b > a:
            kept.append((start + a - at, b - a))
        at += length
    return kept
