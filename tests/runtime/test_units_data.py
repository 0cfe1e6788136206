"""Samples: a pure function of position, whatever the membership, the workers and the shares."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core.protocol import plan_of
from outlast.errors import ConfigError
from outlast.runtime._data import Samples, position_seed, seed_everything


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


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=25, deadline=None)
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


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a map-style dataset"):
        Samples(iter([1, 2]), global_batch_size=2, microbatches=1, seed=0)
