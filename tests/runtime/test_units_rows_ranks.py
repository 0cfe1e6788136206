"""Rows of a robust rule over the ranks of replicas, without processes: one choice, and the bits of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from outlast.config import RunConfig
from outlast.core.protocol import Node, RowsNote, cover, plan_of, split
from outlast.core.protocol.slices import in_lane
from outlast.errors import CheckpointError, ConfigError, StepMisuse, TrainingError
from outlast.runtime.exchange._row_blocks import SpreadParams
from outlast.runtime.exchange._rule_memory import RowMemory
from outlast.runtime.exchange.robust_rows import Robust
from outlast.runtime.exchange.rule_settings import RowSettings, check_even_rows, row_settings
from outlast.runtime.member._laned_plane import LanedPlane
from outlast.runtime.transport import rank_words as say
from outlast.runtime.transport.rank_check_words import SlicesSaid
from outlast.tensors import BLOCK, Layout, grid_of

SHAPES = {"table": (301, 350), "up.weight": (90, 1000), "up.bias": (90,), "down": (7, 3)}
MICROBATCHES, ROWS, MEMBERS = 16, 4, ("r0", "r1", "r2")
PARAMS = [torch.zeros(shape) for shape in SHAPES.values()]


def settings_of(**rule: Any) -> RowSettings:
    settings = row_settings(RunConfig(replicas=ROWS), list(SHAPES), MICROBATCHES, rows=ROWS, **rule)
    assert settings is not None
    return settings


def gradients(seed: int) -> list[list[Tensor]]:
    """Of each microbatch, whole."""
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=draw) for shape in SHAPES.values()] for _ in range(MICROBATCHES)]


def total(rows: list[Tensor], node: Node) -> Tensor:
    if node[1] - node[0] == 1:
        return rows[node[0]]
    left, right = split(node)
    return total(rows, left) + total(rows, right)


class Lane:
    """The ranks of one place in all replicas. `sharded`: as `fully_shard` leaves parameters, else they are whole."""

    def __init__(self, settings: RowSettings, place: int, width: int, sharded: bool = True) -> None:
        self.place, self.width, self.sharded = place, width, sharded
        own = {param: g for g, group in enumerate(settings.groups) for param in group.params}
        grid = grid_of(list(SHAPES.values()), place, width, BLOCK) if sharded else None
        groups = [own[index] for index in range(len(PARAMS))]
        self.layout = Layout([self.held(p) for p in PARAMS], 150_000, groups, grid=grid)
        sizes = SimpleNamespace(
            num_leaves=MICROBATCHES, shortest=lambda: [1] * MICROBATCHES, sizes=lambda step: [1] * MICROBATCHES
        )
        spread = SpreadParams(PARAMS, place, width) if sharded else None
        self.robusts = [Robust(settings, self.layout, cast(Any, sizes), 5, spread) for _ in MEMBERS]

    def held(self, whole: Tensor) -> Tensor:
        rows = -(-whole.shape[0] // self.width)
        return whole[self.place * rows : (self.place + 1) * rows]

    def flats(self, values: list[Tensor]) -> list[Tensor]:
        flats = self.layout.flats(torch.zeros(self.layout.total_bytes, dtype=torch.uint8))
        for view, value in zip(self.layout.views(flats), values, strict=True):
            view.copy_(self.held(value))
        return flats

    def reduce(self, step: int, every: list[Node], sums: dict[Node, list[Tensor]]) -> None:
        """As far as a lane goes by itself."""
        self.out = self.layout.flats(torch.zeros(self.layout.total_bytes, dtype=torch.uint8))
        parts = {node: self.flats(values) for node, values in sums.items()}
        for place, robust in enumerate(self.robusts):
            robust.begin(step, every)
            for b, bucket in enumerate(self.layout.buckets):
                if robust.settings.momentum:
                    robust.move(b, {node: flats[b] for node, flats in parts.items()})
                lo, hi = bucket.slices(len(MEMBERS))[place]
                mine = {node: flats[b][lo:hi] for node, flats in parts.items()}
                if hi > lo and robust.rule_of(b).needs_gram:
                    robust.keep(b, mine, lo, hi)
                elif hi > lo:
                    robust.reduce(b, mine, lo, hi, self.out[b][lo:hi])

    def combine(self, group: int) -> None:
        for place, robust in enumerate(self.robusts):
            for b in robust.groups[group].buckets:
                lo, hi = self.layout.buckets[b].slices(len(MEMBERS))[place]
                if hi > lo:
                    robust.combine(b, lo, hi, self.out[b][lo:hi])


def trained(settings: RowSettings, width: int, *, sharded: bool = True, steps: int = 3) -> list[Tensor]:
    """The whole gradient of the last of some steps, by replicas of `width` ranks."""
    lanes = [Lane(settings, place, width, sharded) for place in range(width)]
    leaves = plan_of(MEMBERS, 0, MICROBATCHES // width, ROWS).leaves
    every = [node for name in MEMBERS for node in cover(leaves[name], MICROBATCHES // width, ROWS)]
    for step in range(steps):
        rows = gradients(step)
        under = {n: (n[0] * width, n[1] * width) for n in every}
        sums = {n: [total([row[i] for row in rows], under[n]) for i in range(len(PARAMS))] for n in every}
        for lane in lanes:
            lane.reduce(step, every, sums)
        for g, group in enumerate(lanes[0].robusts[0].groups):
            if group.rule.needs_gram:
                bodies = [robust.grams(g) for lane in lanes for robust in lane.robusts]
                for lane in lanes:
                    for robust in lane.robusts:
                        robust.select(g, robust.total(g, bodies), leaves)
                    lane.combine(g)
        for lane in lanes:
            for robust in lane.robusts:
                robust.applied(lane.out)
    held = [lane.layout.views(lane.out) for lane in lanes]
    return [torch.cat([views[i] for views in held]) for i in range(len(PARAMS))]


RULES: list[dict[str, Any]] = [
    {"aggregation": "median", "f": 1},
    {"aggregation": "krum_all_honest", "f": 1},
    {"aggregation": "geometric_median", "f": 1},
    {"aggregation": "trimmed_mean", "f": 1, "pre": "nnm", "row_momentum": 0.9},
    {"aggregation": {"up.*": "centered_clipping", "*": {"rule": "median", "pre": "nnm"}}, "f": 1},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule['aggregation']}")
def test_the_bits_do_not_depend_on_the_ranks(rule: dict[str, Any]) -> None:
    settings = settings_of(**rule)
    want = trained(settings, 1)
    for width in (2, 4):
        assert all(torch.equal(a, b) for a, b in zip(trained(settings, width), want, strict=True)), width


def test_a_model_that_is_not_sharded_has_the_same_bits_where_no_distance_is_measured() -> None:
    """Nor does krum differ: it takes a row as it is, and finds the same one."""
    for name in ("median", "trimmed_mean", "mean_around_median", "krum_all_honest"):
        settings = settings_of(aggregation=name, f=1)
        whole = trained(settings, 1, sharded=False)
        assert all(torch.equal(a, b) for a, b in zip(trained(settings, 2), whole, strict=True)), name


def test_a_row_that_one_rank_spoils_is_spoilt_in_all_lanes() -> None:
    """What is not finite lies in the shards of rank 1 alone; rank 0 leaves the row out, too."""
    settings = settings_of(aggregation="krum_all_honest", f=1)
    lanes = [Lane(settings, place, 2) for place in range(2)]
    leaves = plan_of(MEMBERS, 0, 8, ROWS).leaves
    every = [node for name in MEMBERS for node in cover(leaves[name], 8, ROWS)]
    sums = {n: [torch.ones(shape) * (n[0] + 1) for shape in SHAPES.values()] for n in every}
    sums[every[0]][0][200:] = float("nan")
    for lane in lanes:
        lane.reduce(0, every, sums)
    bodies = [robust.grams(0) for lane in lanes for robust in lane.robusts]
    for lane in lanes:
        robust = lane.robusts[0]
        robust.select(0, robust.total(0, bodies), leaves)
        mixture = robust.groups[0].mixture
        assert mixture is not None
        assert not mixture.weights[:, 0].any()
    sums[every[-1]][0][:3] = float("inf")
    for lane in lanes:
        lane.reduce(0, every, sums)
    bodies = [robust.grams(0) for lane in lanes for robust in lane.robusts]
    with pytest.raises(TrainingError, match=r"rows 0, 3, computed by r0, r2"):
        lanes[1].robusts[0].select(0, lanes[1].robusts[0].total(0, bodies), leaves)


def test_rows_that_would_not_be_those_of_one_rank_are_refused() -> None:
    check_even_rows(8, 3, 1)
    check_even_rows(12, 3, 4)
    with pytest.raises(ConfigError, match="8 microbatches on 2 ranks are no equal share for each of 3 rows") as caught:
        check_even_rows(8, 3, 2)
    assert "microbatches=12" in str(caught.value)


# --- the lead ------------------------------------------------------------------------------------------------------


class Own:
    """The lead's own lane, in which r1's slice of bucket 0 is true."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def finish(self) -> Any:
        return SimpleNamespace(fingerprint=1, others=(), unlike=set(), false={})

    def look_again(self, slices: list[Any]) -> dict[Any, tuple[int, int]]:
        self.asked.append(list(slices))
        return dict.fromkeys(slices, (0, 0))


class Others:
    """One more rank, which has found both of another's rows bad and the slice of r1 in its lane false."""

    def __init__(self) -> None:
        self.pipes, self.words = [object()], list[Any]()

    def gather(self, kind: type, wait: Any) -> list[Any]:
        if kind is SlicesSaid:
            return [SlicesSaid(1, ((3, "r1", 0, 1),) if self.words[-1].slices else ())]
        note = RowsNote(bad=((0, 2),), accused=((3, "r1"),))
        return [say.LaneReduced(1, 2, (), b"", (), (), 0, 7, rows=note)]

    def ask_each(self, word: Any) -> None:
        self.words.append(word(1, 1))


def test_the_lead_says_what_its_ranks_found_of_rows_as_one_replica() -> None:
    robust = Lane(settings_of(aggregation="median", f=1), 0, 2).robusts[0]
    engine = SimpleNamespace(
        robust=robust, take_in=lambda *what: None, loop=SimpleNamespace(settings=b"", digest=lambda settings: 7)
    )
    own, mesh = Own(), SimpleNamespace(view=SimpleNamespace(members=MEMBERS))
    plane = LanedPlane(cast(Any, own), cast(Any, Others()), cast(Any, engine), cast(Any, mesh), lambda lane: lane)
    plane.finish()
    assert robust.note == RowsNote(bad=((0, 2),), accused=((in_lane(1, 3), "r1"),))
    assert plane.false(in_lane(1, 3), 1) is True, "as the rank in whose lane it is finds it"
    assert plane.false(0, 1) is False
    assert own.asked == [[], [(0, "r1")]]
    engine.loop.digest = lambda settings: 8
    with pytest.raises(StepMisuse):
        plane.finish()


# --- what rules remember --------------------------------------------------------------------------------------------


def test_what_rules_remember_is_kept_by_parameter_and_fits_what_is_held_alike() -> None:
    layout = Lane(settings_of(aggregation="median", f=1), 0, 1).layout
    told, taken = (RowMemory(layout, 2, 0.5, [True] * len(layout.buckets), PARAMS) for _ in range(2))
    for row in told.now:
        for flat in row:
            flat.normal_()
    told.applied([torch.ones(bucket.numel) for bucket in layout.buckets])
    taken.load_state_dict(told.state_dict())
    assert [tuple(row.shape) for row in taken.state_dict()["last"]] == list(SHAPES.values())
    for mine, theirs in zip(taken.state_dict()["momentum"][1], told.state_dict()["momentum"][1], strict=True):
        assert torch.equal(mine, theirs)
    by_bucket = RowMemory(layout, 2, 0.5, [True] * len(layout.buckets))
    with pytest.raises(CheckpointError, match="in another way"):
        by_bucket.load_state_dict(told.state_dict())
