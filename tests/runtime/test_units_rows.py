"""Rows of a robust rule without processes: the same bits however the work, the slices and the sums are dealt."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from outlast.config import RunConfig
from outlast.core.protocol import (
    Member,
    Node,
    RollEntry,
    View,
    ViewId,
    cover,
    leaves_of,
    plan_of,
    resolve,
    roots,
    schedule,
    split,
)
from outlast.errors import ConfigError, TrainingError
from outlast.runtime.checks.row_admission import admit
from outlast.runtime.exchange.plane import ExchangeTask
from outlast.runtime.exchange.robust_rows import Robust, layout_for
from outlast.runtime.exchange.rule_settings import row_settings
from outlast.runtime.exchange.shard_sums import ShardSums
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.faults.liars import Liar, Lie
from outlast.runtime.training.samples import Samples
from outlast.tensors import BLOCK, make_rule

SHAPES = {"table": (300, 500), "up.weight": (90, 1000), "up.bias": (90,), "down": (64, 3)}
NAMES = list(SHAPES)
LEAVES, ROWS = 12, 6


def parts_of(leaves: Sequence[Tensor], node: Node) -> Tensor:
    """A partial sum by its definition."""
    if node[1] - node[0] == 1:
        return leaves[node[0]]
    left, right = split(node)
    return parts_of(leaves, left) + parts_of(leaves, right)


class Bench:
    """One step's gradients, and members that aggregate them as the planes do."""

    def __init__(self, *, leaves: int = LEAVES, rows: int = ROWS, samples: int = 0, seed: int = 0, **rule: Any) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.params = [torch.zeros(shape) for shape in SHAPES.values()]
        settings = row_settings(RunConfig(replicas=rows), NAMES, leaves, rows=rows, **rule)
        assert settings is not None
        self.settings, self.leaves = settings, leaves
        self.layout = layout_for(settings, self.params, 200_000)
        data = list(range(samples or 4 * leaves))
        self.samples = Samples(data, global_batch_size=4 * leaves, microbatches=leaves, seed=1)
        self.flats = [
            [torch.randn(b.numel, generator=draw) for b in self.layout.buckets] for _ in range(leaves)
        ]  # leaf -> bucket

    def robust(self) -> Robust:
        return Robust(self.settings, self.layout, self.samples, 5)

    def step(self, members: Mapping[str, Sequence[int]], robusts: Mapping[str, Robust], step: int = 0) -> list[Tensor]:
        """The aggregate, reduced slice by slice by who would."""
        nodes = {m: cover(own, self.leaves, self.settings.num_rows) for m, own in members.items()}
        every = [node for own in nodes.values() for node in own]
        weight = robusts[next(iter(members))].weight
        leaves = [[f * weight(step, i) for f in flats] for i, flats in enumerate(self.flats)]
        sums = [{n: parts_of([leaf[b] for leaf in leaves], n) for n in every} for b in range(len(self.layout.buckets))]
        out = [torch.empty(b.numel) for b in self.layout.buckets]
        for robust in robusts.values():
            robust.begin(step, every)
        for place, robust in enumerate(robusts.values()):
            for b, bucket in enumerate(self.layout.buckets):
                if robust.settings.momentum:
                    robust.move(b, sums[b])
                lo, hi = bucket.slices(len(robusts))[place]
                mine = {n: part[lo:hi] for n, part in sums[b].items()}
                if hi > lo and robust.rule_of(b).needs_gram:
                    robust.keep(b, mine, lo, hi)
                elif hi > lo:
                    robust.reduce(b, mine, lo, hi, out[b][lo:hi])
        for g, group in enumerate(self.robust().groups):
            if group.rule.needs_gram:
                bodies = [robust.grams(g) for robust in robusts.values()]
                for place, robust in enumerate(robusts.values()):
                    robust.select(g, robust.total(g, bodies), members)
                    for b in group.buckets:
                        lo, hi = self.layout.buckets[b].slices(len(robusts))[place]
                        if hi > lo:
                            robust.combine(b, lo, hi, out[b][lo:hi])
        first = next(iter(robusts.values()))
        for b, bucket in enumerate(self.layout.buckets):
            lo, hi = bucket.slices(len(robusts))[-1]
            again = first.again(b, {n: part[lo:hi] for n, part in sums[b].items()}, lo, hi)
            assert hi == lo or torch.equal(again, out[b][lo:hi])
        for robust in robusts.values():
            robust.refuse_bad_rows((r.note for r in robusts.values()), members)
            robust.applied(out)
        return out

    def with_members(self, num: int, steps: int = 1) -> list[Tensor]:
        names = [f"r{i}" for i in range(num)]
        robusts = {name: self.robust() for name in names}
        for step in range(steps):
            out = self.step(plan_of(names, 0, self.leaves, self.settings.num_rows).leaves, robusts, step)
        return out


RULES: list[dict[str, Any]] = [
    {"aggregation": "trimmed_mean", "f": 1},
    {"aggregation": "median", "f": 2, "pre": "bucketing"},
    {"aggregation": "trimmed_mean", "f": 1, "pre": "nnm", "row_momentum": 0.9},
    {"aggregation": "multi_krum", "f": 1},
    {"aggregation": "geometric_median", "f": 2},
    {"aggregation": "centered_clipping", "f": 1},
    {"aggregation": {"up.*": "krum", "*": {"rule": "median", "f": 2}}, "f": 1},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule['aggregation']}")
@pytest.mark.parametrize("samples", [0, 4 * LEAVES + 15], ids=["even", "short batch"])
def test_the_bits_do_not_depend_on_the_members(rule: dict[str, Any], samples: int) -> None:
    if rule.get("pre") == "bucketing":
        rule = rule | {"f": 1}
    bench = Bench(samples=samples, **rule)
    want = bench.with_members(1, steps=3)
    for num in (2, 4, ROWS):
        assert all(torch.equal(a, b) for a, b in zip(bench.with_members(num, steps=3), want, strict=True)), num


def test_a_recovery_s_holding_pattern_gives_the_same_bits() -> None:
    bench = Bench(aggregation="trimmed_mean", f=1, pre="nnm")
    want = bench.with_members(ROWS)
    draw = random.Random(3)
    for _ in range(5):
        names = ["a", "b", "c"]
        dealt: dict[str, list[int]] = {name: [] for name in names}
        for leaf in range(LEAVES):
            dealt[draw.choice(names)].append(leaf)
        got = bench.step({n: own for n, own in dealt.items() if own}, {n: bench.robust() for n in names})
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_it_is_the_rule_on_the_means_of_the_rows() -> None:
    """Over the whole vector for distances, although it lies in several buckets."""
    bench = Bench(aggregation="geometric_median", f=2)
    got = torch.cat(bench.with_members(3))
    rows = [
        torch.cat([sum(self[b] for self in bench.flats[lo:hi]) / (hi - lo) for b in range(len(bench.layout.buckets))])
        for lo, hi in roots(LEAVES, ROWS)
    ]
    want = make_rule("geometric_median", num_rows=ROWS, f=2).aggregate(rows)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def test_rows_that_are_not_finite_are_counted_over_all_slices() -> None:
    bench = Bench(aggregation={"up*": {"rule": "median", "f": 2}, "*": "trimmed_mean"}, f=1)
    bench.flats[0][0][0] = torch.nan
    bench.with_members(ROWS)
    group = bench.robust().group_of
    other = next(b for b in range(len(group)) if group[b] == group[0] and bench.layout.buckets[b].num_blocks)
    bench.flats[5][other][-1] = torch.inf  # another row, in another member's slice
    with pytest.raises(TrainingError, match=r"rows 0, 2, computed by r0, r2"):
        bench.with_members(ROWS)


def test_one_nan_does_not_count_against_a_row_for_ever() -> None:
    """Row 0 is not finite in one step, row 3 in a later one: with f = 1 both steps are good."""
    bench = Bench(aggregation="trimmed_mean", f=1, row_momentum=0.9)
    robusts = {"r0": bench.robust()}
    everything = {"r0": list(range(LEAVES))}
    for step, leaf in enumerate((0, 6)):
        kept = bench.flats[leaf][0].clone()
        bench.flats[leaf][0][7] = torch.nan
        bench.step(everything, robusts, step)
        bench.flats[leaf][0].copy_(kept)
    assert all(torch.isfinite(flat).all() for flat in robusts["r0"].memory.committed())
    assert robusts["r0"].note.bad == ((0, 3),)


def test_distance_rules_name_the_replicas_of_bad_rows() -> None:
    bench = Bench(aggregation="krum", f=1)
    for leaf in (0, 11):
        bench.flats[leaf][0][3] = torch.nan
    with pytest.raises(TrainingError, match=r"computed by r0, r5"):
        bench.with_members(ROWS)


def test_the_replicas_of_the_first_rows_are_named_and_no_others() -> None:
    bench = Bench(aggregation="krum", f=1)
    for leaf in (0, 2):
        bench.flats[leaf][0][3] = torch.nan
    with pytest.raises(TrainingError, match=r"\(rows 0, 1, computed by r0, r1\)"):
        bench.with_members(ROWS)


def test_each_bucket_has_one_rule() -> None:
    bench = Bench(aggregation={"up.*": "median", "*": "trimmed_mean"}, f=1)
    for bucket in bench.layout.buckets:
        assert len({NAMES[index].startswith("up.") for index, _, _ in bucket.params}) == 1
    blocks = [group.blocks.num_blocks for group in bench.robust().groups]
    assert sum(blocks) == bench.layout.num_blocks
    assert max(b.numel for b in bench.layout.buckets) > BLOCK


# --- sums and shares -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("leaves", "rows"), [(8, 4), (12, 4), (13, 5), (15, 15), (7, 2)])
def test_no_sum_crosses_from_row_to_row(leaves: int, rows: int) -> None:
    bounds = roots(leaves, rows)
    for members in range(1, rows + 1):
        plan = plan_of([f"r{i}" for i in range(members)], 0, leaves, rows)
        nodes = [node for own in plan.leaves.values() for node in cover(own, leaves, rows)]
        assert all(any(lo <= a and b <= hi for lo, hi in bounds) for a, b in nodes)
        done = set(nodes) | {parent for _, _, parent in schedule(tuple(nodes), leaves, rows)}
        assert done.issuperset(bounds)
        assert leaves_of(nodes) == list(range(leaves))
    assert plan_of([f"r{i}" for i in range(rows)], 0, leaves, rows).leaves == {
        f"r{i}": tuple(range(*bound)) for i, bound in enumerate(bounds)
    }


def test_a_lost_row_goes_whole_to_who_owns_least() -> None:
    """The joiner has nothing, so it takes the dead one's row: nobody can spoil two."""
    view = ViewId(1, 2)
    held = {"r0": ((0, 2),), "new": (), "r2": ((4, 6),), "r3": ((6, 7),)}
    entries = [
        RollEntry(member=m, view=view, committed=3, held=nodes, keeps_output=False, fingerprint=0, outcome=0)
        for m, nodes in held.items()
    ]
    plan = resolve(entries, 8, 4)
    assert plan.orphans == {"r0": (), "new": (2, 3), "r2": (), "r3": (7,)}


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"aggregation": "trimmed_mean", "f": 2}, "set f <= 1"),
        ({"aggregation": "trimed_mean", "f": 1}, "did you mean 'trimmed_mean'"),
        ({"aggregation": "median"}, "f = 1 to 1 with 4 rows"),
        ({"aggregation": "krum", "f": 1}, "at most f = 0"),
        ({"aggregation": "median", "f": 1, "rows": 9}, "from 2 to 8"),
        ({"aggregation": "median", "f": 1, "pre": "nmm"}, "did you mean 'nnm'"),
        ({"f": 1}, "the aggregation is the mean"),
        ({"aggregation": {"up.*": "median"}, "f": 1}, "matches the parameter table"),
        ({"aggregation": {"*": "median", "up.*": "mean"}, "f": 1}, "matches no parameter"),
        ({"aggregation": {"*": {"rule": "median", "ff": 1}}}, "no setting 'ff'"),
        ({"aggregation": "median", "f": 1, "row_momentum": 1.0}, "up to, but not including, 1"),
        ({"aggregation": "median", "f": 1, "check_reducers": 2}, "a share from 0 to 1"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        row_settings(RunConfig(replicas=4), NAMES, 8, **given)
    assert says in str(caught.value)


def test_the_run_s_configuration_outranks_the_script() -> None:
    config = RunConfig(replicas=4, aggregation="median", f=1)
    settings = row_settings(config, NAMES, 8, aggregation="trimmed_mean", f=2)
    assert settings is not None
    assert (settings.groups[0].rule, settings.trim_count, settings.num_rows, settings.tolerated) == ("median", 1, 4, 1)
    assert row_settings(RunConfig(), NAMES, 8) is None
    with pytest.raises(ConfigError, match="tolerated = 1 or fewer"):
        row_settings(RunConfig(replicas=4, tolerated=2, aggregation="median", f=1), NAMES, 8)


@pytest.mark.parametrize(
    ("given", "least"),
    [({}, 3), ({"fault_domain": "replica"}, 0), ({"on_shortfall": "lower"}, 0), ({"tolerated": 0}, 1)],
)
def test_how_many_hosts_a_rule_needs(given: dict[str, Any], least: int) -> None:
    """Six rows on three hosts, of which one may lie: two of its rows are trimmed, and three would not be."""
    config = RunConfig(replicas=6, agents=3, **({"fault_domain": "host"} | given))
    settings = row_settings(config, NAMES, 12, aggregation="trimmed_mean", f=2)
    assert settings is not None
    assert settings.least_hosts == least
    assert settings.facts() == ({"fault_domains": str(least)} if least else {})


def test_a_row_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="too few for 6 rows"):
        Bench(samples=4 * LEAVES + 3, aggregation="median", f=1).robust()


def test_a_liar_with_several_rows_lies_about_each() -> None:
    """Four of six rows are its own: each momentum becomes minus the mean of what it knows, not minus one row's."""
    bench = Bench(aggregation="trimmed_mean", f=1, row_momentum=0.5)
    robust, draw = bench.robust(), torch.Generator().manual_seed(7)
    nodes = tuple(cover(range(2, 10), LEAVES, ROWS))
    own = [n for n, (lo, hi) in enumerate(roots(LEAVES, ROWS)) if 2 <= lo < 10]
    memory = Memory(bench.layout, len(nodes) + 1, shared=False)
    for slot in range(1, len(nodes) + 1):
        memory.flats(slot)[0].copy_(torch.randn(bench.layout.buckets[0].numel, generator=draw))
    for row in own:
        robust.memory.now[row][0].fill_(float(row))
    sums = [memory.flats(slot)[0].clone() for slot in range(1, len(nodes) + 1)]
    moved = [0.5 * float(row) + 0.5 * total / 2 for row, total in zip(own, sums, strict=True)]
    plane = SimpleNamespace(
        mesh=SimpleNamespace(me="r1"), members=("r1",), begin=lambda task: None, offer=lambda bucket: None
    )
    engine = SimpleNamespace(
        robust=robust, memory=memory, out=[memory.flats(0)[0]], weight=robust.weight,
        shards=ShardSums(), under=lambda node: range(*node),
    )  # fmt: skip
    liar = Liar([Lie(replicas=("r1",), attack="sign_flip")], plane, engine)  # type: ignore[arg-type]
    liar.begin(
        ExchangeTask(
            step=0, nodes=(nodes,), slots=tuple(range(1, len(nodes) + 1)), num_leaves=LEAVES, scale=1.0,
            with_norms=False, on_scattered=lambda: None,
        )
    )  # fmt: skip
    liar.offer(0)
    want = -torch.stack(moved).double().mean(dim=0).float()
    for slot, row in enumerate(own, 1):
        torch.testing.assert_close(0.5 * float(row) + 0.5 * memory.flats(slot)[0] / 2, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("on_shortfall", ["stop", "wait", "lower"])
def test_a_view_in_which_all_wait_for_lost_replicas_is_not_asked_about(on_shortfall: Any) -> None:
    """Two of six are left, which is too few for the rule: it stops, waits or is lowered once they are to compute."""
    settings = row_settings(RunConfig(replicas=6, on_shortfall=on_shortfall), NAMES, 12, aggregation="median", f=1)
    told = list[Any]()
    member = Member("r0.1", 12, committed=3, num_rows=6)
    port: Any = SimpleNamespace(
        member=member, lock=contextlib.nullcontext(), env=SimpleNamespace(me="r0.1"), tell_coordinator=told.extend
    )
    robust: Any = SimpleNamespace(settings=settings, num_leaves=12, num_rows=6)
    members = ("r0.1", "r1.1")
    held = View(id=ViewId(1, 2), members=members, held=True)
    admit(port, robust, held, plan_of(members, 3, 12, 6))
    assert (port.member.held_back, told) == (True, [])
    free = msgspec.structs.replace(held, held=False)
    if on_shortfall == "stop":
        with pytest.raises(TrainingError, match="not good enough for the rule"):
            admit(port, robust, free, plan_of(members, 3, 12, 6))
    else:
        admit(port, robust, free, plan_of(members, 3, 12, 6))
        assert port.member.held_back == (on_shortfall == "wait")
    assert [said.action for said in told] == [{"lower": "go"}.get(on_shortfall, on_shortfall)]
