"""Reads the samples of one microbatch, here or in a worker process, and says in shared memory which one it is at.

A sample that cannot be read is either raised, with its number, or (`tolerant`) handed back as `Unread`, for its owner
to put another in its place. Does not know positions, budgets or who waits.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from outlast.runtime.training.random_state import seed_everything

__all__ = ["Key", "ReadingRow", "ReadingRows", "SampleReader", "Unread", "started_at"]

Key = tuple[int, list[int]]
"""A microbatch's samples: (seed of its random numbers, sample indices)."""
_WIDTH = 5
_AGAIN = object()  # the microbatch is read from its beginning
_STORAGE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENODEV}


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A sample that could not be read. `storage`: by an error of input and output, which is this host's fault rather
    than the sample's; a file that is missing or cut short is none."""

    sample: int
    text: str
    storage: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadingRow:
    """Where a worker is. `started`: when its process was, in the kernel's ticks, which tells it from a later one of the
    same number; `begun`: reads so far; `sample`: the one it reads, -1 for none; `longest_s`: of its reads."""

    worker: int
    pid: int
    started: int
    begun: int
    sample: int
    longest_s: float


class ReadingRows:
    """One `ReadingRow` a worker, in memory that the workers share with who waits for them. Each writes its own."""

    def __init__(self, num_workers: int) -> None:
        self._num = num_workers
        self._words = RawArray("q", _WIDTH * max(1, num_workers))
        self.clear()

    def clear(self) -> None:
        """New workers begin."""
        for worker in range(self._num):
            self._words[_WIDTH * worker : _WIDTH * (worker + 1)] = [0, -1, 0, 0, 0]

    def begins(self, worker: int, sample: int) -> None:
        at = _WIDTH * worker
        if self._words[at + 3] != os.getpid():
            self._words[at + 4], self._words[at + 3] = started_at(os.getpid()), os.getpid()
        self._words[at + 1] = sample
        self._words[at] += 1

    def ended(self, worker: int, took_ns: int) -> None:
        at = _WIDTH * worker
        self._words[at + 1] = -1
        self._words[at + 2] = max(self._words[at + 2], took_ns)

    def __iter__(self) -> Iterator[ReadingRow]:
        for worker in range(self._num):
            begun, sample, longest, pid, started = self._words[_WIDTH * worker : _WIDTH * (worker + 1)]
            yield ReadingRow(
                worker=worker, pid=pid, started=started, begun=begun, sample=sample, longest_s=longest / 1e9
            )  # fmt: skip


def started_at(pid: int) -> int:
    """When a living process began, in ticks since the machine did; 0 if there is none of this number."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if words[0] in "ZX" else int(words[19])


class SampleReader(Dataset[Any]):
    """Fetches whole microbatches by `Key`; in a tolerant one a microbatch may be an `Unread` instead."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], rows: ReadingRows, tolerant: bool) -> None:
        self.dataset, self.collate, self._rows, self._tolerant = dataset, collate, rows, tolerant

    def __getitem__(self, key: Key) -> Any:
        tried: set[int] = set()
        while True:
            seed_everything(key[0])
            found = self._read(key[1], tried)
            if found is not _AGAIN:
                return found

    def _read(self, indices: list[int], tried: set[int]) -> Any:
        found = []
        read = self._tried if get_worker_info() is None else self._watched
        for index in indices:
            sample = read(index, tried)
            if sample is _AGAIN or isinstance(sample, Unread):
                return sample
            found.append(sample)
        return self.collate(found)

    def _watched(self, index: int, tried: set[int]) -> Any:
        """In a worker process: who waits for it sees which sample it is at."""
        worker = get_worker_info()
        assert worker is not None
        began = time.monotonic_ns()
        self._rows.begins(worker.id, index)
        try:
            return self._tried(index, tried)
        finally:
            self._rows.ended(worker.id, time.monotonic_ns() - began)

    def _tried(self, index: int, tried: set[int]) -> Any:
        """What fails on the way to a disk or a store is asked for once more, and the microbatch read from its
        beginning, as the first try may have used up random numbers; what fails again is named."""
        try:
            return self.dataset[index]
        except Exception as error:
            if isinstance(error, OSError) and index not in tried:
                tried.add(index)
                said = f"outlast: sample {index} could not be read and is tried again: {error}"
                print(said, file=sys.stderr, flush=True)
                return _AGAIN
            if self._tolerant:
                return _unread(index, error)
            twice = ", read twice" if index in tried else ""
            error.add_note(f"outlast: this was sample {index} of the dataset{twice}")
            raise


def _unread(index: int, error: Exception) -> Unread:
    words = " ".join(str(error).split())[:160].encode("utf-8", "replace").decode()  # names of files may be no UTF-8
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return Unread(sample=index, text=text, storage=getattr(error, "errno", None) in _STORAGE)
