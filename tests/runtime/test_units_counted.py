"""Samples counted over 10,000 committed steps, for each kind of source, while replicas die, join and begin anew.

The sources are the real ones, each replica's its own; who computes what, who dies when and who comes is drawn here.
Whole fleets of processes do the same over fewer steps (`test_prepared.py`, `test_bad_samples.py`, `test_ranks.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.sources import LOOSE, SOURCES
from torch.utils.data import DataLoader, IterableDataset

from outlast.errors import LoopUnrepeatable
from outlast.runtime.training.samples import Samples
from outlast.runtime.training.streams import StreamSamples

SIZE, BATCH, LEAVES, STEPS = 22, 6, 3, 10_000
BAD = (4, 9)
FAULTS = 0.1  # of the steps


class Numbers:
    """Each sample is its own number; two may not be readable."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        if index in self._bad:
            raise ValueError(f"sample {index} is cut short")
        return index


class Stream(IterableDataset[int]):
    """The same in an order that is drawn anew in each pass."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


def drawn(epoch: int) -> list[int]:
    """Some of them twice and some never, by the epoch alone."""
    return random.Random(epoch).choices(range(SIZE), k=20)


GIVEN: dict[str, Any] = {"global_batch_size": BATCH, "microbatches": LEAVES, "seed": 5}
KINDS: dict[str, Callable[[], Samples]] = {
    "numbered": lambda: Samples(Numbers(), **GIVEN),
    "in their order, whole batches": lambda: Samples(Numbers(), shuffle=False, drop_last=True, **GIVEN),
    "a sampler": lambda: Samples(Numbers(), sampler=drawn, **GIVEN),
    "some unreadable": lambda: Samples(Numbers(BAD), bad_samples=len(BAD), **GIVEN),
    "a stream": lambda: StreamSamples(Stream(), **GIVEN),
    "a loader of a stream": lambda: StreamSamples(DataLoader(Stream(), batch_size=BATCH // LEAVES), **GIVEN),
}


def numbers(batch: Any) -> list[int]:
    found: list[int] = (batch["n"] if isinstance(batch, dict) else batch).tolist()
    return found


class Crew:
    """Replicas' sources in step with each other. `lost`: samples that a replica had fetched and that died with it."""

    def __init__(self, make: Callable[[], Samples], seed: int) -> None:
        self.make, self.draw = make, random.Random(seed)
        self.replicas, self.lost, self.begun_anew = [self.make() for _ in range(3)], 0, 0

    def step(self, step: int) -> list[int]:
        """The samples of the step that is committed, leaf by leaf."""
        rows: dict[int, list[int]] = {}
        shares = {leaf: self.draw.choice(self.replicas) for leaf in range(LEAVES)}
        victim = self.draw.choice(self.replicas) if self.draw.random() < FAULTS and len(self.replicas) > 1 else None
        for leaf, replica in shares.items():
            if replica.sizes(step)[leaf]:
                rows[leaf] = numbers(replica.fetch(step, leaf))
        if victim is not None:  # before the commit: its leaves are orphans
            self.replicas.remove(victim)
            orphans = [leaf for leaf in rows if shares[leaf] is victim]
            for leaf in orphans:
                self.lost += len(rows[leaf])
                again = numbers(self.draw.choice(self.replicas).fetch(step, leaf))
                assert again == rows[leaf]
        self._commit(step)
        return [sample for leaf in sorted(rows) for sample in rows[leaf]]

    def _commit(self, step: int) -> None:
        place = self.replicas[0].place_of(step)
        bad = sorted({row for r in self.replicas for row in r.bad.told(range(LEAVES))})
        for replica in self.replicas:
            replica.applied(step, place)
            replica.bad.applied(bad)
        if self.draw.random() < FAULTS:
            if self.draw.random() < 0.5 and len(self.replicas) < 4:
                self.replicas.append(self._from(self.replicas[0]))
            elif self.draw.random() < 0.5:  # all are gone, and the run goes on from what was saved
                self.replicas, self.begun_anew = [self._from(self.replicas[0])], self.begun_anew + 1

    def _from(self, donor: Samples) -> Samples:
        """As a joiner, or a run that resumes: a new source, with what of the old one is part of the state."""
        fresh = self.make()
        for name, part in donor.parts().items():
            fresh.parts()[name].load_state_dict(part.state_dict())
        fresh.take_up()
        return fresh


def counted(make: Callable[[], Samples], seed: int) -> dict[int, list[int]]:
    """The samples of each epoch that is over."""
    crew, epochs = Crew(make, seed), dict[int, list[int]]()
    for step in range(STEPS):
        epoch = crew.replicas[0].epoch_of(step)
        epochs.setdefault(epoch, []).extend(crew.step(step))
    assert crew.lost > 500
    assert crew.begun_anew > 50
    epochs.popitem()  # perhaps not over
    assert len(epochs) > STEPS / 5
    return epochs


@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_twice_and_none_left_out(kind: str) -> None:
    epochs = counted(KINDS[kind], len(kind))
    for epoch, samples in epochs.items():
        seen = Counter(samples)
        if kind == "a sampler":
            assert seen == Counter(drawn(epoch)), f"epoch {epoch}"
        elif kind == "some unreadable":  # others stand in for them, from the same epoch
            assert sum(seen.values()) == SIZE, f"epoch {epoch}"
            assert seen.keys() == set(range(SIZE)) - set(BAD), f"epoch {epoch}"
        else:
            dropped = SIZE % BATCH if "whole batches" in kind else 0
            assert seen == Counter(range(SIZE - dropped)), f"epoch {epoch}"


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", SOURCES)
def test_nor_of_a_library_s_source(kind: str, tmp_path: Path) -> None:
    def make() -> Samples:
        source = SOURCES[kind](SIZE, tmp_path)
        return (Samples if "numbers" in kind else StreamSamples)(source, **GIVEN)

    for epoch, samples in counted(make, len(kind)).items():
        assert Counter(samples) == Counter(range(SIZE)), f"epoch {epoch}"


def test_an_order_of_the_clock_is_named(tmp_path: Path) -> None:
    stream = StreamSamples(LOOSE(SIZE, tmp_path), **GIVEN)
    stream.doubted = True
    with pytest.raises(LoopUnrepeatable, match="does not begin the same when it is read twice"):
        stream.fetch(0, 0)
