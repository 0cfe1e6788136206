"""Worker processes that fetch microbatches ahead: one that dies, hangs or leaks is named, and all are replaced.

Who waits for a batch looks once a second at what each worker reads (`ReadingRows`). A worker hangs that has been at one
sample for as long as the wait, and for longer than any read before by far. Workers leak that have grown by twice the
memory that is left: they go before the kernel has to choose who. Does not decide what is fetched, nor what becomes of a
sample at which workers are lost (`samples.py`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader

from outlast.runtime.training._sample_reader import Key, ReadingRow, ReadingRows, SampleReader, started_at
from outlast.runtime.training.free_memory import memory_left

__all__ = ["LostWorker", "Workers", "own_bytes"]

_LOOK_S = 1.0
_AT_LEAST_S = 30.0  # a network file system has such moments
_TIMES = 10.0  # the longest read so far
_MORE = 4.0  # times the patience, for each time that workers were ended at a sample
_EARLY = 2
_FEW = 10  # batches of each worker: leaks that come sooner, again and again, are no leaks
_LITTLE_BYTES = 64 << 20  # growth that is no leak, however little memory is left


@dataclass(frozen=True, kw_only=True)
class LostWorker:
    """Why all workers were ended. `sample`: at which one of them was, -1 if at none."""

    what: Literal["died", "hung", "leaked"]
    text: str
    sample: int = -1


class Workers:
    """Reads samples by processes, and replaces those that hang, die or leak. `keys`: what to fetch, in order, endless.
    `longest_s`: nobody is waited for longer than this."""

    def __init__(self, num: int, reader: SampleReader, rows: ReadingRows, keys: Callable[[], Iterator[Key]]) -> None:
        self.num, self._reader, self.rows, self._keys = num, reader, rows, keys
        self.longest_s, self.at_least_s, self.look_s = float("inf"), _AT_LEAST_S, _LOOK_S
        self.clock: Callable[[], float] = time.monotonic
        self.lost_at: dict[int, int] = {}  # sample -> times that workers were lost at it
        self.left_bytes: Callable[[], int] = memory_left
        self._batches: Iterator[Any] | None = None
        self._at: dict[int, tuple[int, float]] = {}  # worker -> (its read, when that was first seen)
        self._first_bytes: dict[int, int] = {}  # process -> when it was first looked at
        self._looked = 0.0
        self._given = 0  # batches, since they began
        self._early = 0  # times in a row that leaks were seen after few batches

    def begin(self) -> None:
        """Start them, unless they are there. torch would raise in the middle of whatever the training thread does when
        one dies; where that is, nothing may be raised (rule 12), so it is found out by who waits for a batch."""
        if self._batches is not None:
            return
        self.rows.clear()
        self._at, self._first_bytes, self._looked, self._given = {}, {}, self.clock(), 0
        previous = signal.getsignal(signal.SIGCHLD)
        loader: DataLoader[Any] = DataLoader(
            self._reader, batch_size=None, sampler=_Keys(self._keys), num_workers=self.num, timeout=self.look_s,
            worker_init_fn=_worker_dies_with_parent,
        )  # fmt: skip
        self._batches = iter(loader)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, previous if previous is not None else signal.SIG_DFL)

    def drop(self) -> None:
        """What they have fetched is of no use any more."""
        self._batches = None

    def take(self) -> Any:
        """The next batch, or a `LostWorker`: then all of them are gone. Raises what reading a batch raised."""
        assert self._batches is not None
        self._at.clear()
        if self.clock() - self._looked >= self.look_s and (leaked := self._leaked()) is not None:
            return self._end(leaked)
        while True:
            try:
                found = next(self._batches)
            except (RuntimeError, EOFError, ConnectionError) as error:  # also: it died with a batch half handed over
                words = str(error)
                if isinstance(error, RuntimeError) and not words.startswith(("DataLoader timed", "DataLoader worker")):
                    raise
                lost = self._hung() or self._leaked() if words.startswith("DataLoader timed") else self._died(words)
            else:
                self._given += 1
                return found
            if lost is not None:
                return self._end(lost)

    def _end(self, lost: LostWorker) -> LostWorker:
        for row in self.rows:
            if _lives(row):
                with suppress(ProcessLookupError):
                    os.kill(row.pid, signal.SIGKILL)
        self.drop()
        return lost

    # --- who it was ----------------------------------------------------------------------------------------------
    def _died(self, words: str) -> LostWorker:
        codes = self._exit_codes()
        dead = [row for row in self.rows if row.sample >= 0 and not _lives(row)]
        gone = next((row for row in dead if codes.get(row.pid, 0) not in (None, -signal.SIGTERM)), None)
        if gone is None and -signal.SIGTERM in codes.values():  # an engine's notice to all: what it read is no reason
            return LostWorker(what="died", text="a data worker was ended from outside (SIGTERM)")
        if gone is None:
            return LostWorker(what="died", text=f"a data worker died ({words or 'in the middle of a batch'})")
        text = f"data worker {gone.worker} (process {gone.pid}) died as it read sample {gone.sample}"
        return LostWorker(what="died", text=text, sample=gone.sample)

    def _exit_codes(self) -> dict[int, int | None]:
        """Exit codes of the workers by pid, None while one lives. Torch's error does not tell how a worker died; and
        who dies lets go of its connections before it can be waited for. Torch tells of that end by an error once more,
        wherever its signal meets this thread: it is known by then."""
        workers = getattr(self._batches, "_workers", ())
        for _ in range(1 + len(workers)):
            with suppress(RuntimeError):
                ended = wait([worker.sentinel for worker in workers], _LOOK_S)
                for worker in workers:
                    if worker.sentinel in ended:
                        worker.join(_LOOK_S)
                break
        return {worker.pid: worker.exitcode for worker in workers}

    def _hung(self) -> LostWorker | None:
        """Judged while somebody waits: what a worker does meanwhile keeps nobody."""
        now, rows = self.clock(), list(self.rows)
        usual_s = max(self.at_least_s, _TIMES * max(row.longest_s for row in rows))
        for row in rows:
            read, since = self._at.get(row.worker, (-1, 0.0))
            if row.sample < 0 or read != row.begun:
                self._at[row.worker] = (row.begun, now)
            elif now - since > min(self.longest_s, self._times(row) * usual_s):
                return LostWorker(what="hung", text=_hangs(row, now - since), sample=row.sample)
        return None

    def _times(self, row: ReadingRow) -> float:
        """How many times the usual patience this read has: a worker's first read may open or fetch what all others
        need, and where one was ended already the next has more time, so that what is slow alone is read in the end."""
        return float("inf") if row.begun == 1 else _MORE ** self.lost_at.get(row.sample, 0)

    def _leaked(self) -> LostWorker | None:
        """What workers open at their first reads is no growth: it is measured from each one's first batch on."""
        self._looked = self.clock()
        if self._given < self.num or self._early > _EARLY:
            return None
        grown: dict[int, int] = {}
        for row in self.rows:
            size = own_bytes(row.pid) if row.pid else 0
            if size:
                grown[row.worker] = size - self._first_bytes.setdefault(row.pid, size)
        most = max(grown, key=lambda worker: grown[worker], default=-1)
        total = sum(grown.values())
        if total <= max(_LITTLE_BYTES, 2 * self.left_bytes()):
            return None
        self._early = self._early + 1 if self._given < _FEW * self.num else 0
        if self._early > _EARLY:
            print("outlast: data workers need so much memory: they are not replaced for it any more", file=sys.stderr)
            return None
        text = (
            f"data worker {most} has grown by {grown[most] >> 20:,} MiB since it began, all {self.num} by "
            f"{total >> 20:,} MiB, and {self.left_bytes() >> 20:,} MiB of memory are left"
        )
        return LostWorker(what="leaked", text=text)


class _Keys:
    """What the DataLoader takes for its sampler."""

    def __init__(self, keys: Callable[[], Iterator[Key]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Any]:
        return self._keys()


def _worker_dies_with_parent(_: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _hangs(row: ReadingRow, waited_s: float) -> str:
    return f"data worker {row.worker} (process {row.pid}) hangs: it has read sample {row.sample} for {waited_s:.0f} s"


def _lives(row: ReadingRow) -> bool:
    """Whether its process is there still. The number of one that was waited for may be another's by now."""
    return row.pid > 0 and row.started > 0 and started_at(row.pid) == row.started


def own_bytes(pid: int) -> int:
    """A process's memory that it has written and shares with nobody; 0 if it is gone. What a worker reads of its
    parent's objects becomes its own by that, as their counts of references are written (pytorch#13246)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty")), 0)
