"""Boxes, plans and resharding: any number of writers to any number of readers, plain and DTensor."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint import CheckpointEngine, LocalStore, Reader
from outlast.checkpoint._plan import piece_bytes, plan, replicated
from outlast.checkpoint.boxes import Box, check_cover, contiguous_span, intersect, rows
from outlast.checkpoint.manifest import TensorSpec, parse_head
from outlast.core.protocol.saves.commit import SaveId
from outlast.errors import CheckpointError

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    low = tuple(draw(st.integers(0, max(0, n - 1))) for n in shape)
    return Box(low, tuple(draw(st.integers(0, n - o)) if n else 0 for n, o in zip(shape, low, strict=True)))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


@settings(max_examples=200)
@given(data=st.data(), shape=shapes)
def test_intersection_is_that_of_the_cells(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(box_in(shape)), data.draw(box_in(shape))
    common = intersect(a, b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)


@settings(max_examples=200)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_a_contiguous_span_is_one_run_of_row_major_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = Box((0,) * len(shape), shape)
    inner = data.draw(box_in(shape))
    numbers = torch.arange(math.prod(shape)).view(shape)
    mine = numbers[tuple(slice(o, o + n) for o, n in zip(inner.offset, inner.shape, strict=True))].flatten().tolist()
    span = contiguous_span(inner, outer)
    if not mine:
        return
    run = mine == list(range(mine[0], mine[0] + len(mine)))
    assert (span == (mine[0], len(mine))) if run and span else not (span and not run)
    if span is None:
        assert not run or 1 in inner.shape


@settings(max_examples=200)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
def test_cover_accepts_exactly_the_partitions(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(box_in(shape), max_size=5))
    if data.draw(st.booleans()):
        boxes = rows(shape, data.draw(st.integers(1, 4)))
    counts = [cell for box in boxes for cell in cells(box)]
    whole = cells(Box((0,) * len(shape), shape))
    partition = len(counts) == len(set(counts)) and set(counts) == whole and all(b.volume for b in boxes)
    assert (check_cover(shape, boxes) is None) == partition


@settings(max_examples=100)
@given(sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 600)), max_size=8), writers=st.integers(1, 9))
def test_a_plan_writes_each_byte_once_and_evenly(sizes: list[tuple[int, int]], writers: int) -> None:
    specs = [TensorSpec(f"t{i}", "float32", shape) for i, shape in enumerate(sizes)]
    layouts = plan(specs, [replicated(s.shape, writers) for s in specs], writers)
    assert len(layouts) == writers
    for index, spec in enumerate(specs):
        boxes = [Box(p.offset, p.shape) for layout in layouts for p in layout.pieces if p.tensor == index]
        assert check_cover(spec.shape, boxes) is None
    for layout in layouts:
        end = 0
        for piece in layout.pieces:
            assert piece.at >= end
            end = piece.at + piece_bytes(piece, specs[piece.tensor])
        assert end <= layout.stream_bytes
    loads = [sum(piece_bytes(p, specs[p.tensor]) for p in layout.pieces) for layout in layouts]
    total = sum(loads)
    rows_bytes = max((4 * s.shape[1] for s in specs), default=0)
    assert max(loads) <= total / writers * 1.13 + max(rows_bytes, 2 << 20)


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(1100, 700, generator=generator),
        "small": [torch.randn(k + 1, generator=generator) for k in range(7)],
        "scalar": torch.tensor(7),
        "step": 12,
    }


def save_all(path: pathlib.Path, num: int, trees: list[Any], step: int = 1) -> list[CheckpointEngine]:
    """All replicas of one process save and one of them publishes."""
    engines = [CheckpointEngine(str(path), replica=r, num_replicas=num) for r in range(num)]
    handles = [engine.save(step, tree, view=(1, 1)) for engine, tree in zip(engines, trees, strict=True)]
    reports = [handle.durable.result(20) for handle in handles if handle is not None]
    save = SaveId(epoch=1, n=1, step=step)
    generation = engines[0].publish(save, reports)
    for engine in engines:
        engine.settle(save, generation)
    return engines


@pytest.mark.parametrize("num", [1, 2, 4, 7])
def test_replicas_write_each_byte_once_and_any_number_load_it(tmp_path: pathlib.Path, num: int) -> None:
    engines = save_all(tmp_path, num, [state()] * num)
    head = parse_head(engines[0].store.read_head(0), file="head")
    payload = sum(t.nbytes for t in (state()["big"], *state()["small"], state()["scalar"]))
    assert payload <= head.bytes <= payload + num * 16384
    with Reader(head, [engines[0].store]) as reader:
        shares = [part.stream_bytes for part in reader.parts]
    assert max(shares) <= 1.3 * payload / num + 8192
    for replicas in (1, 3):
        engine = CheckpointEngine(str(tmp_path), replica=replicas - 1, num_replicas=replicas)
        into = {**state(1)}
        loaded = engine.load(into=into)
        engine.close()
        assert loaded is not None
        assert torch.equal(into["big"], state()["big"])
        assert all(torch.equal(a, b) for a, b in zip(into["small"], state()["small"], strict=True))
        assert loaded.tree["step"] == 12
    for engine in engines:
        engine.close()


def test_a_part_is_loaded_by_name_and_reads_only_what_it_needs(tmp_path: pathlib.Path) -> None:
    engines = save_all(tmp_path, 2, [state()] * 2)
    loaded = engines[0].load(names=["small.*", "scalar"])
    assert loaded is not None
    assert sorted(loaded.tensors) == ["scalar", *(f"small.{k}" for k in range(7))]
    assert loaded.tree is None
    for engine in engines:
        engine.close()


def test_what_does_not_fit_is_listed_and_nothing_is_touched(tmp_path: pathlib.Path) -> None:
    engines = save_all(tmp_path, 1, [state()])
    into = {**state(1), "small": state(1)["small"][:3], "extra": torch.zeros(2), "scalar": torch.tensor(1.5)}
    before = into["big"].clone()
    with pytest.raises(CheckpointError) as raised:
        engines[0].load(into=into)
    message = str(raised.value)
    assert "missing in the checkpoint: extra" in message
    assert "not wanted by the target: small.6" in message
    assert "scalar: the checkpoint has int64[], the target float32[]" in message
    assert torch.equal(into["big"], before)
    loaded = engines[0].load(into=into, strict=False)
    assert loaded is not None
    assert torch.equal(into["big"], state()["big"])
    assert loaded.tree["small"][6].shape == (7,)
    assert loaded.tree["small"][0] is into["small"][0]
    engines[0].close()


# DTensor: the ranks of a mesh one after the other in this process, over torch's fake group


@pytest.fixture
def as_rank() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def enter(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield enter
    if dist.is_initialized():
        dist.destroy_process_group()


def layout_of(name: str) -> tuple[tuple[int, ...], list[Any]]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return {
        "rows": ((4,), [Shard(0)]),
        "columns": ((4,), [Shard(1)]),
        "uneven": ((3,), [Shard(0)]),
        "grid": ((2, 2), [Shard(0), Shard(1)]),
        "hsdp": ((2, 2), [Replicate(), Shard(0)]),
        "twice": ((2, 2), [Shard(0), Shard(0)]),
        "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        "last": ((2,), [Shard(2)]),
    }[name]


def local_of(full: torch.Tensor, mesh: Any, placements: list[Any]) -> Any:
    """A DTensor of this rank, cut as torch itself cuts."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    piece = full
    order = list(enumerate(placements))
    if any(isinstance(p, _StridedShard) for p in placements):
        order.reverse()  # tensor parallel first, then FSDP cuts what is left
    for dim, placement in order:
        if not placement.is_replicate():
            chunks = piece.chunk(mesh.mesh.shape[dim], placement.dim)
            where = mesh.get_coordinate()[dim]
            empty = piece.narrow(placement.dim, 0, 0)
            piece = chunks[where] if where < len(chunks) else empty
    stride = full.stride()
    return DTensor.from_local(piece.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=stride)


LAYOUTS = ["rows", "columns", "uneven", "grid", "hsdp", "twice", "strided", "last"]


def write_sharded(path: pathlib.Path, name: str, full: torch.Tensor, as_rank: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    sizes, placements = layout_of(name)
    world = math.prod(sizes)
    reports, engine = [], None
    save = SaveId(epoch=1, n=1, step=1)
    for rank in range(world):
        as_rank(rank, world)
        mesh = init_device_mesh("cpu", sizes)
        engine = CheckpointEngine(str(path), replica=rank, num_replicas=world)
        handle = engine.save(1, {"w": local_of(full, mesh, placements), "plain": full[0]}, view=(1, 1))
        assert handle is not None
        reports.append(handle.durable.result(20))
        engine.settle(save, None)
        if rank < world - 1:
            engine.close()
    assert engine is not None
    engine.publish(save, reports)
    engine.close()


@pytest.mark.parametrize("source", LAYOUTS)
def test_dtensor_layouts_reshard_into_each_other_and_into_plain(
    tmp_path: pathlib.Path, source: str, as_rank: Any
) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    full = torch.arange(10 * 9 * 4, dtype=torch.float32).view(10, 9, 4)
    write_sharded(tmp_path, source, full, as_rank)
    engine = CheckpointEngine(str(tmp_path))
    loaded = engine.load()
    assert loaded is not None
    assert torch.equal(loaded.tree["w"], full)
    engine.close()
    for target in LAYOUTS:
        sizes, placements = layout_of(target)
        world = math.prod(sizes)
        for rank in range(world):
            as_rank(rank, world)
            mesh = init_device_mesh("cpu", sizes)
            want = local_of(full, mesh, placements)
            into = {"w": local_of(torch.zeros_like(full), mesh, placements), "plain": torch.zeros(9, 4)}
            engine = CheckpointEngine(str(tmp_path), replica=rank, num_replicas=world)
            engine.load(into=into)
            engine.close()
            assert torch.equal(into["w"].to_local(), want.to_local()), (source, target, rank)
            assert torch.equal(into["plain"], full[0])


def test_shards_held_twice_are_written_once(tmp_path: pathlib.Path, as_rank: Any) -> None:
    full = torch.randn(10, 9, 4)
    write_sharded(tmp_path, "hsdp", full, as_rank)
    store = LocalStore(str(tmp_path))
    head = parse_head(store.read_head(0), file="head")
    with Reader(head, [store]) as reader:
        pieces = [h.piece for h in reader.pieces[reader.names["w"]]]
    assert sum(math.prod(p.shape) for p in pieces) == full.numel()
