"""Snapshots that outlive the trainer: slots in memory that another process holds. No torch.

Role: the `memory` tier. The launcher makes a `Hold` (memory files without a name, freed when the last process that has
them ends) and hands the descriptors down to the trainers, whose arena slots are these files. After a crash of every
trainer on the host the newest snapshot that all writers completed is read back from memory. Invariants: a slot is
valid only between `seal` and the next `open_slot`'s `clear`; a snapshot counts only if every writer's slot of it is
sealed and here. Holds one host's slots; memory of other hosts is the runtime's to reach.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Collection, Iterator, Sequence

import msgspec

from outlast.checkpoint._arena import Slot, touch
from outlast.checkpoint.manifest import UNREADABLE, Chunk, Damage, FileRef, Head, Part, PartRef, digest, seal
from outlast.checkpoint.store import DataWriter
from outlast.errors import CheckpointError, ConfigError

__all__ = ["Hold", "MemoryStore", "in_memory"]

_HEADER_BYTES = 4096
_HUGE = 2 << 20


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """What a slot's first page says while it is valid, after a line with its own digest."""

    save: str
    step: int
    view: tuple[int, int]
    run: str
    writer: int
    num_writers: int
    stream_bytes: int
    part_at: int
    part_bytes: int
    part_digest: str


class Hold:
    """Descriptors by replica on this host and by slot. The holder keeps it open; nothing else is needed to keep it."""

    def __init__(self, fds: Sequence[Sequence[int]]) -> None:
        self.fds = tuple(tuple(slots) for slots in fds)

    @classmethod
    def create(cls, num_replicas: int, num_slots: int = 2, *, name: str = "outlast") -> Hold:
        """Empty slots; they take memory when a trainer sizes them."""
        return cls([[os.memfd_create(f"{name}-{r}-{s}") for s in range(num_slots)] for r in range(num_replicas)])

    @classmethod
    def parse(cls, text: str) -> Hold:
        """Inverse of `str`: what the launcher put into the trainer's environment. Raises `ConfigError`."""
        try:
            fds = [[int(fd) for fd in slots.split(",")] for slots in text.split(";")]
            for fd in (fd for slots in fds for fd in slots):
                os.fstat(fd)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"{text!r} names no memory slots of this process: {error}",
                remedy="start the trainer through `outlast run`, which passes the descriptors on",
            ) from error
        return cls(fds)

    def __str__(self) -> str:
        return ";".join(",".join(str(fd) for fd in slots) for slots in self.fds)

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """For `subprocess.Popen(pass_fds=…)`."""
        return tuple(fd for slots in self.fds for fd in slots)

    @property
    def host_bytes(self) -> int:
        return sum(os.fstat(fd).st_blocks * 512 for fd in self.pass_fds)

    def close(self) -> None:
        for fd in self.pass_fds:
            os.close(fd)

    # the trainer's side

    def open_slot(self, replica: int, index: int, size_bytes: int) -> Slot:
        """Size and touch a slot, which invalidates what it held."""
        fd = self.fds[replica][index]
        total = -(-(_HEADER_BYTES + size_bytes) // _HUGE) * _HUGE
        os.ftruncate(fd, 0)
        os.ftruncate(fd, total)
        area = mmap.mmap(fd, total)
        touch(area)
        return Slot(index, area, _HEADER_BYTES)

    def clear(self, replica: int, index: int) -> None:
        """The slot is about to be overwritten."""
        os.pwrite(self.fds[replica][index], bytes(_HEADER_BYTES), 0)

    def seal(self, replica: int, slot: Slot, part: Part, *, step: int, view: tuple[int, int], run: str) -> None:
        """The slot holds the part's whole stream: from now on it can be loaded."""
        fd, data, at = self.fds[replica][slot.index], seal(part), len(slot.area)
        os.ftruncate(fd, at)
        _pwrite(fd, data, at)
        record = _Sealed(
            save=part.save,
            step=step,
            view=view,
            run=run,
            writer=part.writer,
            num_writers=part.num_writers,
            stream_bytes=part.stream_bytes,
            part_at=at,
            part_bytes=len(data),
            part_digest=digest(data),
        )
        body = msgspec.json.encode(record)
        os.pwrite(fd, digest(body).encode() + b"\n" + body + b"\n", 0)


def _pwrite(fd: int, data: bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


def _sealed(fd: int) -> _Sealed | None:
    lines = os.pread(fd, _HEADER_BYTES, 0).split(b"\n", 2)
    if len(lines) < 3 or digest(lines[1]).encode() != lines[0]:
        return None
    try:
        return msgspec.json.decode(lines[1], type=_Sealed)
    except UNREADABLE:
        return None


class MemoryStore:
    """The complete snapshots of a `Hold`, as a store that can only be read. See `Store`.

    Their generation numbers are their ranks by view and step, as they lie here when the store is made.
    """

    tier = "memory"

    def __init__(self, hold: Hold) -> None:
        self.url = f"memory of this host ({len(hold.fds)} replicas)"
        self._hold = hold
        found: dict[str, dict[int, tuple[int, _Sealed]]] = {}
        for fd in hold.pass_fds:
            record = _sealed(fd)
            if record is not None:
                found.setdefault(record.save, {})[record.writer] = (fd, record)
        complete = [slots for slots in found.values() if _is_complete(slots)]
        complete.sort(key=lambda slots: (slots[0][1].view, slots[0][1].step))
        self._files = {f"{r.save}-w{w}-m": (fd, r) for slots in complete for w, (fd, r) in slots.items()}
        self._heads = [_synthesise(number, slots) for number, slots in enumerate(complete)]

    def newest_slot(self, replica: int) -> int | None:
        """The slot of `replica` that the newest complete snapshot lies in."""
        if not self._heads or replica >= len(self._hold.fds):
            return None
        fds = [fd for fd, record in self._files.values() if record.save == self._heads[-1].save]
        return next((i for i, fd in enumerate(self._hold.fds[replica]) if fd in fds), None)

    def generations(self) -> list[int]:
        return list(range(len(self._heads)))

    def read_head(self, generation: int) -> bytes:
        return seal(self._heads[generation])

    def _record(self, name: str, suffix: str) -> tuple[int, _Sealed]:
        found = self._files.get(name.removesuffix(suffix))
        if found is None:
            raise Damage("is not in memory", file=name)
        return found

    def read_part(self, name: str, max_bytes: int) -> bytes:
        fd, record = self._record(name, ".json")
        return os.pread(fd, min(record.part_bytes, max_bytes), record.part_at)

    def open_data(self, name: str) -> MemoryReader:
        fd, record = self._record(name, ".bin")
        return MemoryReader(fd, record.stream_bytes, name)

    def names(self) -> list[str]:
        return sorted(f"{name}{suffix}" for name in self._files for suffix in (".json", ".bin"))

    def size(self, name: str) -> int | None:
        found = self._files.get(name.removesuffix(".bin"))
        return found[1].stream_bytes if found is not None else None

    @contextlib.contextmanager
    def in_use(self, generation: int) -> Iterator[bytes]:
        yield self.read_head(generation)

    # A store that is filled through `Hold.seal` and never by files.

    def create(self, name: str, size_bytes: int) -> DataWriter:
        raise CheckpointError("memory is written by snapshots only", where=name)

    def put_part(self, name: str, data: bytes) -> None:
        raise CheckpointError("memory is written by snapshots only", where=name)

    def barrier(self) -> None:
        """Nothing here is ever durable."""

    def publish(self, generation: int, head: bytes) -> bool:
        raise CheckpointError("memory is written by snapshots only")

    def replace_head(self, generation: int, head: bytes) -> None:
        raise CheckpointError("memory is written by snapshots only")

    def withdraw(self, generations: Collection[int]) -> list[int]:
        return []

    def discard(self, names: Collection[str], *, recycle: Collection[str] = ()) -> None:
        """Slots are overwritten by the next snapshot; there is nothing to give back."""

    def make_room(self) -> int:
        return 0


class MemoryReader:
    def __init__(self, fd: int, size_bytes: int, name: str) -> None:
        self.bytes, self._fd, self._name = size_bytes, fd, name

    def read(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], _HEADER_BYTES + offset + done)
            if count == 0:
                raise Damage("ends too early", file=self._name, offset=offset + done, bytes=len(buffer) - done)
            done += count

    def close(self) -> None:
        """The holder owns the descriptor."""


def _is_complete(slots: dict[int, tuple[int, _Sealed]]) -> bool:
    return all(set(slots) == set(range(record.num_writers)) for _, record in slots.values())


def _synthesise(number: int, slots: dict[int, tuple[int, _Sealed]]) -> Head:
    first = slots[0][1]
    parts = [
        PartRef(writer=w, name=f"{r.save}-w{w}-m.json", bytes=r.part_bytes, digest=r.part_digest)
        for w, (_, r) in sorted(slots.items())
    ]
    size = sum(record.stream_bytes for _, record in slots.values())
    return Head(
        format=1,
        generation=number,
        step=first.step,
        view=first.view,
        save=first.save,
        run=first.run,
        certified=False,
        created_s=0.0,
        bytes=size,
        parts=parts,
    )


def in_memory(part: Part, stream: memoryview, chunk_bytes: int) -> Part:
    """The part as it describes its own slot's stream, in chunks of so many bytes."""
    cuts = [(at, min(at + chunk_bytes, part.stream_bytes)) for at in range(0, part.stream_bytes, chunk_bytes)]
    chunks = [Chunk(0, low, high - low, digest(stream[low:high])) for low, high in cuts]
    files = [FileRef(name=f"{part.save}-w{part.writer}-m.bin", bytes=part.stream_bytes)] if chunks else []
    return msgspec.structs.replace(part, files=files, chunks=chunks)
