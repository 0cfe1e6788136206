"""From a filled stream to a durable part: digest each chunk, write what changed, promise it. No torch.

Role: one writer's half of a save. Hashing and writing overlap; what has a chunk's digest in the base generation is
referred to instead of written. Invariant: when `write_part` returns, the data file, the part file and their names are
durable, and the part describes exactly the stream's bytes. Never publishes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from outlast.checkpoint.manifest import Chunk, FileRef, Part, PartRef, digest, seal
from outlast.checkpoint.store import DataWriter, Store
from outlast.checkpoint.threads import Threads

__all__ = ["CHUNK_BYTES", "Base", "Place", "base_of", "write_part"]

CHUNK_BYTES = 4 << 20
_GROUP_BYTES = 4 * CHUNK_BYTES  # hashed in one go: beside a busy loop each return to Python is a wait
_NUM_AHEAD = 2
_RUN_BYTES = 32 << 20
_MIN_LIVE_SHARE = 0.25


class Place(NamedTuple):
    file: FileRef
    at: int
    bytes: int


Base = Mapping[str, Place]
"""Chunks of the last published generation, by digest: they can be referred to."""


def base_of(parts: list[Part]) -> dict[str, Place]:
    """What may be referred to: chunks of files of which a good share is still in use.

    A file of which only a quarter is left alive is not referred to again, so that it can be reused some day.
    """
    live: collections.Counter[str] = collections.Counter()
    for part in parts:
        for chunk in part.chunks:
            live[part.files[chunk.file].name] += chunk.bytes
    places = {}
    for part in parts:
        for chunk in part.chunks:
            file = part.files[chunk.file]
            if live[file.name] >= _MIN_LIVE_SHARE * file.bytes:
                places[chunk.digest] = Place(file, chunk.at, chunk.bytes)
    return places


class Written(NamedTuple):
    """`written_bytes`: to the data file; the rest of the stream was referred to."""

    ref: PartRef
    part: Part
    written_bytes: int


def write_part(
    store: Store,
    stream: memoryview,
    part: Part,
    *,
    name: str,
    wait: Callable[[int], None],
    base: Base,
    probe: Callable[[str], None],
) -> Written:
    """Write `stream` as `part` (its `files` and `chunks` are filled in) under `name`.json and `name`.bin.

    `wait(n)` returns when the stream's first n bytes are there. Raises `OSError` (or what `wait` raises); nothing
    that was written is left behind then.
    """
    job = _Job(store, stream, f"{name}.bin", base)
    try:
        for start in range(0, len(stream), _GROUP_BYTES):
            end = min(start + _GROUP_BYTES, len(stream))
            wait(end)
            job.add(start, end)
        probe("save.written")
        files, chunks, written = job.finish()
        probe("save.data_durable")
        full = msgspec.structs.replace(part, files=files, chunks=chunks, stream_bytes=len(stream))
        data = seal(full)
        store.put_part(f"{name}.json", data)
        probe("save.part_written")
        store.barrier()
        probe("save.part_durable")
    except BaseException as error:
        # Not a handler: whatever ended the save (a full disk, a signal), its files must not stay. One that was there
        # before is not ours.
        job.abandon(None if isinstance(error, FileExistsError) else f"{name}.json")
        raise
    ref = PartRef(writer=part.writer, name=f"{name}.json", bytes=len(data), digest=digest(data))
    return Written(ref, full, written)


class _Job:
    """Collects chunks into runs and writes the runs beside the hashing of the next."""

    def __init__(self, store: Store, stream: memoryview, name: str, base: Base) -> None:
        self._store, self._stream, self._name = store, stream, name
        self._base = dict(base)
        self._files: list[FileRef] = []
        self._numbers: dict[str, int] = {}
        self._chunks: list[tuple[str, int, int, str]] = []
        self._run: tuple[int, int] | None = None  # of the stream, not yet handed to a writing thread
        self._at = 0  # bytes handed to the data file so far, the current run included
        self._out: DataWriter | None = None
        self._pool: Threads | None = None
        self._writes: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        # Who waits for this one and for the next is waited for: the writer's own thread.
        self._hasher = Threads(1, "outlast-hash", limit_s=0.0)
        self._hashes: collections.deque[tuple[int, concurrent.futures.Future[list[str]]]] = collections.deque()

    def add(self, start: int, end: int) -> None:
        """Take these bytes of the stream, which continue it."""
        while len(self._hashes) >= _NUM_AHEAD:
            self._place_next()
        self._hashes.append((start, self._hasher.submit(_digests, self._stream[start:end])))

    def _place_next(self) -> None:
        start, hashes = self._hashes.popleft()
        for key in hashes.result():
            end = min(start + CHUNK_BYTES, len(self._stream))
            self._place(start, end, key)
            start = end

    def _place(self, start: int, end: int, key: str) -> None:
        known = self._base.get(key)
        if known is not None and known.bytes == end - start:
            self._chunks.append((known.file.name, known.at, end - start, key))
            if known.file.name != self._name:
                self._files.append(known.file)
            return
        if self._run is not None and self._run[1] == start and end - self._run[0] <= _RUN_BYTES:
            self._run = (self._run[0], end)
        else:
            self._flush()
            self._run = (start, end)
        self._chunks.append((self._name, self._at, end - start, key))
        self._base[key] = Place(FileRef(name=self._name, bytes=0), self._at, end - start)
        self._at += end - start

    def _flush(self) -> None:
        if self._run is None:
            return
        start, end = self._run
        self._run = None
        if self._out is None:
            self._out = self._store.create(self._name, len(self._stream))
            self._pool = Threads(2 if self._out.concurrent else 1, "outlast-write", limit_s=0.0)
        assert self._pool is not None
        while len(self._writes) >= 2:
            self._writes.popleft().result()
        offset = self._at - (end - start)
        self._writes.append(self._pool.submit(self._out.write, offset, self._stream[start:end]))

    def finish(self) -> tuple[list[FileRef], list[Chunk], int]:
        while self._hashes:
            self._place_next()
        self._flush()
        while self._writes:
            self._writes.popleft().result()
        self._stop()
        if self._out is not None:
            self._out.finish(self._at)
        files = {ref.name: ref for ref in self._files}
        if self._at:
            files[self._name] = FileRef(name=self._name, bytes=self._at)
        numbers = {name: number for number, name in enumerate(files)}
        chunks = [Chunk(numbers[name], at, size, key) for name, at, size, key in self._chunks]
        return list(files.values()), chunks, self._at

    def _stop(self) -> None:
        self._hasher.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def abandon(self, part_name: str | None) -> None:
        self._stop()
        if self._out is not None:
            self._out.abandon()
        with contextlib.suppress(OSError):
            if part_name is not None and self._store.size(part_name) is not None:
                self._store.discard([part_name])


def _digests(stream: memoryview) -> list[str]:
    return [digest(stream[at : at + CHUNK_BYTES]) for at in range(0, len(stream), CHUNK_BYTES)]
