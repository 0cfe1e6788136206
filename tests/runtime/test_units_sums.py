"""The accumulator and the tree: the same bits for any membership, order of leaves and holding pattern."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outlast.core.protocol import Node, cover, plan_of, schedule, split
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.training._partial_sums import Accumulator
from outlast.runtime.training._staging import DEPTH, Arrival, Staging
from outlast.tensors import BLOCK, Layout, packed_prints, reduce_slice

SHAPES = [(5,), (40, 7), (3,), (1,), (64, 2)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also tells 0.0 from -0.0, and a NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def reference(leaves: Sequence[Tensor], node: Node) -> Tensor:
    """The tree by its definition."""
    if node[1] - node[0] == 1:
        return leaves[node[0]]
    left, right = split(node)
    return reference(leaves, left) + reference(leaves, right)


class Replica:
    """One simulated member: its own parameters, memory and accumulator."""

    def __init__(
        self,
        num_leaves: int,
        dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
        bucket_bytes: int = 512,
        shared: bool = False,
        staging: Callable[[list[nn.Parameter], Layout, torch.device], Staging] | None = None,
    ) -> None:
        draw = torch.Generator().manual_seed(1)
        dtypes = [dtype] * len(SHAPES) if isinstance(dtype, torch.dtype) else dtype
        of = zip(SHAPES, dtypes, strict=True)
        self.params = [nn.Parameter(torch.randn(shape, generator=draw).to(kind)) for shape, kind in of]
        self.layout = Layout(self.params, bucket_bytes)
        self.memory = Memory(self.layout, num_leaves + 2, shared=shared)
        staged = None if staging is None else staging(self.params, self.layout, torch.device("cpu"))
        self.sums = Accumulator(self.params, self.layout, self.memory, num_leaves, staging=staged)

    def compute(
        self, leaf: int, unused: Sequence[int] = (), weight: float = 1.0, overlap: list[int] | None = None
    ) -> None:
        self.sums.begin(leaf, weight, None if overlap is None else overlap.append)
        draw = torch.Generator().manual_seed(100 + leaf)
        total = torch.zeros(())
        for index, param in enumerate(self.params):
            factor = torch.randn(param.shape, generator=draw).to(param.dtype)
            if index not in unused:
                total = total + (param * factor).sum()
        if total.requires_grad:
            total.backward()
        self.sums.end()

    def flat(self, node: Node) -> list[Tensor]:
        return self.memory.flats(self.sums.slots[node])


def gradient(leaf: int, layout: Layout, unused: Sequence[int] = (), weight: float = 1.0) -> list[Tensor]:
    """What microbatch `leaf` gives in the layout's buckets, computed plainly."""
    storage = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    flats = layout.flats(storage)
    draw = torch.Generator().manual_seed(100 + leaf)
    for index, view in enumerate(layout.views(flats)):
        factor = torch.randn(view.shape, generator=draw)
        if index not in unused:
            view.copy_(factor * weight if weight != 1.0 else factor)
    return flats


def root_of(members: Sequence[Replica], leaves: Sequence[Sequence[int]], num_leaves: int) -> list[Tensor]:
    """What the exchange would give: each bucket cut into as many slices as members."""
    nodes = [cover(own, num_leaves) for own in leaves]
    steps = list(schedule(tuple(node for own in nodes for node in own), num_leaves))
    out = []
    for bucket in members[0].layout.buckets:
        result = torch.empty(bucket.numel, dtype=bucket.dtype)
        for lo, hi in bucket.slices(len(members)):
            parts = {
                node: member.flat(node)[bucket.index][lo:hi]
                for member, own in zip(members, nodes, strict=True)
                for node in own
            }
            if hi > lo:
                reduce_slice(parts, steps, (0, num_leaves), 1.0 / num_leaves, result[lo:hi])
        out.append(result)
    return out


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 5, 8, 12])
def test_the_sum_is_the_same_whoever_computes(num_leaves: int) -> None:
    layout = Replica(num_leaves).layout
    leaves = [gradient(leaf, layout) for leaf in range(num_leaves)]
    buckets = range(len(layout.buckets))
    want = [reference([leaf[b] for leaf in leaves], (0, num_leaves)) * (1.0 / num_leaves) for b in buckets]
    for num_members in range(1, min(8, num_leaves) + 1):
        plan = plan_of([f"r{i}.1" for i in range(num_members)], 0, num_leaves)
        members = [Replica(num_leaves) for _ in range(num_members)]
        own = list(plan.leaves.values())
        for member, mine in zip(members, own, strict=True):
            for leaf in mine:
                member.compute(leaf)
        got = root_of(members, own, num_leaves)
        assert all(map(same_bits, got, want)), num_members


@settings(max_examples=40)
@given(st.integers(1, 10), st.integers(1, 8), st.randoms(use_true_random=False))
def test_any_set_of_leaves_in_any_order(num_leaves: int, num_members: int, draw: random.Random) -> None:
    """As after deaths: leaves are scattered over members, and each computes its own in some order."""
    owners = [draw.randrange(num_members) for _ in range(num_leaves)]
    members = [Replica(num_leaves) for _ in range(num_members)]
    own = [[leaf for leaf in range(num_leaves) if owners[leaf] == m] for m in range(num_members)]
    for member, mine in zip(members, own, strict=True):
        for leaf in draw.sample(mine, len(mine)):
            member.compute(leaf, overlap=[] if draw.random() < 0.5 else None)
        assert set(member.sums.slots) == set(cover(mine, num_leaves))
    alone = Replica(num_leaves)
    for leaf in range(num_leaves):
        alone.compute(leaf)
    whole = root_of([alone], [list(range(num_leaves))], num_leaves)
    assert all(map(same_bits, root_of(members, own, num_leaves), whole))


@pytest.mark.parametrize("overlap", [False, True])
def test_unused_parameters_and_weights(overlap: bool) -> None:
    """A parameter without gradient counts as zeros, and is not marked as used; short microbatches are weighted."""
    member = Replica(4)
    weights, unused = [0.3, 0.3, 0.2, 0.2], [[], [1], [1, 3], [3]]
    for leaf in range(4):
        told: list[int] = []
        member.compute(leaf, unused[leaf], weights[leaf], told if overlap else None)
        assert told == (list(range(len(member.layout.buckets))) if overlap else [])
    leaves = [gradient(leaf, member.layout, unused[leaf], weights[leaf]) for leaf in range(4)]
    for b, flat in enumerate(member.flat((0, 4))):
        assert same_bits(flat, reference([leaf[b] for leaf in leaves], (0, 4)))
    assert member.sums.used == bytearray([0b11111])
    once = Replica(4)
    once.compute(0, unused=[0, 4])
    assert once.sums.used == bytearray([0b01110])


def test_minus_zero_plus_nothing_is_zero_in_every_order() -> None:
    """-0.0 + 0.0 is 0.0: an unused parameter is added as zeros, else bits would depend on who computed it."""
    values = {0: -0.0, 1: None, 2: -0.0, 3: -0.0}
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]):
        param = nn.Parameter(torch.ones(4))
        layout = Layout([param])
        memory = Memory(layout, 6, shared=False)
        sums = Accumulator([param], layout, memory, 4)
        for leaf in order:
            sums.begin(leaf, 1.0, None)
            if values[leaf] is not None:
                (param * values[leaf]).sum().backward()
            sums.end()
        got = memory.views(sums.slots[0, 4])[0]
        assert [math.copysign(1.0, v) for v in got.tolist()] == [1.0] * 4
    both = reference([torch.tensor([-0.0]), torch.tensor([-0.0])], (0, 2))
    assert math.copysign(1.0, both.item()) == -1.0


def test_half_precision_is_summed_in_float32() -> None:
    member = Replica(2, torch.bfloat16)
    for leaf in range(2):
        member.compute(leaf)
    assert {bucket.dtype for bucket in member.layout.buckets} == {torch.float32}
    half = [[f.bfloat16().float() for f in gradient(leaf, member.layout)] for leaf in range(2)]
    for b, flat in enumerate(member.flat((0, 2))):
        assert same_bits(flat, half[0][b] + half[1][b])


def test_what_is_kept_survives_an_abandoned_exchange() -> None:
    member = Replica(8)
    for leaf in (0, 1, 4):
        member.compute(leaf)
    before = [flat.clone() for flat in member.flat((0, 2))]
    member.sums.keep([(0, 2)])
    assert set(member.sums.slots) == {(0, 2)}
    member.compute(2)
    member.compute(3)
    assert set(member.sums.slots) == {(0, 4)}
    leaves = [gradient(leaf, member.layout) for leaf in range(4)]
    assert all(same_bits(b, reference([leaf[i] for leaf in leaves], (0, 2))) for i, b in enumerate(before))
    for b, flat in enumerate(member.flat((0, 4))):
        assert same_bits(flat, reference([leaf[b] for leaf in leaves], (0, 4)))


@pytest.mark.parametrize("shared", [True, False])
def test_a_sum_that_others_read_is_fingerprinted_as_it_is_made(shared: bool) -> None:
    plain, printing = Replica(4, shared=shared), Replica(4, shared=shared)
    printing.sums.printing = True
    prints = []
    for leaf in range(4):
        for one in (plain, printing):
            one.compute(leaf, unused=[2] if leaf == 1 else [], overlap=[] if leaf == 3 else None)
        prints.append(printing.sums.print)
    node = (0, 4)
    assert all(same_bits(a, b) for a, b in zip(plain.flat(node), printing.flat(node), strict=True))
    assert len(set(prints)) == 4
    said = {key for key, _ in printing.sums._sent}
    assert said == ({node} if shared else set())
    for bucket in printing.layout.buckets:
        flat = printing.flat(node)[bucket.index]
        wanted = packed_prints(flat, BLOCK, bucket.first_block)
        assert printing.sums.sent(node, printing.sums.slots[node], bucket.index) == wanted


class Far(Staging):
    """As on a device: what is brought can be read when it was waited for, or after it was asked for so often."""

    asks = 0

    def __init__(self, *about: object) -> None:
        super().__init__(*about)  # type: ignore[arg-type]
        self.under_way = self.most = self.joined = 0

    def bring(self, grads: Sequence[Tensor]) -> Arrival | None:
        arrival = super().bring(grads)
        if arrival is not None:
            arrival.mark = Copy(self, arrival.grads)
        return arrival


class Copy:
    def __init__(self, staging: Far, there: list[Tensor]) -> None:
        self._staging, self._there, self._asked = staging, there, 0
        self._values: list[Tensor] | None = [part.clone() for part in there]
        for part in there:
            part.fill_(float("nan"))
        staging.under_way += 1
        staging.joined += 1
        staging.most = max(staging.most, staging.under_way)

    def query(self) -> bool:
        self._asked += 1
        if self._asked > self._staging.asks:
            self.synchronize()
        return self._values is None

    def synchronize(self) -> None:
        for part, value in zip(self._there, self._values or [], strict=self._values is not None):
            part.copy_(value)
        self._staging.under_way -= self._values is not None
        self._values = None


@pytest.mark.parametrize("asks", [0, 1, 100])
@pytest.mark.parametrize("printing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_that_come_later_are_added_as_those_that_are_there(
    dtype: torch.dtype, printing: bool, asks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Far, "asks", asks)
    weights, unused = [0.3, 0.3, 0.2, 1.0], [[], [1], [1, 3], [0, 1, 2, 3, 4]]
    here, far = Replica(4, dtype, 16, shared=True), Replica(4, dtype, 16, shared=True, staging=Far)
    order: list[list[int]] = [[], []]
    for told, one in zip(order, (here, far), strict=True):
        one.sums.printing = printing
        for leaf in range(4):
            one.compute(leaf, unused[leaf], weights[leaf], told)
            told.append(one.sums.print)
    assert order[0] == order[1]
    assert all(map(same_bits, here.flat((0, 4)), far.flat((0, 4))))
    assert far.sums.used == here.sums.used
    staging = far.sums._staging
    assert isinstance(staging, Far)
    assert (staging.under_way, staging.most) == (0, {0: 1, 1: 2, 100: DEPTH}[asks])


def test_gradients_that_cannot_be_joined_come_one_by_one_in_their_turn() -> None:
    mixed = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32]
    here, far = Replica(2, mixed, 1 << 20), Replica(2, mixed, 1 << 20, staging=Far)
    apart = Replica(2, mixed, 16, staging=Far)
    for leaf in range(2):
        for one in (here, far, apart):
            one.compute(leaf)
    assert all(map(same_bits, here.flat((0, 2)), far.flat((0, 2))))
    assert [one.sums._staging.joined for one in (far, apart)] == [0, 2 * len(apart.layout.buckets)]  # type: ignore[union-attr]
    views = [one.memory.views(one.sums.slots[0, 2]) for one in (here, apart)]
    assert all(map(same_bits, *views))


def test_an_outcome_goes_back_by_the_bucket_and_where_types_change_not_at_all() -> None:
    params = [
        nn.Parameter(torch.zeros(shape).to(kind)) for shape, kind in [((7,), torch.bfloat16), ((3, 2), torch.float32)]
    ]
    layout = Layout(params, 4)
    assert Staging.between(params, layout) is None
    staging = Staging(params, layout, torch.device("cpu"))
    outcome = staging.outcome()
    assert [(flat.numel(), flat.dtype) for flat in outcome] == [(b.numel, b.dtype) for b in layout.buckets]
    for flat in outcome:
        flat.normal_()
    assert all(map(same_bits, staging.back(outcome), outcome))
    staging.settle()
    away = Staging(params, layout, torch.device("meta")).back(outcome)
    assert [flat.device.type for flat in away] == ["meta", "cpu"]
