"""Data as a pure function: (seed, step, microbatch) -> samples. The sampler's state is the step number.

Global batch and order never depend on membership. With workers, torch's DataLoader prefetches the microbatches that
this replica is expected to own; what it did not foresee (orphans) is loaded in the process. Either way the random
generators are seeded by position before a sample is fetched, so augmentations are reproducible too.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.data import default_collate

from outlast.core.data_events import Trouble
from outlast.core.position import position_seed
from outlast.errors import ConfigError, LoopUnrepeatable, TrainingError
from outlast.runtime.training._bad_samples import BAD, BadSamples
from outlast.runtime.training._given_order import GivenOrder
from outlast.runtime.training._kept_draws import after_another_seed, drawn
from outlast.runtime.training._sample_order import SampleOrder
from outlast.runtime.training._sample_reader import Key, ReadingRows, SampleReader, Unread
from outlast.runtime.training._workers import LostWorker, Workers
from outlast.runtime.training.arguments import check_dataset

__all__ = ["DataNews", "Samples", "batch_digest", "skipped", "unlike_samples"]


_REPLACED = 16  # times that workers which were lost are replaced: more is no accident
_EMPTY = 1000  # steps in a row without a share of this replica's, after which none is foreseen
_TWICE = 2  # times that workers are lost at one sample before it is the sample
_STAND_INS = 1000  # places looked at for one that can stand in


@dataclass(frozen=True, kw_only=True)
class DataNews:
    """What went wrong with the data, and was mended. `samples`: which; `microbatch`: that was waited for, or -1."""

    what: Trouble
    step: int
    text: str
    microbatch: int = -1
    samples: tuple[int, ...] = ()
    total: int = 0
    allowed: int = 0


def skipped(step: int, rows: Sequence[tuple[int, str]], bad: BadSamples) -> DataNews:
    """What is told of samples that nobody reads any more from this step on."""
    few = "; ".join(f"sample {sample} cannot be read ({text})" for sample, text in rows[:3])
    more = f"; and {len(rows) - 3} more" if len(rows) > 3 else ""
    return DataNews(
        what="skipped", step=step, text=few + more, samples=tuple(sample for sample, _ in rows), total=len(bad.known),
        allowed=bad.allowed,
    )  # fmt: skip


class Samples:
    """The run's data. ConfigError if the dataset cannot fill one global batch."""

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        microbatches: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        sampler: Any = None,
        bad_samples: int = 0,
    ) -> None:
        check_dataset(dataset)
        self._given = GivenOrder(sampler, len(dataset), seed) if sampler is not None else None
        num_samples = self._given.num if self._given is not None else len(dataset)
        if global_batch_size % microbatches:
            raise ConfigError(
                f"global_batch_size {global_batch_size} is not a multiple of microbatches {microbatches}",
                remedy=f"for example global_batch_size={-(-global_batch_size // microbatches) * microbatches}",
            )
        if num_samples < global_batch_size:
            what = "dataset has" if self._given is None else "sampler gives"
            raise ConfigError(
                f"the {what} {num_samples} samples, one global batch takes {global_batch_size}",
                remedy=f"give more samples, or global_batch_size of at most {num_samples}",
            )
        self.num_samples, self.batch, self.num_leaves = num_samples, global_batch_size, microbatches
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        whole, rest = divmod(self.num_samples, global_batch_size)
        self.steps_per_epoch = whole + (1 if rest and not drop_last else 0)
        rows, self.bad = ReadingRows(num_workers), BadSamples(bad_samples)
        self._reader = SampleReader(dataset, collate_fn or default_collate, rows, tolerant=bad_samples > 0)
        self.workers = Workers(num_workers, self._reader, rows, self.upcoming)
        self._order = SampleOrder(self.num_samples, shuffle)
        self._share: Callable[[int], list[int]] = lambda step: []
        self._next_key: tuple[int, int] = (0, 0)
        self._issued: deque[tuple[int, int, Key]] = deque()
        self._idle = False  # `upcoming` has ended
        self._left_out: frozenset[int] = frozenset()
        self._sizes: tuple[int, list[int]] = (-1, [])  # of the step that was asked for last
        self.never_empty = False  # where all samples of a microbatch are left out, as many others take their place
        self.whole = False  # all microbatches are of one size: another sample takes the place of each that is left out
        self.doubted = False  # fetch what the first step takes twice, and compare
        self._first = -1
        self._replaced = 0
        self.tell: Callable[[DataNews], object] = lambda news: None  # the coordinator, if there is one

    # --- the pure part -------------------------------------------------------------------------------------------
    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """What makes a batch of samples."""
        return self._reader.collate

    @property
    def order(self) -> str:
        """How the samples of an epoch are put in order."""
        return self._order.name if self._given is None else self._given.name

    known_length = True
    """Whether steps_per_epoch says something."""

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to."""
        return step // self.steps_per_epoch

    def place_of(self, step: int) -> tuple[int, ...]:
        """What the step's outcome has to say of the data, for who joins: nothing, the step's number says it."""
        return ()

    def applied(self, step: int, place: tuple[int, ...]) -> None:
        """The step was applied here."""

    def parts(self) -> dict[str, Any]:
        """What of the data is part of the training state, by name."""
        return {BAD: self.bad} if self.bad.allowed else {}

    def take_up(self) -> None:
        """The state was loaded."""

    def sizes(self, step: int) -> list[int]:
        """Samples in each microbatch of the step; the last batch of an epoch may be short."""
        if self._sizes[0] != step:
            sizes = self._cut(step)
            if self._left_out and not self.whole:
                sizes = [len(self._kept(step, leaf, sizes)) for leaf in range(self.num_leaves)]
            self._sizes = step, sizes
        return self._sizes[1]

    def _cut(self, step: int) -> list[int]:
        """How many samples each microbatch has before any is left out."""
        size = min(self.batch, self.num_samples - (step % self.steps_per_epoch) * self.batch)
        small, larger = divmod(size, self.num_leaves)
        return [small + (leaf < larger) for leaf in range(self.num_leaves)]

    def shortest(self) -> list[int]:
        """Samples in each microbatch of the shortest batch that there can be."""
        return self.sizes(self.steps_per_epoch - 1)

    def indices(self, step: int, leaf: int) -> list[int]:
        """The microbatch's sample indices: without those that are left out, with others for those known to be bad. The
        same on every replica."""
        return self._with_stand_ins(step, leaf, self.bad.known.keys())

    def read_here(self, step: int, leaf: int) -> list[int]:
        """As `indices`, with others also for samples that were found to be bad in this step, by this replica."""
        return self._with_stand_ins(step, leaf, self.bad.here())

    def _with_stand_ins(self, step: int, leaf: int, bad: Collection[int]) -> list[int]:
        found = self._kept(step, leaf, self._cut(step))
        if not found and self.never_empty:
            return [self._stand_in(step, leaf, place, bad) for place in range(self.batch // self.num_leaves)]
        bad = {*bad, *self._left_out} if self.whole else bad
        if not bad or not any(index in bad for index in found):
            return found
        return [i if i not in bad else self._stand_in(step, leaf, place, bad) for place, i in enumerate(found)]

    def _stand_in(self, step: int, leaf: int, place: int, bad: Collection[int]) -> int:
        """A sample of the same epoch, by position and by what is bad alone."""
        epoch = step // self.steps_per_epoch
        for attempt in range(_STAND_INS):
            at = position_seed(self.seed, step, leaf, place, attempt, 0xBAD) % self.num_samples
            index = self._at(epoch, at, 1)[0]
            if index not in bad and index not in self._left_out:
                return index
        raise TrainingError(
            f"no sample was found that could stand in for one that cannot be read: {len(bad)} of {self.num_samples} "
            "cannot",
            did="nothing more was trained",
            remedy="look at the dataset",
        )

    def _at(self, epoch: int, start: int, count: int) -> list[int]:
        if self._given is not None:
            return self._given.indices(epoch, start, count)
        return self._order.indices(position_seed(self.seed, epoch, 0x5EED), start, count)

    def _kept(self, step: int, leaf: int, sizes: list[int]) -> list[int]:
        epoch, place = divmod(step, self.steps_per_epoch)
        found = self._at(epoch, place * self.batch + sum(sizes[:leaf]), sizes[leaf])
        return [i for i in found if i not in self._left_out] if self._left_out and not self.whole else found

    def leave_out(self, samples: Iterable[int]) -> None:
        """From the next step on these samples are in no microbatch; the others stay where they are. With `whole` the
        places of these are taken by others."""
        left_out = frozenset(samples)
        if left_out != self._left_out:
            self._left_out, self._sizes = left_out, (-1, [])
            self._again_from(self._next_key[0], 0)  # what was fetched ahead may hold them

    # --- fetching ------------------------------------------------------------------------------------------------
    def expect(self, share: Callable[[int], list[int]], from_step: int) -> None:
        """Which microbatches this replica will own from here on, for prefetching."""
        self._share, self._next_key = share, (from_step, 0)
        if self._idle:  # workers have been told that nothing more comes
            self._again_from(from_step, 0)

    def fetch(self, step: int, leaf: int) -> Any:
        """The microbatch, collated. Raises LoopUnrepeatable if samples depend on more than their index and the random
        state: the first step's are fetched again in this process."""
        batch = self._fetch(step, leaf)
        if self.doubted and self._first in (-1, step):
            begins, self._first = self._first == -1, step
            moved = [] if self.workers.num else [drawn()]
            again = []
            for _ in range(1 + bool(self.workers.num)):  # a worker has a copy
                again.append(self._here(step, leaf))
                moved.append(drawn())
            if len({batch_digest(found) for found in (batch, *again)}) > 1:
                raise unlike_samples(step, leaf, self.indices(step, leaf), "when they are fetched twice")
            if begins and len(set(moved)) > 1:
                self._look_for_kept(*((step, leaf + 1) if leaf + 1 < self.num_leaves else (step + 1, 0)))
        return batch

    def _look_for_kept(self, step: int, leaf: int) -> None:
        """The dataset drew less when it was asked again. Raises LoopUnrepeatable if samples nobody has read yet depend
        on what they were first read for."""
        key = self._key(step, leaf)
        other = position_seed(self.seed, step, leaf, 3), key[1]
        if len({batch_digest(found) for found in after_another_seed(self._reader, key, other)}) > 1:
            raise unlike_samples(step, leaf, key[1], "where they were fetched for another step before")

    def first(self) -> int:
        """A fingerprint of the samples of the run's first microbatch, read in this process whoever owns it; 0 if one
        cannot be read."""
        found = self._reader[self._key(0, 0)]
        return 0 if isinstance(found, Unread) else batch_digest(found)

    def fetch_otherwise(self, step: int, leaf: int) -> None:
        """The same samples at another place in the order, forgotten: what a dataset remembers of them is another."""
        self._reader[position_seed(self.seed, step, leaf, 3), self.read_here(step, leaf)]

    def _fetch(self, step: int, leaf: int) -> Any:
        while self.workers.num:
            self.workers.begin()
            if not any((step, leaf) == issued[:2] for issued in self._issued):
                break
            found = self.workers.take()
            if isinstance(found, LostWorker):
                self._lost(found, step, leaf)
                continue
            *place, key = self._issued.popleft()
            if place == [step, leaf]:
                if isinstance(found, Unread):
                    self.bad.meet(leaf, found)
                elif not self.bad.allowed or key == self._key(step, leaf):  # what is bad may have been found out since
                    return found
                break
        return self._here(step, leaf)

    def _here(self, step: int, leaf: int) -> Any:
        """The microbatch, read in this process: from its beginning again for each sample that cannot be."""
        while isinstance(found := self._reader[self._key(step, leaf)], Unread):
            self.bad.meet(leaf, found)
        self.bad.read()
        return found

    def _lost(self, lost: LostWorker, step: int, leaf: int) -> None:
        """Workers are gone: new ones go on with this microbatch. Raises TrainingError where it has come too often, or
        twice at one sample that may not be skipped."""
        known = (lost.sample,) if lost.sample >= 0 else ()
        self.tell(DataNews(what=lost.what, step=step, microbatch=leaf, text=lost.text, samples=known))
        self._replaced += lost.what != "leaked"
        times = f" ({self._replaced} of {_REPLACED} times)" if lost.what != "leaked" else ""
        print(f"outlast: {lost.text}; all workers are replaced{times}", file=sys.stderr, flush=True)
        if self._replaced > _REPLACED:
            raise TrainingError(
                f"data workers were lost {self._replaced} times, the last time so: {lost.text}",
                did="this replica ends",
                remedy="read the samples in a process of their own to see why; fewer workers take less memory",
            )
        for sample in known:
            count = self.workers.lost_at[sample] = self.workers.lost_at.get(sample, 0) + 1
            if count >= _TWICE:
                self.bad.meet(leaf, Unread(sample=sample, text=f"the worker that read it {lost.what}, {count} times"))
        self._again_from(step, self._share(step).index(leaf) if leaf in self._share(step) else 0)

    def _again_from(self, step: int, place: int) -> None:
        """Whatever workers have fetched is forgotten; new ones begin with this part of the step's share."""
        self.workers.drop()
        self._next_key = (step, place)
        self._issued.clear()
        self._idle = False

    def _key(self, step: int, leaf: int) -> Key:
        return position_seed(self.seed, step, leaf, 1), self.read_here(step, leaf)

    def watch(self, outside_s: float) -> None:
        """The agent takes a loop for hung that is silent for so long: workers are judged well before."""
        self.workers.longest_s = outside_s / 4  # twice at one sample, and time to begin anew

    def upcoming(self) -> Iterator[tuple[int, list[int]]]:
        """Keys in the order in which they will be asked for, as far as foreseen; endless, unless this replica has no
        share of the steps to come."""
        empty = 0
        while empty < _EMPTY:
            step, place = self._next_key
            leaves = self._share(step)
            empty = 0 if leaves else empty + 1
            if place >= len(leaves):
                self._next_key = (step + 1, 0)
                continue
            self._next_key = (step, place + 1)
            if self.sizes(step)[leaves[place]]:
                key = self._key(step, leaves[place])
                self._issued.append((step, leaves[place], key))
                yield key
        self._idle = True


def batch_digest(batch: Any) -> int:
    """A 64-bit digest of the tensors, numbers and words in a batch, at whatever depth."""
    state = xxhash.xxh3_64()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
            state.update(f"{value.dtype}{tuple(value.shape)}".encode())
            state.update(value.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                state.update(str(key).encode())
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
            state.update(repr(value).encode())
        elif hasattr(value, "tobytes"):  # numpy's
            state.update(value.tobytes())

    walk(batch)
    return state.intdigest()


def unlike_samples(step: int, leaf: int, indices: Sequence[int], how: str) -> LoopUnrepeatable:
    """The error for samples that are not a function of their index."""
    few = ", ".join(map(str, indices[:4])) + (", …" if len(indices) > 4 else "")
    return LoopUnrepeatable(
        f"the samples of microbatch {leaf} of step {step} (indices {few}) are not the same {how}",
        did="nothing was trained with them",
        remedy="draw random numbers from torch, numpy.random or random, which are seeded by position, not from a "
        "generator of the dataset's own, and keep nothing that was drawn (no cache of augmented samples); or allow "
        "it with bitwise = false",
    )
