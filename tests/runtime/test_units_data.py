"""Samples: a pure function of position, whatever the membership, the workers and the shares."""

from __future__ import annotations

import os
import random
import signal
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core.position import position_seed
from outlast.core.protocol import plan_of
from outlast.errors import ConfigError, LoopUnrepeatable
from outlast.runtime.saving.restore import check_facts
from outlast.runtime.training._sample_order import permuted
from outlast.runtime.training.random_state import seed_everything
from outlast.runtime.training.samples import Samples


class Noisy:
    """Items that depend on the random state: augmentations."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), random.random(), torch.rand(()).item()])


def samples(size: int = 50, batch: int = 12, microbatches: int = 4, **more: Any) -> Samples:
    return Samples(Noisy(size), global_batch_size=batch, microbatches=microbatches, seed=3, **more)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 40), st.booleans())
def test_every_sample_once_an_epoch(microbatches: int, per: int, extra: int, shuffle: bool) -> None:
    batch = microbatches * per
    data = samples(batch + extra, batch, microbatches, shuffle=shuffle)
    for epoch in range(2):
        steps = range(epoch * data.steps_per_epoch, (epoch + 1) * data.steps_per_epoch)
        seen = Counter(i for step in steps for leaf in range(microbatches) for i in data.indices(step, leaf))
        assert seen == Counter(range(batch + extra))
    for step in range(data.steps_per_epoch):
        sizes = data.sizes(step)
        assert [len(data.indices(step, leaf)) for leaf in range(microbatches)] == sizes
        assert max(sizes) - min(sizes) <= 1


def test_a_last_batch_smaller_than_the_microbatches_leaves_some_empty() -> None:
    data = samples(14, 12, 4)
    assert data.steps_per_epoch == 2
    assert data.sizes(1) == [1, 1, 0, 0]
    assert data.indices(1, 3) == []
    assert samples(14, 12, 4, drop_last=True).steps_per_epoch == 1


def test_epochs_are_shuffled_differently_and_by_the_seed_alone() -> None:
    data, same = samples(), samples()
    first = [data.indices(step, 0) for step in range(data.steps_per_epoch)]
    second = [data.indices(step + data.steps_per_epoch, 0) for step in range(data.steps_per_epoch)]
    assert first != second
    assert [same.indices(step, 0) for step in range(data.steps_per_epoch)] == first
    plain = samples(shuffle=False)
    assert plain.indices(0, 1) == [3, 4, 5]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 10**6))
def test_what_is_fetched_does_not_depend_on_who_fetches(memberships: list[int], noise: int) -> None:
    alone = samples()
    for step, count in enumerate(memberships):
        seed_everything(noise)
        want = {leaf: alone.fetch(step, leaf) for leaf in range(4) if alone.sizes(step)[leaf]}
        plan = plan_of([f"r{i}.1" for i in range(count)], step, 4)
        for leaves in plan.leaves.values():
            mine = samples()
            for leaf in want.keys() & set(leaves):
                seed_everything(noise + 1)
                assert torch.equal(mine.fetch(step, leaf), want[leaf])


def test_workers_give_the_same_also_after_the_share_changes() -> None:
    plain, working = samples(), samples(num_workers=1)
    working.expect(lambda step: [0, 1], 0)
    for leaf in (0, 1, 3):  # 3: an orphan that nobody foresaw
        assert torch.equal(working.fetch(0, leaf), plain.fetch(0, leaf))
    working.expect(lambda step: [1, 2, 3], 1)
    for step in (1, 2, 3, 4):  # 4: the short last batch
        for leaf in [leaf for leaf in (1, 2, 3) if plain.sizes(step)[leaf]]:
            assert torch.equal(working.fetch(step, leaf), plain.fetch(step, leaf))
    working.expect(lambda step: [0], 3)  # back, as after an abandoned step
    assert torch.equal(working.fetch(3, 0), plain.fetch(3, 0))


def test_workers_without_a_share_keep_nobody_waiting_and_begin_with_the_next_one() -> None:
    """Looking ahead for work that never comes held the loop for ever."""
    plain, working = samples(), samples(num_workers=1)
    assert torch.equal(working.fetch(0, 1), plain.fetch(0, 1))  # nothing was expected yet
    working.expect(lambda step: [], 1)
    assert torch.equal(working.fetch(1, 2), plain.fetch(1, 2))  # an orphan
    working.expect(lambda step: [0, 3], 2)
    assert torch.equal(working.fetch(2, 0), plain.fetch(2, 0))
    assert working._issued, "the workers have been told of the share"


class Huge(Noisy):
    """More than could be listed."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_the_order_of_a_billion_samples_needs_no_list_of_them() -> None:
    """The seventh epoch of 2^30 + 7: each of its last ones comes at one place, which the same function finds."""
    size = (1 << 30) + 7
    tracemalloc.start()
    data = Samples(Huge(size), global_batch_size=8, microbatches=4, seed=3)
    assert data.steps_per_epoch == -(-size // 8)
    steps = [7 * data.steps_per_epoch + step for step in (0, 1, 600, data.steps_per_epoch - 1)]
    found = [[data.indices(step, leaf) for leaf in range(4)] for step in steps]
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    flat = [index for step in found for leaf in step for index in leaf]
    assert len(set(flat)) == len(flat) == 24 + 7
    assert all(0 <= index < size for index in flat)
    assert data.sizes(steps[-1]) == [2, 2, 2, 1]
    again = Samples(Huge(size), global_batch_size=8, microbatches=4, seed=3)
    assert [again.indices(steps[2], leaf) for leaf in range(4)] == found[2]
    plain = Samples(Huge(size), global_batch_size=8, microbatches=4, seed=3, shuffle=False)
    assert plain.indices(steps[0] + 1, 1) == [10, 11]
    assert data.order == "keyed"
    assert plain.order == samples().order == "listed"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 100, 1023, 1024, 1025, 70_000])
def test_the_keyed_order_is_a_permutation(size: int) -> None:
    for key in (0, 1, (1 << 63) - 1):
        assert sorted(permuted(range(size), size, key)) == list(range(size))


def test_the_keyed_order_is_the_same_everywhere_and_for_ever() -> None:
    """Checkpoints rely on it: these numbers may not change."""
    assert permuted(range(4), 10**9, 1) == [707413178, 367699649, 302691582, 458720907]
    assert permuted([0, 1, 10**18 - 1], 10**18, position_seed(3, 0)) == [
        20163411005924996,
        698151540804231258,
        492362718652451928,
    ]


@pytest.mark.parametrize("size", [10, 300, 5000])
def test_the_keyed_order_prefers_no_index_at_any_place(size: int) -> None:
    """Chi-square of (place, index) over many keys, both in ten classes: 81 degrees of freedom, 5.5 deviations."""
    counts = [[0] * 10 for _ in range(10)]
    places = [size // 10 * i for i in range(10)]
    for key in range(400):
        for place, index in enumerate(permuted(places, size, position_seed(5, key))):
            counts[place][index * 10 // size] += 1
    assert sum((count - 40) ** 2 / 40 for row in counts for count in row) < 81 + 5.5 * 162**0.5


def test_neighbours_in_the_keyed_order_have_nothing_in_common() -> None:
    size, places = 10**9, 20_000
    order = torch.tensor(permuted(range(places), size, 7), dtype=torch.float64) / size
    for lag in (1, 2, 8, 64, 4096):
        assert abs(float(torch.corrcoef(torch.stack([order[:-lag], order[lag:]]))[0, 1])) < 5 / (places - lag) ** 0.5
    assert abs(float(order.mean()) - 0.5) < 5 * (1 / 12 / places) ** 0.5


def test_a_checkpoint_in_another_order_is_refused() -> None:
    """Those of before have no word on it, and were listed."""
    mine = {"samples": "5000000", "order": "keyed"}
    with pytest.raises(ConfigError, match="order: listed there, keyed here"):
        check_facts({"samples": "5000000"}, mine, bitwise=True)
    assert check_facts({"samples": "5000000"}, mine | {"order": "listed"}, bitwise=True) == ""
    assert check_facts(mine, mine, bitwise=True) == ""


def test_position_seeds_differ() -> None:
    seeds = {position_seed(s, step, leaf) for s in range(5) for step in range(50) for leaf in range(8)}
    assert len(seeds) == 5 * 50 * 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"size": 11}, "the dataset has 11 samples, one global batch takes 12", "at most 11"),
        ({"batch": 13}, "not a multiple", "global_batch_size=16"),
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, Any], reason: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        samples(**change)
    assert reason in caught.value.message
    assert remedy in caught.value.remedy


def test_what_gives_no_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="list_iterator is no dataset"):
        Samples(iter([1, 2]), global_batch_size=2, microbatches=1, seed=0)


@pytest.mark.parametrize("kind", ["function", "weighted", "random with a generator", "list"])
def test_a_sampler_of_one_s_own_is_the_same_for_whoever_asks(kind: str) -> None:
    def make() -> Samples:
        sampler: Any = {
            "function": lambda epoch: [(7 * i + epoch) % 50 for i in range(45)],
            "weighted": torch.utils.data.WeightedRandomSampler([1.0 + i % 3 for i in range(50)], 45),
            "random with a generator": torch.utils.data.RandomSampler(range(50), generator=torch.Generator()),
            "list": list(range(49, 4, -1)),
        }[kind]
        return samples(sampler=sampler)

    one, late = make(), make()
    steps = range(3 * one.steps_per_epoch)
    found = [[one.indices(step, leaf) for leaf in range(4)] for step in steps]
    torch.manual_seed(8)
    assert [late.indices(steps[-1], leaf) for leaf in range(4)] == found[-1]  # nothing of the epochs before was asked
    assert [late.indices(1, leaf) for leaf in range(4)] == found[1]
    assert one.steps_per_epoch == (5 if kind.startswith("random") else 4)
    epochs = [found[i : i + one.steps_per_epoch] for i in (0, one.steps_per_epoch)]
    assert (epochs[0] == epochs[1]) == (kind == "list")
    assert one.order == "sampler"


def test_a_sampler_that_is_asked_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    samples(sampler=torch.utils.data.RandomSampler(range(50))).indices(9, 0)
    assert torch.equal(torch.rand(2), want)


@pytest.mark.parametrize(
    ("sampler", "reason", "remedy"),
    [
        (iter([1, 2]), "read once only", "lambda epoch"),
        (torch.utils.data.BatchSampler(range(50), 4, False), "the sampler gives a list", "batches of them are made"),
        (torch.utils.data.DistributedSampler(range(50), 2, 0), "for 2 processes", "leave it out"),
        ([0, 60] * 20, "60, of 50 samples", "one number"),
        ([1, 2], "the sampler gives 2 samples, one global batch takes 12", "at most 2"),
        ([], "gives no index", "one global batch"),
        (3, "the sampler is a int", "a function of the epoch"),
    ],
)
def test_a_sampler_that_cannot_work_is_refused(sampler: Any, reason: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        samples(sampler=sampler)
    assert reason in caught.value.message
    assert remedy in caught.value.remedy


def test_a_sampler_that_gives_another_number_of_samples_later_is_told() -> None:
    data = samples(sampler=lambda epoch: list(range(40 + epoch)))
    with pytest.raises(LoopUnrepeatable, match="41 indices in epoch 1, and 40 in epoch 0"):
        data.indices(data.steps_per_epoch, 0)


class Unreliable(Noisy):
    """One sample cannot be read at first, as where a network file system has a bad moment; another one never can."""

    def __init__(self, size: int, *, never: bool) -> None:
        super().__init__(size)
        self.never, self.tries = never, 0

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            self.tries += 1
            if self.never or self.tries == 1:
                raise OSError("stale file handle")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_tried_again_and_then_named(capfd: pytest.CaptureFixture[str]) -> None:
    given: Any = {"global_batch_size": 10, "microbatches": 1, "seed": 3, "shuffle": False}
    once = Samples(Unreliable(10, never=False), **given)
    assert torch.equal(once.fetch(0, 0), Samples(Noisy(10), **given).fetch(0, 0))
    assert "sample 7 could not be read and is tried again: stale file handle" in capfd.readouterr().err
    with pytest.raises(OSError, match="stale") as caught:
        Samples(Unreliable(10, never=True), **given).fetch(0, 0)
    assert caught.value.__notes__ == ["outlast: this was sample 7 of the dataset, read twice"]


class Deadly(Noisy):
    """A worker that is asked for this sample dies, the first time."""

    def __init__(self, size: int, mark: Path) -> None:
        super().__init__(size)
        self.mark = mark

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 30 and torch.utils.data.get_worker_info() is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.process
@pytest.mark.campaign
def test_a_worker_that_dies_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given: Any = {"global_batch_size": 12, "microbatches": 4, "seed": 3}
    working, plain = Samples(Deadly(50, tmp_path / "died"), num_workers=1, **given), Samples(Noisy(50), **given)
    working.expect(lambda step: [0, 1, 2, 3], 0)
    for step in range(4):
        for leaf in range(4):
            assert torch.equal(working.fetch(step, leaf), plain.fetch(step, leaf))
    assert (tmp_path / "died").exists()
    assert "all workers are replaced (1 of 16 times)" in capfd.readouterr().err
