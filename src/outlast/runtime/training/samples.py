"""Data as a pure function: (seed, step, microbatch) -> samples. The sampler's state is the step number.

Global batch and order never depend on membership. With workers, torch's DataLoader prefetches the microbatches that
this replica is expected to own; what it did not foresee (orphans) is loaded in the process. Either way the random
generators are seeded by position before a sample is fetched, so augmentations are reproducible too.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, default_collate

from outlast.core.position import position_seed
from outlast.errors import ConfigError, LoopUnrepeatable
from outlast.runtime.training._given_order import GivenOrder
from outlast.runtime.training._sample_order import SampleOrder
from outlast.runtime.training.arguments import check_dataset
from outlast.runtime.training.random_state import seed_everything

__all__ = ["Samples", "batch_digest", "unlike_samples"]


_REPLACED = 16  # times that workers which died are replaced: more is no accident


class _Keyed(Dataset[Any]):
    """Fetches whole microbatches: a key is (seed, sample indices)."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        seed_everything(key[0])
        return self.collate([self._sample(index) for index in key[1]])

    def _sample(self, index: int) -> Any:
        """What fails on the way to a disk or a store is asked for once more; what fails again is named."""
        try:
            return self.dataset[index]
        except OSError as error:
            print(f"outlast: sample {index} could not be read and is tried again: {error}", file=sys.stderr, flush=True)
        except Exception as error:
            error.add_note(f"outlast: this was sample {index} of the dataset")
            raise
        try:
            return self.dataset[index]
        except OSError as error:
            error.add_note(f"outlast: this was sample {index} of the dataset, read twice")
            raise


def _worker_dies_with_parent(_: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


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
        self._keyed = _Keyed(dataset, collate_fn or default_collate)
        self._workers = num_workers
        self._order = SampleOrder(self.num_samples, shuffle)
        self._share: Callable[[int], list[int]] = lambda step: []
        self._next_key: tuple[int, int] = (0, 0)
        self._issued: deque[tuple[int, int]] = deque()
        self._loader: Iterator[Any] | None = None
        self._left_out: frozenset[int] = frozenset()
        self.doubted = False  # fetch what the first step takes twice, and compare
        self._first = -1
        self._replaced = 0

    # --- the pure part -------------------------------------------------------------------------------------------
    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """What makes a batch of samples."""
        return self._keyed.collate

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
        return {}

    def take_up(self) -> None:
        """The state was loaded."""

    def sizes(self, step: int) -> list[int]:
        """Samples in each microbatch of the step; the last batch of an epoch may be short."""
        start = (step % self.steps_per_epoch) * self.batch
        size = min(self.batch, self.num_samples - start)
        small, larger = divmod(size, self.num_leaves)
        sizes = [small + (leaf < larger) for leaf in range(self.num_leaves)]
        if self._left_out:
            return [len(self._kept(step, leaf, sizes)) for leaf in range(self.num_leaves)]
        return sizes

    def shortest(self) -> list[int]:
        """Samples in each microbatch of the shortest batch that there can be."""
        return self.sizes(self.steps_per_epoch - 1)

    def indices(self, step: int, leaf: int) -> list[int]:
        """The microbatch's sample indices, without those that are left out."""
        start = (step % self.steps_per_epoch) * self.batch
        small, larger = divmod(min(self.batch, self.num_samples - start), self.num_leaves)
        return self._kept(step, leaf, [small + (i < larger) for i in range(self.num_leaves)])

    def _kept(self, step: int, leaf: int, sizes: list[int]) -> list[int]:
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.batch + sum(sizes[:leaf])
        if self._given is not None:
            found = self._given.indices(epoch, start, sizes[leaf])
        else:
            found = self._order.indices(position_seed(self.seed, epoch, 0x5EED), start, sizes[leaf])
        return [index for index in found if index not in self._left_out] if self._left_out else found

    def leave_out(self, samples: Iterable[int]) -> None:
        """From the next step on these samples are in no microbatch; the others stay where they are."""
        left_out = frozenset(samples)
        if left_out != self._left_out:
            self._left_out = left_out
            self._loader, self._next_key = None, (self._next_key[0], 0)  # what was fetched ahead may hold them
            self._issued.clear()

    # --- fetching ------------------------------------------------------------------------------------------------
    def expect(self, share: Callable[[int], list[int]], from_step: int) -> None:
        """Which microbatches this replica will own from here on, for prefetching."""
        self._share, self._next_key = share, (from_step, 0)

    def fetch(self, step: int, leaf: int) -> Any:
        """The microbatch, collated. Raises LoopUnrepeatable if samples depend on more than their index and the random
        state: the first step's are fetched again in this process."""
        batch = self._fetch(step, leaf)
        if self.doubted and self._first in (-1, step):
            self._first = step
            again = [self._keyed[self._key(step, leaf)] for _ in range(1 + bool(self._workers))]  # a worker has a copy
            if len({batch_digest(found) for found in (batch, *again)}) > 1:
                raise unlike_samples(step, leaf, self.indices(step, leaf), "when they are fetched twice")
        return batch

    def fetch_otherwise(self, step: int, leaf: int) -> None:
        """The same samples at another place in the order, forgotten: what a dataset remembers of them is another."""
        self._keyed[position_seed(self.seed, step, leaf, 3), self.indices(step, leaf)]

    def _fetch(self, step: int, leaf: int) -> Any:
        if self._workers == 0:
            return self._keyed[self._key(step, leaf)]
        if self._loader is None:
            self._loader = self._workers_begin()
        if (step, leaf) not in self._issued:
            return self._keyed[self._key(step, leaf)]
        while True:
            try:
                batch = next(self._loader)
            except (RuntimeError, EOFError, ConnectionError) as error:  # also: it died with a batch half handed over
                self._replace_workers(error, step)
                return self._keyed[self._key(step, leaf)]
            if self._issued.popleft() == (step, leaf):
                return batch

    def _workers_begin(self) -> Iterator[Any]:
        """New workers. torch would raise in the middle of whatever the training thread does when one dies; where that
        is, nothing may be raised (rule 12), so it is found out by who waits for a batch."""
        previous = signal.getsignal(signal.SIGCHLD)
        loader = iter(self._make_loader())
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, previous if previous is not None else signal.SIG_DFL)
        return loader

    def _replace_workers(self, error: Exception, step: int) -> None:
        """A worker died: begin with new ones, and have what is needed now fetched in this process. Raises the error if
        it is another one, or has come too often."""
        other = isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error)
        if other or self._replaced >= _REPLACED:
            raise error
        self._replaced += 1
        what, times = str(error) or type(error).__name__, f"{self._replaced} of {_REPLACED} times"
        print(f"outlast: a data worker died ({what}); all workers are replaced ({times})", file=sys.stderr)
        self._loader, self._next_key = None, (step, 0)
        self._issued.clear()

    def _key(self, step: int, leaf: int) -> tuple[int, list[int]]:
        return position_seed(self.seed, step, leaf, 1), self.indices(step, leaf)

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._keyed,
            batch_size=None,
            sampler=_Keys(self),
            num_workers=self._workers,
            worker_init_fn=_worker_dies_with_parent,
        )

    def upcoming(self) -> Iterator[tuple[int, list[int]]]:
        """Keys in the order in which they will be asked for, as far as foreseen; endless."""
        while True:
            step, place = self._next_key
            leaves = self._share(step)
            if place >= len(leaves):
                self._next_key = (step + 1, 0)
                continue
            self._next_key = (step, place + 1)
            if self.sizes(step)[leaves[place]]:
                self._issued.append((step, leaves[place]))
                yield self._key(step, leaves[place])


class _Keys:
    """What the DataLoader takes for its sampler."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return self._samples.upcoming()


def batch_digest(batch: Any) -> int:
    """Of the tensors, numbers and words in it, at whatever depth."""
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
