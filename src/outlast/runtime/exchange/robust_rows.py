"""Robust rules in the exchange: rows from partial sums, a rule for each group of parameters, and what rules remember.

One object a replica. A plane (`row_plane.py`) hands it the partial sums of one slice at a time:

    coordinate rules   reduce(bucket, parts, lo, hi, target)                       the slice's result, at once
    distance rules     keep(bucket, …); grams(group) -> to all; select(group, …); combine(bucket, target)

A row's value is the mean of its microbatches (sums in the row's own tree, then one multiplication), so no bit depends
on who computed what, on who reduces which slice, or on the number of members: Gram matrices are summed in a fixed tree
over 32 Ki-element blocks. A replica of several ranks has one row where a replica of one rank has: each rank holds its
shards of all rows, a matrix is summed over all of them, and the choice is one. Not here: transport, and who may lie
(`rule_settings.py`, `checks/row_admission.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from outlast.config import RunConfig
from outlast.core.position import position_seed
from outlast.core.protocol import Node, RowsNote, owners_of, roots, schedule
from outlast.core.protocol.slices import in_lane
from outlast.errors import TrainingError
from outlast.runtime.exchange._row_blocks import GramBlocks, SpreadParams, gram_blocks_of
from outlast.runtime.exchange._rule_memory import RowMemory
from outlast.runtime.exchange.rule_settings import (
    RowSettings,
    check_even_rows,
    check_short_batch,
    row_settings,
)
from outlast.runtime.exchange.shard_sums import ShardSums
from outlast.tensors import (
    BLOCK,
    Grid,
    Layout,
    Mixture,
    Rule,
    grid_of_params,
    is_shard,
    local,
    make_rule,
    reduce_slice,
    total_gram,
)

__all__ = ["Robust", "arrange", "layout_for"]

MEMORY = "outlast.rows"  # what rules remember, among the registered state
Parts = Mapping[Node, Tensor]


class BatchSizes(Protocol):
    """How many samples each microbatch of a step has."""

    seed: int

    @property
    def num_leaves(self) -> int: ...
    def shortest(self) -> list[int]: ...
    def sizes(self, step: int) -> Sequence[int]: ...


class Registry(Protocol):
    """The training state: its parameters by name, and what is registered with it."""

    names: list[str]
    params: list[Tensor]
    extra: dict[str, Any]


@dataclass(slots=True)
class _Group:
    """Parameters under one rule: whole buckets, and their blocks numbered from 0."""

    rule: Rule
    buckets: list[int]
    blocks: GramBlocks
    mixture: Mixture | None = None


class Robust:
    """Applies a robust rule to the rows of a step. `layout`: made with a group for each parameter, so that a bucket has
    one rule. `spread`: of shards; a leaf is what the ranks of a replica compute at a time, `width` microbatches."""

    def __init__(
        self,
        settings: RowSettings,
        layout: Layout,
        samples: BatchSizes,
        seed: int,
        spread: SpreadParams | None = None,
    ) -> None:
        self.settings, self.layout, self.samples, self.seed = settings, layout, samples, seed
        self._spread, self.width = spread, spread.width if spread is not None else 1
        self.num_rows, self.num_leaves = settings.num_rows, samples.num_leaves // self.width
        self.roots = roots(self.num_leaves, self.num_rows)
        check_short_batch(samples.shortest(), self.num_rows)
        owner = {param: g for g, group in enumerate(settings.groups) for param in group.params}
        self.group_of = [owner[bucket.params[0][0]] for bucket in layout.buckets]
        self.groups = [self._group(g) for g in range(len(settings.groups))]
        for group in self.groups:
            group.rule.prepare()
        remembers = [self.groups[g].rule.stateful for g in self.group_of]
        shards = spread.params if spread is not None else ()
        self.memory = RowMemory(layout, self.num_rows, settings.momentum, remembers, shards)
        self._step = -1
        self._bad: set[tuple[int, int]] = set()
        self.accused: set[tuple[int, str]] = set()
        self._kept: dict[int, list[Tensor]] = {}

    def _group(self, index: int) -> _Group:
        buckets = [b for b, g in enumerate(self.group_of) if g == index]
        blocks = gram_blocks_of(self.layout, self.settings.groups[index].params, buckets, self._spread)
        return _Group(rule=self._rule(index, 0), buckets=buckets, blocks=blocks)

    def _rule(self, index: int, step: int) -> Rule:
        g = self.settings.groups[index]
        draw = position_seed(self.seed, step, index, 0xB0C) % (1 << 31)  # of bucketing's groups
        return make_rule(g.rule, num_rows=self.num_rows, f=g.f, pre=g.pre, seed=draw, **g.options)

    # --- a step --------------------------------------------------------------------------------------------------
    def weight(self, step: int, leaf: int) -> float:
        """What a microbatch's gradient is multiplied with: 1, or in a short batch its share of its row."""
        sizes = self.samples.sizes(step)
        if len(set(sizes)) == 1:
            return 1.0
        lo, hi = next(row for row in self._rows() if row[0] <= leaf < row[1])
        return sizes[leaf] / sum(sizes[lo:hi])

    def _rows(self) -> list[tuple[int, int]]:
        """The microbatches of each row."""
        return [(lo * self.width, hi * self.width) for lo, hi in self.roots]

    def begin(self, step: int, nodes: Iterable[Node]) -> None:
        """A new exchange. `nodes`: everybody's partial sums."""
        self._step, self._bad, self.accused, self._kept = step, set(), set(), {}
        todo = schedule(tuple(nodes), self.num_leaves, self.num_rows)
        self._adds = [[a for a in todo if lo <= a[2][0] < hi] for lo, hi in self.roots]
        equal = len(set(self.samples.sizes(step))) == 1
        self._scales = [1.0 / (hi - lo) if equal else 1.0 for lo, hi in self._rows()]
        for index, group in enumerate(self.groups):
            group.mixture = None
            group.blocks.clear()
            if "bucketing" in group.rule.pre:
                group.rule = self._rule(index, step)

    def rule_of(self, bucket: int) -> Rule:
        return self.groups[self.group_of[bucket]].rule

    def _sums(self, parts: Parts) -> list[Tensor]:
        """The rows' sums, in the rows' own trees; a view where one member has the whole row."""
        out = []
        for (lo, hi), adds in zip(self.roots, self._adds, strict=True):
            if not adds:
                out.append(parts[lo, hi])
                continue
            mine = {node: part for node, part in parts.items() if lo <= node[0] < hi}
            total = torch.empty_like(next(iter(mine.values())))
            reduce_slice(mine, adds, (lo, hi), 1.0, total)
            out.append(total)
        return out

    def _means(self, parts: Parts) -> list[Tensor]:
        return [torch.mul(total, scale) for total, scale in zip(self._sums(parts), self._scales, strict=True)]

    def move(self, bucket: int, parts: Parts) -> None:
        """With momentum, before anything else: `parts` of the whole bucket."""
        self.memory.move(bucket, self._means(parts))

    def _values(self, bucket: int, parts: Parts, lo: int, hi: int) -> list[Tensor]:
        """The rows' means in tensors of their own, or their momentum."""
        return self.memory.rows(bucket, lo, hi) if self.settings.momentum else self._means(parts)

    # --- coordinate rules ----------------------------------------------------------------------------------------
    def reduce(self, bucket: int, parts: Parts, lo: int, hi: int, target: Tensor) -> None:
        """target = the rule's result for elements lo to hi of the bucket. Notes rows that are not finite."""
        self._note(bucket, self._reduce(bucket, parts, lo, hi, target))

    def _reduce(self, bucket: int, parts: Parts, lo: int, hi: int, target: Tensor) -> list[int]:
        rule, scale = self.rule_of(bucket), self._scales[0]
        if self.settings.momentum or len(set(self._scales)) > 1:
            result, bad = rule.reduce_and_count(self._values(bucket, parts, lo, hi))
            target.copy_(result)
        else:  # coordinate rules commute with one factor: the rows are read where they lie
            result, bad = rule.reduce_and_count(self._sums(parts))
            torch.mul(result, scale, out=target)
        return bad

    def _note(self, bucket: int, bad: Iterable[int]) -> None:
        self._bad.update((self.group_of[bucket], row) for row in bad)

    # --- distance rules ------------------------------------------------------------------------------------------
    def keep(self, bucket: int, parts: Parts, lo: int, hi: int) -> None:
        """Copy the rows of my slice, and take its part of the Gram matrix. Memory: rows/members of a gradient."""
        group = self.groups[self.group_of[bucket]]
        rows, last = self._values(bucket, parts, lo, hi), self.memory.last(bucket, lo, hi)
        self._kept[bucket] = rows
        for begin, end, first in self.layout.buckets[bucket].stretches(lo, hi):
            piece = [row[begin - lo : end - lo] for row in rows]
            blocks = group.rule.gram(piece, last[begin - lo : end - lo] if last is not None else None)
            group.blocks.keep(first, blocks.cpu())

    def grams(self, group: int) -> bytes:
        """My part of the group's Gram matrix."""
        nodes = self.groups[group].blocks.partial()
        return msgspec.msgpack.encode([(*node, matrix.numpy().tobytes()) for node, matrix in nodes.items()])

    def total(self, group: int, bodies: Iterable[bytes]) -> bytes:
        """The group's Gram matrix, from the parts of all ranks of all members."""
        parts = [{(lv, i): _matrix(raw) for lv, i, raw in msgspec.msgpack.decode(body)} for body in bodies]
        return total_gram(parts, self.groups[group].blocks.num_blocks).numpy().tobytes()

    def select(self, group: int, gram: bytes, leaves: Mapping[str, Sequence[int]]) -> None:
        """Which rows count, from the whole matrix: the same decision on all. TrainingError names the liars' owners."""
        mine, total = self.groups[group], _matrix(gram)
        try:
            mine.mixture = mine.rule.select(total)
        except TrainingError as error:
            diagonal = total.diagonal()[: self.num_rows]
            bad = [row for row in range(self.num_rows) if not bool(torch.isfinite(diagonal[row]))]
            raise self._too_many(group, bad, leaves) from error

    def combine(self, bucket: int, lo: int, hi: int, target: Tensor) -> None:
        """target = the result for the slice that was kept; its rows are let go."""
        self._combine(bucket, self._kept.pop(bucket), lo, hi, target)

    def _combine(self, bucket: int, rows: list[Tensor], lo: int, hi: int, target: Tensor) -> None:
        group = self.groups[self.group_of[bucket]]
        assert group.mixture is not None
        target.copy_(group.rule.combine(rows, group.mixture, self.memory.last(bucket, lo, hi)))

    def again(self, bucket: int, parts: Parts, lo: int, hi: int) -> Tensor:
        """The result for somebody else's slice, after all rules have decided: what it must be equal to."""
        target = torch.empty(hi - lo, dtype=self.layout.buckets[bucket].dtype, device=self.layout.device)
        if self.rule_of(bucket).needs_gram:
            self._combine(bucket, self._values(bucket, parts, lo, hi), lo, hi, target)
        else:
            self._reduce(bucket, parts, lo, hi, target)
        return target

    # --- the verdict's evidence ----------------------------------------------------------------------------------
    @property
    def note(self) -> RowsNote:
        """My part of the header."""
        return RowsNote(bad=tuple(sorted(self._bad)), accused=tuple(sorted(self.accused)))

    def take_in(self, place: int, note: RowsNote) -> None:
        """What another rank of this replica found in its lane."""
        self._bad.update(note.bad)
        self.accused.update((in_lane(place, bucket), reducer) for bucket, reducer in note.accused)

    def refuse_bad_rows(self, notes: Iterable[RowsNote], leaves: Mapping[str, Sequence[int]]) -> None:
        """TrainingError if more than f rows of some group are not finite, over all slices; names who computed them."""
        bad = {pair for note in notes for pair in note.bad}
        for index, group in enumerate(self.groups):
            rows = sorted(row for g, row in bad if g == index)
            if len(rows) > group.rule.f and group.rule.name != "mean":
                raise self._too_many(index, rows, leaves)

    def _too_many(self, group: int, rows: Sequence[int], leaves: Mapping[str, Sequence[int]]) -> TrainingError:
        spec = self.settings.groups[group]
        who = owners_of(rows, leaves, self.num_leaves, self.num_rows)
        return TrainingError(
            f"{len(rows)} of {self.num_rows} rows are not finite (rows {', '.join(map(str, rows))}, computed by "
            f"{', '.join(who)}), more than the f = {spec.f} that {spec.rule} tolerates",
            where=f"step {self._step}, parameters {spec.pattern}",
            did="the step was refused on all replicas",
            remedy="find out why these replicas compute NaN or infinity, or skip what they were given",
        )

    def applied(self, out: Sequence[Tensor]) -> None:
        """The step's outcome is committed here: what rules remember moves on."""
        self.memory.applied(out)


def layout_for(
    settings: RowSettings | None,
    params: Sequence[Tensor],
    bucket_bytes: int,
    place: int = 0,
    width: int = 1,
    device: torch.device | None = None,
    grid: Grid | None = None,
) -> Layout:
    """Buckets of one rule each; for a mean, buckets as ever. Of shards on their grid; else on `grid`, if any."""
    owner = {param: g for g, group in enumerate(settings.groups if settings else ()) for param in group.params}
    groups = [owner[index] for index in range(len(params))] if len(set(owner.values())) > 1 else None
    if any(map(is_shard, params)):
        grid = grid_of_params(params, place, width, BLOCK)
        return Layout([local(p) for p in params], bucket_bytes, groups, grid=grid, device=device)
    return Layout(params, bucket_bytes, groups, grid=grid, device=device)


def arrange(
    config: RunConfig,
    parts: Registry,
    samples: BatchSizes,
    bucket_bytes: int,
    shards: ShardSums,
    device: torch.device | None,
    grid: Grid | None = None,
    **given: Any,
) -> tuple[Layout, Robust | None]:
    """Buckets, and the rules if it is no mean; `device`: where sums lie, if elsewhere than the parameters; `grid`:
    where blocks are, if that does not follow from the parameters; `given`: as of `row_settings`. What rules remember
    joins the state."""
    settings = row_settings(config, parts.names, samples.num_leaves, **given)
    layout = layout_for(settings, parts.params, bucket_bytes, shards.place, shards.width, device, grid)
    if settings is None:
        return layout, None
    check_even_rows(samples.num_leaves, settings.num_rows, shards.width)
    spread = SpreadParams(parts.params, shards.place, shards.width) if any(map(is_shard, parts.params)) else None
    robust = Robust(settings, layout, samples, samples.seed, spread)
    if robust.memory:
        parts.extra[MEMORY] = robust.memory
    return layout, robust


def _matrix(raw: bytes) -> Tensor:
    flat = np.frombuffer(raw, dtype=np.float64)
    side = round(len(flat) ** 0.5)
    return torch.from_numpy(flat.reshape(side, side).copy())
