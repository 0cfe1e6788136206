"""Copying a published generation to a farther store, verified on the way. No torch.

Role: what fills the object store behind a local disk, in the background, and `outlast ckpt` between any two stores.
Invariants: the farther store gets the same names and bytes, each chunk checked against its digest before it leaves;
files that are there already are not sent again; the head goes last, so a copy that ends early is invisible.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable

from outlast.checkpoint.manifest import MAX_PART_BYTES, Chunk, Damage, Part, digest, parse_head, parse_part
from outlast.checkpoint.retention import Retention, prune
from outlast.checkpoint.store import Store, generation_name
from outlast.checkpoint.threads import Threads, failed
from outlast.errors import CheckpointError

__all__ = ["Drain", "Drainer", "drain"]

_BUFFER_BYTES = 8 << 20


class Drain:
    """Progress of one copy: `done_bytes` of `total_bytes`, both of data files. Readable from any thread."""

    def __init__(self, generation: int) -> None:
        self.generation, self.done_bytes, self.total_bytes, self.sent_bytes = generation, 0, 0, 0


def drain(
    source: Store,
    target: Store,
    generation: int,
    *,
    progress: Drain | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Copy one generation; returns the bytes of data that were sent.

    Raises `Damage` (a wrong chunk is not passed on; or the target has another generation of that number), `OSError`,
    and `InterruptedError` when `stop` says so.
    """
    state = progress if progress is not None else Drain(generation)
    with source.in_use(generation) as data:
        head = parse_head(data, file=generation_name(generation), generation=generation)
        parts = []
        for ref in head.parts:
            text = source.read_part(ref.name, MAX_PART_BYTES)
            parts.append((ref.name, text, parse_part(text, ref, num_writers=len(head.parts), save=head.save)))
        files = _files([part for _, _, part in parts])
        state.total_bytes = sum(files.values())
        for name, size in files.items():
            if target.size(name) == size:
                state.done_bytes += size
            else:
                _send(source, target, name, size, [part for _, _, part in parts], state, stop)
        for name, text, _ in parts:
            if target.size(name) != len(text):
                target.put_part(name, text)
        target.barrier()
        if not target.publish(generation, data) and target.read_head(generation) != data:
            raise Damage(f"{target.url} has another generation {generation}", file=generation_name(generation))
    return state.sent_bytes


def _files(parts: list[Part]) -> dict[str, int]:
    return {ref.name: ref.bytes for part in parts for ref in part.files}


def _send(
    source: Store, target: Store, name: str, size: int, parts: list[Part], state: Drain, stop: Callable[[], bool]
) -> None:
    """The whole file in order: known chunks are checked, the ranges between them (an older generation's) are not."""
    known: dict[int, Chunk] = {}
    for part in parts:
        known |= {chunk.at: chunk for chunk in part.chunks if part.files[chunk.file].name == name}
    with contextlib.closing(source.open_data(name)) as reader:
        if reader.bytes != size:
            raise Damage(f"has {reader.bytes} bytes instead of {size}", file=name)
        writer = target.create(name, size)
        try:
            at = 0
            while at < size:
                if stop():
                    raise InterruptedError("the drain was stopped")
                chunk = known.get(at)
                # A fresh buffer each time: the target may still be sending the last one.
                buffer = memoryview(bytearray(chunk.bytes if chunk else _gap(at, size, known)))
                reader.read(at, buffer)
                if chunk is not None and digest(buffer) != chunk.digest:
                    raise Damage("does not match its digest", file=name, offset=at, bytes=chunk.bytes)
                writer.write(at, buffer)
                at += len(buffer)
                state.done_bytes += len(buffer)
                state.sent_bytes += len(buffer)
            writer.finish(size)
        except BaseException:
            writer.abandon()
            raise


def _gap(at: int, size: int, known: dict[int, Chunk]) -> int:
    following = min((start for start in known if start > at), default=size)
    return min(following - at, _BUFFER_BYTES)


class Drainer:
    """Fills `far` from `near` beside training, on a thread. `drained` and `failed` are called on it.

    A farther place that is slower than the saves gets the newest generation each time it is free, not all of them:
    nothing piles up. One that gives no sign of life for `limit_s` is said to have failed, and the process ends
    without it.
    """

    def __init__(
        self,
        near: Store,
        far: Store,
        retention: Retention,
        *,
        drained: Callable[[Drain, float], None],
        failed: Callable[[Drain, str], None],
        closing: threading.Event,
        num_tries: int = 3,
        retry_s: float = 0.5,
        limit_s: float = 600.0,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._near, self._far, self._retention = near, far, retention
        self._drained, self._failed, self._closing = drained, failed, closing
        self._num_tries, self._retry_s, self._limit_s = num_tries, retry_s, limit_s
        self.threads = Threads(1, "outlast-drain", limit_s=limit_s, prepare=prepare)
        self.newest: Drain | None = None
        self._under_way: Drain | None = None

    def begin(self, generation: int) -> concurrent.futures.Future[int]:
        """The future is the number of bytes sent, 0 for a generation that was passed over."""
        stuck = self._under_way
        if stuck is not None and self.threads.is_silent:
            self._under_way = None  # said once
            self._failed(stuck, f"{self._far.url} has not answered for {self._limit_s:g} s")
        self.newest = Drain(generation)
        try:
            return self.threads.submit(self._run, self.newest)
        except (RuntimeError, MemoryError) as error:  # the generation stands where it is
            self._failed(self.newest, f"{type(error).__name__}: {error}")
            return failed(error)

    def _run(self, state: Drain) -> int:
        if state is not self.newest:
            return 0
        began_s = time.monotonic()
        for attempt in range(self._num_tries):
            self._under_way = state
            try:
                state.done_bytes = 0
                drain(self._near, self._far, state.generation, progress=state, stop=self._stops)
                prune(self._far, self._retention)
                break
            except (OSError, CheckpointError) as error:
                if attempt == self._num_tries - 1 or self._closing.is_set():
                    self._failed(state, f"{type(error).__name__}: {error}")
                    raise
                self._closing.wait(self._retry_s * 2**attempt)
            finally:
                self._under_way = None
                self.threads.moved()
        self._drained(state, time.monotonic() - began_s)
        return state.sent_bytes

    def _stops(self) -> bool:
        self.threads.moved()
        return self._closing.is_set()
