"""One generation, checked before anything is allocated and verified as it is read. No torch.

Role: from a head to bytes of tensors. Parts are parsed and held against each other and against the data files' sizes
first; then any box of any tensor can be read, and every chunk is hashed before a byte of it counts. A chunk that is
wrong or missing in the nearest store is taken from the next one that has it, and the reader says so. Invariant: what
`read` leaves in the destination matches the digests, or it raises `Damage`.
"""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import contextlib
import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from outlast.checkpoint._arena import address_of, thread_buffer
from outlast.checkpoint.boxes import Box, check_cover, contiguous_span, intersect
from outlast.checkpoint.manifest import (
    DTYPE_BYTES,
    MAX_PART_BYTES,
    Chunk,
    Damage,
    Head,
    Part,
    PartRef,
    Piece,
    TensorSpec,
    digest,
    parse_part,
)
from outlast.checkpoint.patience import Patient, StoreGate, Stuck
from outlast.checkpoint.store import DataReader, Source
from outlast.checkpoint.threads import Threads

__all__ = ["Reader", "ByteRun", "Skip", "runs_of_box"]


_NUM_READERS = 4  # one waits for the disk while others hash and copy


class Skip(NamedTuple):
    """What a load did not use, and why: shown to people and journalled."""

    generation: int
    step: int
    tier: str
    url: str
    file: str
    reason: str


class ByteRun(NamedTuple):
    """`dest` is filled with the stream's bytes from `at` on, of part `part`."""

    part: int
    at: int
    dest: memoryview


class Held(NamedTuple):
    """A piece and the part that holds it."""

    part: int
    piece: Piece


class Reader:
    """Raises `Damage` if the generation is not whole. Close it, or use it as a context manager.

    `limit_s`: a chunk's read that takes longer ends the whole `read` with `Stuck`; None waits for good.
    """

    def __init__(
        self,
        head: Head,
        stores: Sequence[Source],
        *,
        note: Callable[[Skip], None] | None = None,
        limit_s: float | None = None,
    ) -> None:
        self.head, self._stores = head, list(stores)
        self._limit_s, self._is_stuck = limit_s, False
        self._note = note if note is not None else lambda skip: None
        self._lock = threading.Lock()
        self._open: dict[tuple[int, str], DataReader] = {}
        self.bytes_read: collections.Counter[str] = collections.Counter()
        self.parts = [self._read_part(ref) for ref in head.parts]
        first = self.parts[0]
        assert first.tensors is not None, "parse_part keeps this"
        self.tensors: list[TensorSpec] = first.tensors
        self.tree = first.tree
        self.pieces = self._check_pieces()
        self._starts = [list(itertools.accumulate((c.bytes for c in p.chunks), initial=0)) for p in self.parts]
        self._check_files()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._is_stuck:
            return  # a thread is still in one of them, and perhaps holds the lock
        with self._lock:
            readers, self._open = list(self._open.values()), {}
        for reader in readers:
            reader.close()

    # what the documents say

    def _skip(self, store: Source, file: str, error: Exception) -> None:
        reason = error.what if isinstance(error, Damage) else str(error)
        self._note(Skip(self.head.generation, self.head.step, store.tier, store.url, file, reason))

    def _read_part(self, ref: PartRef) -> Part:
        error: Damage | OSError = Damage("is in no store", file=ref.name)
        for store in self._stores:
            try:
                data = store.read_part(ref.name, MAX_PART_BYTES)
                self.bytes_read[store.tier] += len(data)
                return parse_part(data, ref, num_writers=len(self.head.parts), save=self.head.save)
            except (Damage, OSError) as caught:
                error = caught
                self._skip(store, ref.name, caught)
        raise error if isinstance(error, Damage) else Damage(str(error), file=ref.name) from error

    def _check_pieces(self) -> list[list[Held]]:
        held: list[list[Held]] = [[] for _ in self.tensors]
        for number, part in enumerate(self.parts):
            file = self.head.parts[number].name
            if part.schema != self.parts[0].schema:
                raise Damage("was written for tensors of other shapes or dtypes", file=file)
            end = 0
            for piece in part.pieces:
                if not 0 <= piece.tensor < len(self.tensors) or len(piece.offset) != len(piece.shape):
                    raise Damage(f"holds a piece of tensor number {piece.tensor}, which is not there", file=file)
                size = math.prod(piece.shape) * DTYPE_BYTES[self.tensors[piece.tensor].dtype]
                if piece.at < end or size < 0 or piece.at + size > part.stream_bytes:
                    raise Damage("holds a piece that overlaps another or ends beyond the stream", file=file)
                end = piece.at + size
                held[piece.tensor].append(Held(number, piece))
        for spec, pieces in zip(self.tensors, held, strict=True):
            wrong = check_cover(spec.shape, [Box(h.piece.offset, h.piece.shape) for h in pieces])
            if wrong is not None:
                raise Damage(f"tensor {spec.name!r}: {wrong}", file=self.head.parts[0].name)
        if sum(part.stream_bytes for part in self.parts) != self.head.bytes:
            raise Damage("its parts hold another number of bytes than the head says", file=self.head.parts[0].name)
        return held

    def _check_files(self) -> None:
        """Sizes first: what a manifest claims is bounded by what is really there before memory is asked for."""
        for ref in {ref.name: ref for part in self.parts for ref in part.files}.values():
            if not any(self._has(store, ref.name, ref.bytes) for store in self._stores):
                raise Damage(f"is missing, or does not have the {ref.bytes} bytes that it should", file=ref.name)

    def _has(self, store: Source, name: str, size: int) -> bool:
        try:
            found = store.size(name)
        except OSError as error:
            self._skip(store, name, error)
            return False
        if found != size:
            there = "is missing" if found is None else f"has {found} bytes instead of {size}"
            self._skip(store, name, Damage(there, file=name))
        return found == size

    # bytes

    @property
    def names(self) -> dict[str, int]:
        """Tensor numbers by name."""
        return {spec.name: number for number, spec in enumerate(self.tensors)}

    def chunks(self) -> Iterator[tuple[int, int, Chunk]]:
        """(part, start in its stream, chunk) of all."""
        for number, part in enumerate(self.parts):
            for start, chunk in zip(self._starts[number], part.chunks, strict=False):
                yield number, start, chunk

    def chunks_in(self, part: int, start: int, size: int) -> list[tuple[int, Chunk]]:
        """(start in the stream, chunk) of those that touch this range of a part's stream."""
        starts, chunks = self._starts[part], self.parts[part].chunks
        first = max(0, bisect.bisect_right(starts, start) - 1)
        found = itertools.takewhile(lambda i: starts[i] < start + size, range(first, len(chunks)))
        return [(starts[i], chunks[i]) for i in found]

    def tensors_in(self, part: int, start: int, size: int) -> list[str]:
        """Names of the tensors that have bytes in this range of a part's stream."""
        names = []
        for piece in self.parts[part].pieces:
            spec = self.tensors[piece.tensor]
            end = piece.at + math.prod(piece.shape) * DTYPE_BYTES[spec.dtype]
            if piece.at < start + size and end > start and end > piece.at:
                names.append(spec.name)
        return names

    def _file(self, store: int, name: str) -> DataReader:
        with self._lock:
            found = self._open.get((store, name))
            if found is None:
                found = self._open[store, name] = self._stores[store].open_data(name)
            return found

    def fetch(self, part: int, chunk: Chunk, dest: memoryview, asked: list[int] | None = None) -> None:
        """Fill `dest` with a chunk from the nearest store where it is right. Raises `Damage`.

        `asked` holds the number of the store that is being asked.
        """
        file = self.parts[part].files[chunk.file]
        error: Exception = Damage("is in no store", file=file.name)
        for number, store in enumerate(self._stores):
            if asked is not None:
                asked[:] = [number]
            try:
                reader = self._file(number, file.name)
                if reader.bytes != file.bytes:
                    raise Damage(f"has {reader.bytes} bytes instead of {file.bytes}", file=file.name)
                reader.read(chunk.at, dest)
                with self._lock:
                    self.bytes_read[store.tier] += chunk.bytes
                if digest(dest) == chunk.digest:
                    return
                raise Damage("does not match its digest", file=file.name, offset=chunk.at, bytes=chunk.bytes)
            except (Damage, OSError) as caught:
                error = caught
                self._skip(store, file.name, caught)
        raise error if isinstance(error, Damage) else Damage(str(error), file=file.name) from error

    def read(
        self, runs: Sequence[ByteRun], *, progress: Callable[[int], None] | None = None, apart: bool = False
    ) -> None:
        """Fill every run's destination, reading each chunk once. `progress` is told the bytes of each chunk.

        `apart`: nothing writes to the destinations after this has raised, not even a read that was given up.
        """
        gate = StoreGate() if apart else None
        jobs: dict[tuple[int, int], list[tuple[int, memoryview]]] = collections.defaultdict(list)
        for run in runs:
            for index, inside, dest in self._split(run):
                jobs[run.part, index].append((inside, dest))
        ordered = sorted(jobs.items(), key=lambda job: self._place(*job[0]))
        # Who waits here waits for them, as long as they answer: the end of the process need not.
        pool = Threads(_NUM_READERS, "outlast-read", limit_s=0.0)
        waiting: collections.deque[tuple[concurrent.futures.Future[int], list[int]]] = collections.deque()
        try:
            for (part, index), wanted in ordered:
                asked: list[int] = []
                waiting.append((pool.submit(self._job, part, index, wanted, asked, gate), asked))
                if len(waiting) >= 2 * _NUM_READERS:
                    _tell(progress, self._answer(*waiting.popleft()))
            while waiting:
                _tell(progress, self._answer(*waiting.popleft()))
        finally:
            for future, _ in waiting:
                future.cancel()
            if gate is not None:
                gate.shut()
            pool.shutdown(wait=not self._is_stuck)

    def _answer(self, future: concurrent.futures.Future[int], asked: list[int]) -> int:
        """The oldest job's result. Raises `Stuck` if one store has kept it for too long."""
        before = list(asked)
        while not concurrent.futures.wait([future], self._limit_s).done:
            if asked and asked == before:
                self._is_stuck = True
                raise self._stuck(self._stores[asked[0]])
            before = list(asked)
        return future.result()

    def _stuck(self, store: Source) -> Stuck:
        assert self._limit_s is not None, "without a limit nobody is late"
        if isinstance(store, Patient):
            store.hung()
        return Stuck(store, self._limit_s)

    def _place(self, part: int, index: int) -> tuple[str, int]:
        chunk = self.parts[part].chunks[index]
        return self.parts[part].files[chunk.file].name, chunk.at

    def _split(self, run: ByteRun) -> Iterator[tuple[int, int, memoryview]]:
        """(chunk number, offset in the chunk, destination) of each chunk that a run touches."""
        starts, done = self._starts[run.part], 0
        index = bisect.bisect_right(starts, run.at) - 1
        while done < len(run.dest):
            inside = run.at + done - starts[index]
            count = min(starts[index + 1] - starts[index] - inside, len(run.dest) - done)
            yield index, inside, run.dest[done : done + count]
            done += count
            index += 1

    def _job(
        self, part: int, index: int, wanted: list[tuple[int, memoryview]], asked: list[int], gate: StoreGate | None
    ) -> int:
        chunk = self.parts[part].chunks[index]
        if gate is None and len(wanted) == 1 and len(wanted[0][1]) == chunk.bytes:
            self.fetch(part, chunk, wanted[0][1], asked)
            return chunk.bytes
        buffer = thread_buffer(chunk.bytes)[: chunk.bytes]
        self.fetch(part, chunk, buffer, asked)
        base = address_of(buffer)
        with gate.passed() if gate is not None else contextlib.nullcontext(True) as may_write:
            for inside, dest in wanted if may_write else []:
                # Unlike a slice assignment, this lets the other threads run.
                ctypes.memmove(address_of(dest), base + inside, len(dest))
        return chunk.bytes

    def read_tensor(self, number: int, box: Box | None = None) -> bytearray:
        """Row-major bytes of a box of a tensor (all of it by default)."""
        spec = self.tensors[number]
        target = box if box is not None else Box((0,) * len(spec.shape), spec.shape)
        out = bytearray(target.volume * DTYPE_BYTES[spec.dtype])
        self.read(list(runs_of_box(self, number, target, memoryview(out))))
        return out


def _tell(progress: Callable[[int], None] | None, count: int) -> None:
    if progress is not None:
        progress(count)


def runs_of_box(reader: Reader, number: int, target: Box, dest: memoryview) -> Iterator[ByteRun]:
    """The runs that fill `dest`, the row-major bytes of box `target` of tensor `number`."""
    size = DTYPE_BYTES[reader.tensors[number].dtype]
    for part, piece in reader.pieces[number]:
        source = Box(piece.offset, piece.shape)
        common = intersect(source, target)
        if common is None or common.volume == 0:
            continue
        for row in _rows(common, source, target):
            there, here = contiguous_span(row, source), contiguous_span(row, target)
            assert there is not None, "rows are contiguous in both boxes"
            assert here is not None, "rows are contiguous in both boxes"
            low = here[0] * size
            yield ByteRun(part, piece.at + there[0] * size, dest[low : low + here[1] * size])


def _rows(common: Box, source: Box, target: Box) -> Iterator[Box]:
    """Cut `common` into the largest boxes that are contiguous in both."""
    dims = len(common.shape)
    split = dims
    # The trailing dimensions that both boxes have whole, and one more, make a run.
    while split > 0 and common.shape[split - 1] == source.shape[split - 1] == target.shape[split - 1]:
        split -= 1
    split = max(0, split - 1)
    ranges = [range(o, o + n) for o, n in zip(common.offset[:split], common.shape[:split], strict=True)]
    for index in itertools.product(*ranges):
        yield Box((*index, *common.offset[split:]), (1,) * split + common.shape[split:])
