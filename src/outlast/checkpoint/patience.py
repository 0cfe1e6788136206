"""Places that may never answer, asked with a limit: a load goes on elsewhere. No torch.

Role: what the ladder reads through. Each call runs on a thread that can be left behind; a place that has not answered
one for `limit_s` is silent from then on, and refuses at once. Reading the chunks themselves is the reader's own watch,
which says `hung`. Invariant: nobody waits longer than `limit_s` for one answer. Cannot take a read back: memory that
a hung read was to fill stays its own (`kept`), and is never handed out; memory of others it reaches through a
`StoreGate`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from outlast.checkpoint.store import DataReader, Source
from outlast.checkpoint.threads import Threads

__all__ = ["StoreGate", "Patient", "Stuck", "kept", "newest_of", "patient"]

P = ParamSpec("P")
T = TypeVar("T")

kept: list[Any] = []
"""What the kernel may still write into, however late: never freed."""


class StoreGate:
    """Between what was read and memory that is somebody's: once shut, a read that returns late changes nothing."""

    def __init__(self) -> None:
        self._changed, self._num_inside, self._is_shut = threading.Condition(), 0, False

    @contextlib.contextmanager
    def passed(self) -> Iterator[bool]:
        """Whether the memory may be written to, until this is left."""
        with self._changed:
            may = not self._is_shut
            self._num_inside += may
        try:
            yield may
        finally:
            with self._changed:
                self._num_inside -= may
                self._changed.notify_all()

    def shut(self) -> None:
        """Nobody is inside any more, nor ever will be. Waits for copies from memory to memory only."""
        with self._changed:
            self._is_shut = True
            self._changed.wait_for(lambda: self._num_inside == 0)


class Stuck(OSError):
    """`place` has not answered for so long that what was asked of it is given up."""

    def __init__(self, place: Source, limit_s: float) -> None:
        super().__init__(errno.ETIMEDOUT, f"a read has not returned for {limit_s:g} s", place.url)
        self.place = place


class Patient:
    """`inner`, asked from a thread that is waited for `limit_s` and no longer. See `Source`."""

    def __init__(self, inner: Source, limit_s: float) -> None:
        self.inner, self.url, self.tier, self.silent = inner, inner.url, inner.tier, False
        self._limit_s, self._has_hung = limit_s, False
        self._threads = Threads(1, "outlast-look", limit_s=0.0)  # the end of the process does not ask for it

    def _ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises `Stuck`, or what the call does."""
        self._refuse_if_silent()
        answer = self._threads.submit(call, *args, **kwargs)
        if not concurrent.futures.wait([answer], self._limit_s).done:
            self.silent = True
            raise Stuck(self, self._limit_s)
        return answer.result()

    def hung(self) -> None:
        """Reading a chunk has. One file may be to blame for that once: an older generation may yet lie here."""
        self.silent, self._has_hung = self._has_hung, True

    def _refuse_if_silent(self) -> None:
        if self.silent:
            raise Stuck(self, self._limit_s)

    def generations(self) -> list[int]:
        return self._ask(self.inner.generations)

    def read_head(self, generation: int) -> bytes:
        return self._ask(self.inner.read_head, generation)

    def read_part(self, name: str, max_bytes: int) -> bytes:
        return self._ask(self.inner.read_part, name, max_bytes)

    def size(self, name: str) -> int | None:
        return self._ask(self.inner.size, name)

    def open_data(self, name: str) -> DataReader:
        """Not watched here: it is called from a reader's threads, which are."""
        self._refuse_if_silent()
        return self.inner.open_data(name)

    @contextlib.contextmanager
    def in_use(self, generation: int) -> Iterator[bytes]:
        held = self.inner.in_use(generation)
        data = self._ask(held.__enter__)
        try:
            yield data
        finally:
            with contextlib.suppress(OSError):  # one that has gone silent lets go when it answers, or with us
                self._ask(held.__exit__, None, None, None)


def patient(places: Sequence[Source], limit_s: float) -> list[Patient]:
    return [Patient(place, limit_s) for place in places]


def newest_of(places: Sequence[Source], place: Source) -> int | None:
    """The number of the newest generation of `place`, if it is one of these and answers."""
    for candidate in places:
        if isinstance(candidate, Patient) and candidate.inner is place:
            with contextlib.suppress(OSError):
                return max(candidate.generations(), default=None)
    return None
