"""Streams as a function of position: what is read in a fixed order, and what every replica reads alike.

A source that gives samples in its own order (an `IterableDataset`, a streaming dataset) or batches (a loader) cannot be
asked for one of them. So every replica reads all of it, in step with the training, and computes its own part: step s
has the s-th portion of the source, whoever is there. Random numbers are seeded before each portion and each pass, by
position. Where a pass began belongs to each step's outcome, to checkpoints and to what joiners are sent, so a replica
goes on from there: it reads the pass again and drops what is done, before anybody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from outlast.core.position import position_seed
from outlast.errors import ConfigError, LoopUnrepeatable, StepMisuse, TrainingError
from outlast.runtime.settings.protect_records import Data
from outlast.runtime.training._bad_samples import BadSamples
from outlast.runtime.training.arguments import positive, whole
from outlast.runtime.training.random_state import random_state_kept, seed_everything
from outlast.runtime.training.samples import Samples, batch_digest

__all__ = ["PLACE", "StreamSamples", "is_stream", "samples_of"]

PLACE = "outlast.stream"
"""Registered state under this name says where a stream is."""
_KEPT = 3  # steps whose portion is held: this one, the one before, and one for who is behind
_PASS = 40  # bits for a sample's number in its pass


class _Portion:
    """One step's part of the source. `began`: the step that its pass began with."""

    def __init__(self, number: int, began: int, units: list[Any]) -> None:
        self.number, self.began, self.units = number, began, units


class _Reader:
    """Reads passes of a source in portions of `size`, from any step on whose pass is known."""

    def __init__(self, source: Iterable[Any], seed: int, size: int, drop_last: bool) -> None:
        self._source, self._seed, self._size, self._drop_last = source, seed, size, drop_last
        self._pass = self._began = self._next = 0
        self._units: Iterator[Any] | None = None
        self._begins = [(0, 0)]  # (pass, step), of passes whose beginning is known
        self._kept: dict[int, _Portion] = {}

    def portion(self, step: int) -> _Portion:
        """The step's part. Reads on to it, or from the beginning of its pass again."""
        while step not in self._kept:
            if step < self._next or self._units is None:
                self._rewind(step)
            self._keep(self._next, self._read(self._next))
            self._next += 1
        return self._kept[step]

    def reach(self, step: int) -> None:
        """Have read everything before this step."""
        if step > self._next:
            self.portion(step - 1)

    def know(self, number: int, began: int) -> None:
        """A pass began with this step."""
        if (number, began) not in self._begins:
            self._begins.append((number, began))
            self._begins.sort()
        if number > self._pass:  # nothing of the passes between has to be read
            self._units, self._next = None, max(self._next, began)

    def _keep(self, step: int, portion: _Portion) -> None:
        self._kept[step] = portion
        for old in [number for number in self._kept if number <= step - _KEPT]:
            del self._kept[old]

    def _rewind(self, step: int) -> None:
        number, began = next((row for row in reversed(self._begins) if row[1] <= step), (0, 0))
        self._open(number, began)
        self._next = began

    def _open(self, number: int, began: int) -> None:
        self._pass, self._began = number, began
        self.know(number, began)
        seed = position_seed(self._seed, number, 0x0BE4)
        parts: tuple[Any, ...] = (self._source, *(getattr(self._source, name, None) for name in ("dataset", "sampler")))
        for part in parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(number)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed)
        with random_state_kept():
            seed_everything(seed)
            self._units = iter(self._source)

    def _read(self, step: int) -> _Portion:
        units: list[Any] = []
        empty = 0
        with random_state_kept():
            seed_everything(position_seed(self._seed, step, 0x57E4))
            while len(units) < self._size:
                assert self._units is not None
                found = next(self._units, self)
                if found is not self:
                    units.append(found)
                elif units and not self._drop_last:
                    break
                elif empty:
                    raise ConfigError(
                        f"the stream ended after {len(units)} of the {self._size} that one step takes, from its very "
                        "beginning",
                        remedy="a smaller global_batch_size or fewer microbatches, or drop_last=False",
                    )
                else:
                    empty, units = 1, []
                    self._open(self._pass + 1, step)
                    seed_everything(position_seed(self._seed, step, 0x57E4))
        return _Portion(self._pass, self._began, units)

    def check(self) -> int:
        """Raises LoopUnrepeatable if a pass does not begin twice alike; returns where the next step is read."""
        first = batch_digest(self.portion(0).units)
        self._kept.clear()
        self._units, self._next = None, 0
        if batch_digest(self.portion(0).units) != first:
            raise LoopUnrepeatable(
                "the stream does not begin the same when it is read twice",
                did="nothing was trained with it",
                remedy="shuffle with a seed of its own or with torch's, numpy's or random's numbers, which are seeded "
                "before each pass; or allow it with bitwise = false",
            )
        return self._next


class StreamSamples(Samples):
    """A stream in the place of a dataset. ConfigError for what cannot be read again from its beginning."""

    def __init__(
        self,
        source: Any,
        *,
        global_batch_size: int,
        microbatches: int,
        seed: int,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self.batches = isinstance(source, DataLoader)
        _check_source(source, self.batches, global_batch_size, microbatches, collate_fn, num_workers)
        self.num_samples, self.batch, self.num_leaves = -1, global_batch_size, microbatches
        self.seed, self.shuffle, self.drop_last, self.doubted = seed, False, drop_last, False
        self.known_length = False
        self._collate, self.bad, self.tell = collate_fn or default_collate, BadSamples(), lambda news: None
        self._stream = _Reader(source, seed, microbatches if self.batches else global_batch_size, drop_last)
        self._left_out, self.whole = frozenset(), False
        self._checked = False
        self._place = {"pass": 0, "began": 0, "step": 0}

    # --- part of the training state ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, int]:
        """After the newest step that was applied: the pass, the step that it began with, the next step."""
        return dict(self._place)

    def load_state_dict(self, values: Mapping[str, int]) -> None:
        self._place = {key: int(values[key]) for key in self._place}
        self._stream.know(self._place["pass"], self._place["began"])

    def place_of(self, step: int) -> tuple[int, int]:
        """For the step's outcome."""
        portion = self._stream.portion(step)
        return portion.number, portion.began

    def applied(self, step: int, place: tuple[int, ...]) -> None:
        """The step was applied here, perhaps by replaying it: read as far as all others have."""
        if place:
            self.load_state_dict({"pass": place[0], "began": place[1], "step": step + 1})
            self._stream.reach(step + 1)

    def parts(self) -> dict[str, Any]:
        return {PLACE: self}

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        raise StepMisuse(
            "a stream has no known length, so there is no number of steps in an epoch",
            remedy="training.steps(until=…); step.epoch is the pass over the stream that a step belongs to",
        )

    def take_up(self) -> None:
        """The state was loaded: read what its steps took."""
        self._stream.reach(self._place["step"])

    # --- as of `Samples` -----------------------------------------------------------------------------------------
    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        return self._collate

    @property
    def order(self) -> str:
        return "stream of batches" if self.batches else "stream"

    def epoch_of(self, step: int) -> int:
        return self._stream.portion(step).number

    def sizes(self, step: int) -> list[int]:
        rows = self._rows(step)
        return [sum(map(_length, row)) if self.batches else len(row) for row in rows]

    def shortest(self) -> list[int]:
        """Nobody knows how many samples a pass ends with: one."""
        if self.drop_last:
            return [self.batch // self.num_leaves] * self.num_leaves
        return [1] + [0] * (self.num_leaves - 1)

    def indices(self, step: int, leaf: int) -> list[int]:
        """Numbers of samples, or of batches once for each of their samples, in the pass; the pass in the high bits."""
        portion, (lo, hi) = self._stream.portion(step), self._ranges(step)[leaf]
        first = (portion.number << _PASS) + (step - portion.began) * self._stream._size
        kept = [(first + i, portion.units[i]) for i in range(lo, hi) if first + i not in self._left_out]
        return [number for number, unit in kept for _ in range(_length(unit) if self.batches else 1)]

    def read_here(self, step: int, leaf: int) -> list[int]:
        return self.indices(step, leaf)

    def leave_out(self, samples: Iterable[int]) -> None:
        """In a pass that is read again; with `whole` nothing is, and guards judge the step again."""
        self._left_out = frozenset(() if self.whole else samples)

    def expect(self, share: Callable[[int], list[int]], from_step: int) -> None:
        """All of it is read, whoever computes what."""

    def watch(self, outside_s: float) -> None:
        """A loader's workers are its own."""

    def fetch(self, step: int, leaf: int) -> Any:
        """The microbatch. Raises LoopUnrepeatable if the stream's beginning is not the same twice."""
        if self.doubted and not self._checked and step == 0:
            self._checked = True
            self._stream.check()
        row = self._rows(step)[leaf]
        if not row:  # all are left out, and the ranks of a replica go through the model together: it counts nothing
            lo, hi = self._ranges(step)[leaf]
            row = self._stream.portion(step).units[lo:hi]
        if self.batches:
            return row[0]
        seed_everything(position_seed(self.seed, step, leaf, 1))
        return self._collate(list(row))

    def first(self) -> int:
        """A fingerprint of what the first step is computed from."""
        return batch_digest(self._stream.portion(0).units)

    def fetch_otherwise(self, step: int, leaf: int) -> None:
        """A stream has one order."""

    def _ranges(self, step: int) -> list[tuple[int, int]]:
        small, larger = divmod(len(self._stream.portion(step).units), self.num_leaves)
        ends = [0]
        for leaf in range(self.num_leaves):
            ends.append(ends[-1] + small + (leaf < larger))
        return [(ends[leaf], ends[leaf + 1]) for leaf in range(self.num_leaves)]

    def _rows(self, step: int) -> list[Sequence[Any]]:
        portion = self._stream.portion(step)
        if not self._left_out:
            return [portion.units[lo:hi] for lo, hi in self._ranges(step)]
        first = (portion.number << _PASS) + (step - portion.began) * self._stream._size
        return [
            [portion.units[i] for i in range(lo, hi) if first + i not in self._left_out]
            for lo, hi in self._ranges(step)
        ]


def is_stream(source: Any) -> bool:
    """Whether it gives samples or batches in its own order: anything that can be iterated, and has no samples by
    number. A loader of a dataset with numbers is none: `protect` says how to pass what it loads."""
    if isinstance(source, DataLoader):
        return is_stream(source.dataset) or hasattr(source, "state_dict")
    if isinstance(source, torch.utils.data.IterableDataset):
        return True
    if isinstance(source, Sampler):
        return False
    return hasattr(source, "__iter__") and not hasattr(source, "__getitem__")


def samples_of(data: Data, *, seed: int) -> Samples:
    """What `protect` is given to train on, as samples by position. Raises ConfigError for what cannot be."""
    given: dict[str, Any] = {
        "global_batch_size": positive("global_batch_size", data.global_batch_size),
        "microbatches": positive("microbatches", data.microbatches),
        "drop_last": data.drop_last, "collate_fn": data.collate_fn, "num_workers": data.num_workers, "seed": seed,
    }  # fmt: skip
    allowed = whole("bad_samples", data.bad_samples)
    if allowed and is_stream(data.dataset):
        raise ConfigError(
            f"bad_samples={allowed} with a stream, which gives nothing after what it failed at",
            remedy="leave it out, and skip in the dataset what cannot be read, on every replica alike",
        )
    if not is_stream(data.dataset):
        order = {"shuffle": data.shuffle, "sampler": data.sampler}
        return Samples(data.dataset, bad_samples=allowed, **order, **given)
    if data.sampler is not None:
        raise ConfigError(
            "sampler= with a stream, which has an order of its own",
            remedy="leave it out, or pass a dataset with __len__ and __getitem__",
        )
    return StreamSamples(data.dataset, **given)


def _check_source(source: Any, batches: bool, batch: int, microbatches: int, collate_fn: Any, num_workers: int) -> None:
    kind = type(source).__name__
    if not batches and iter(source) is source:
        raise ConfigError(
            f"the dataset is a {kind} that can be read once only, and a replica that joins reads it again",
            remedy="an object whose __iter__ begins anew each time, such as a torch IterableDataset",
        )
    if num_workers:
        raise ConfigError(
            f"num_workers={num_workers} with a stream: its order is its own",
            remedy="give a DataLoader of the stream with num_workers; it is read whole by every replica",
        )
    if not batches and batch % microbatches:
        raise ConfigError(
            f"global_batch_size {batch} is not a multiple of microbatches {microbatches}",
            remedy=f"for example global_batch_size={-(-batch // microbatches) * microbatches}",
        )
    if not batches:
        return
    if collate_fn is not None:
        raise ConfigError("collate_fn= with a loader, which makes batches itself", remedy="leave it out")
    if source.batch_size is None:
        raise ConfigError(
            "the loader has no batch_size, and outlast takes each thing that it gives for one microbatch",
            remedy="pass its dataset, or a loader with batch_size",
        )
    if source.batch_size * microbatches != batch:
        raise ConfigError(
            f"a loader's batch is one microbatch: {microbatches} of {source.batch_size} samples are "
            f"{microbatches * source.batch_size}, and global_batch_size is {batch}",
            remedy=f"global_batch_size={microbatches * source.batch_size}, or a loader of other batches",
        )


def _length(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor, or what its parts are as a list."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        return _length(next(iter(batch.values())))
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], torch.Tensor | Mapping | list | tuple):
        return _length(batch[0])
    try:
        return len(batch)
    except TypeError:
        raise TrainingError(
            f"a batch of the loader is a {type(batch).__name__}: how many samples are in it cannot be told",
            remedy="a tensor, or a mapping or tuple of tensors with the samples in the first dimension",
        ) from None
