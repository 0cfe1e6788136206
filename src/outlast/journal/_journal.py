"""The journal of one run: events for people and tools, and the coordinator's durable record.

Role: the facade. A writer (`create`, `open_writer`) holds the run's lock; readers (`open_reader`) hold nothing and
change nothing. Invariants: `put` is durable before it returns and never waits for events; `append` never waits for
the disk. It does not decide what to write, and keeps no clock.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from outlast.core.events import AnyEvent, decode
from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal._faults import damaged, os_fault, sqlite_fault
from outlast.journal._files import EVENTS_NAME, holds_run, open_read_only, sync_directory
from outlast.journal._filesystem import check_local
from outlast.journal._lock import RunLock
from outlast.journal._record import Record
from outlast.journal._writer import EventWriter, tag_of

if TYPE_CHECKING:
    from outlast.journal._etcd import Access
    from outlast.journal._shared import SharedRecord

__all__ = ["Entry", "Journal"]

FLUSH_S = 10.0
_PART = 2000  # entries that are read at a time


class Entry(NamedTuple):
    """An event and its place in the file; `seq` rises by at least one from event to event."""

    seq: int
    event: AnyEvent


class Journal:
    """Use `create`, `open_writer` or `open_reader`. A context manager; `close` keeps what was appended."""

    def __init__(self, run_dir: Path, *, record: Record, writer: EventWriter | None, lock: RunLock | None) -> None:
        self.run_dir = run_dir
        self._record, self._writer, self._lock = record, writer, lock
        self._shared: SharedRecord | None = None
        try:
            self._reader = open_read_only(run_dir, EVENTS_NAME)
        except (ConfigError, EnvironmentFault):
            self._release()
            raise
        self._mutex = threading.Lock()

    @classmethod
    def create(cls, run_dir: Path, *, lock_fd: int | None = None) -> Journal:
        """Make `run_dir` (and its parents) into a new run, and open it to write.

        Raises EnvironmentFault for a network file system, a full or read-only disk and a directory in use;
        ConfigError for a directory that already holds a run.
        """
        check_local(run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise os_fault(error, run_dir) from error
        lock = RunLock.take(run_dir) if lock_fd is None else RunLock.adopt(run_dir, lock_fd)
        if holds_run(run_dir):
            lock.release()
            raise ConfigError(f"{run_dir} already holds a run", remedy="give --run-dir a new directory")
        journal = cls._open(run_dir, lock, create=True)
        sync_directory(run_dir)
        sync_directory(run_dir.parent)
        return journal

    @classmethod
    def open_writer(cls, run_dir: Path, *, lock_fd: int | None = None) -> Journal:
        """Open an existing run to write: a coordinator's restart.

        `lock_fd`: the run's lock, if it was inherited; the journal closes it with itself.

        Raises EnvironmentFault (see `create`; a damaged file or one of a newer format too), ConfigError without a run.
        """
        check_local(run_dir)
        if not holds_run(run_dir):
            raise ConfigError(f"{run_dir} holds no run", remedy="start one with outlast run --run-dir")
        lock = RunLock.take(run_dir) if lock_fd is None else RunLock.adopt(run_dir, lock_fd)
        return cls._open(run_dir, lock, create=False)

    @classmethod
    def open_reader(cls, run_dir: Path) -> Journal:
        """Open a run to read, whether it is running or not. Blocks nobody. Raises ConfigError, EnvironmentFault."""
        return cls(run_dir, record=Record.open(run_dir, write=False), writer=None, lock=None)

    @classmethod
    def _open(cls, run_dir: Path, lock: RunLock, *, create: bool) -> Journal:
        record = None
        try:
            record = Record.open(run_dir, write=True, create=create)
            writer = EventWriter(run_dir, create=create)
        except (ConfigError, EnvironmentFault):
            if record is not None:
                record.close()
            lock.release()
            raise
        return cls(run_dir, record=record, writer=writer, lock=lock)

    def sharing(self, access: Access, run: str, secret: bytes, lease_s: float) -> SharedRecord:
        """The record that this run's hosts have in common; copies of it are kept here. Not used before `share`."""
        from outlast.journal._shared import SharedRecord

        self._writing()
        return SharedRecord(access, run, secret, lease_s, self._record)

    def share(self, shared: SharedRecord) -> None:
        """From now on `shared`, whose turn was taken, is the record; what is appended goes there too. It is closed
        with this journal. Of a run that only begins, the others are told what stands here already."""
        if shared.claim("") == 1:
            shared.append(entry.event for entry in self.events())
        self._shared = shared

    def append(self, event: AnyEvent) -> None:
        """Take one event for writing; returns at once."""
        self.append_many([event])

    def append_many(self, events: Iterable[AnyEvent]) -> None:
        """Take events for writing, in one transaction if none are waiting; returns at once."""
        told = list(events)
        self._writing().append(told)
        if self._shared is not None:
            self._shared.append(told)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all appended events are on the disk; False if it refuses (see `trouble`) or time is up."""
        return self._writing().flush(timeout_s)

    @property
    def trouble(self) -> str | None:
        """Why events are not reaching the disk just now (they are held in memory), or None."""
        return None if self._writer is None else self._writer.trouble

    def events(
        self, since_seq: int = 0, kinds: Sequence[type[AnyEvent]] | None = None, *, limit: int | None = None
    ) -> list[Entry]:
        """Entries with `seq > since_seq`, oldest first; `kinds`: event classes to keep; at most `limit`.

        A writer sees what it has flushed. Raises EnvironmentFault for a body that cannot be read.
        """
        query = "SELECT seq, body FROM events WHERE seq > ?"
        values: list[int | str] = [since_seq, *(tag_of(kind) for kind in kinds or ())]
        if kinds is not None:
            query += f" AND kind IN ({','.join('?' * len(kinds))})"
        rows = self._query(f"{query} ORDER BY seq LIMIT ?", [*values, -1 if limit is None else limit])
        return [self._entry(*row) for row in rows]

    def each(self, since_seq: int = 0) -> Iterator[Entry]:
        """Entries with `seq > since_seq`, oldest first, of which few are in memory at a time. Raises
        EnvironmentFault."""
        while part := self.events(since_seq, limit=_PART):
            yield from part
            since_seq = part[-1].seq

    def each_at(self, times: Set[float]) -> Iterator[Entry]:
        """Entries whose `at_s` is one of these, oldest first. The others are not decoded, so that a long journal takes
        little. Raises EnvironmentFault."""
        seq = 0
        while part := self._query("SELECT seq, at_s FROM events WHERE seq > ? ORDER BY seq LIMIT ?", [seq, _PART]):
            for seq, at_s in part:
                if at_s in times:
                    yield from self.events(seq - 1, limit=1)

    def bodies(self, kind: type[AnyEvent], since_seq: int, before_seq: int, *, limit: int) -> list[tuple[int, str]]:
        """(seq, JSON) of a kind's entries between two places, oldest first, for who needs a part of each only. Raises
        EnvironmentFault."""
        query = "SELECT seq, body FROM events WHERE kind = ? AND seq > ? AND seq < ? ORDER BY seq LIMIT ?"
        return self._query(query, [tag_of(kind), since_seq, before_seq, limit])

    def newest_bodies(self, kind: type[AnyEvent], count: int, last_seq: int) -> list[tuple[int, str]]:
        """(seq, JSON) of the last `count` entries of a kind up to `last_seq`, oldest first. Raises EnvironmentFault."""
        query = "SELECT seq, body FROM events WHERE kind = ? AND seq <= ? ORDER BY seq DESC LIMIT ?"
        return self._query(query, [tag_of(kind), last_seq, count])[::-1]

    def newest(self, kind: type[AnyEvent], count: int = 1) -> list[Entry]:
        """The last `count` entries of a kind, oldest first, however long the journal is. Raises EnvironmentFault."""
        query = "SELECT seq, body FROM events WHERE kind = ? ORDER BY seq DESC LIMIT ?"
        return [self._entry(*row) for row in reversed(self._query(query, [tag_of(kind), count]))]

    def latest(self, last_seq: int) -> list[Entry]:
        """The entry up to `last_seq` with the latest time, alone in a list, which is empty for none. Not always the
        newest: some are written down later than they happened. Raises EnvironmentFault."""
        near = "SELECT seq, at_s FROM events WHERE seq <= ? ORDER BY seq DESC LIMIT ?"
        found = self._query(f"SELECT seq, at_s FROM ({near}) ORDER BY at_s DESC, seq DESC LIMIT 1", [last_seq, _PART])
        return self.events(found[0][0] - 1, limit=1) if found else []

    def sample(self, kind: type[AnyEvent], count: int) -> list[Entry]:
        """At most about `count` entries of a kind, spread evenly over the journal, oldest first; all of them where the
        journal is short. Takes as long for a million entries as for a thousand. Raises EnvironmentFault."""
        last = self.last_seq
        if last <= 4 * count:
            return self.events(kinds=[kind])
        query = "SELECT seq, body FROM events WHERE kind = ? AND seq >= ? ORDER BY seq LIMIT 1"
        places = [1 + (last - 1) * place // max(1, count - 1) for place in range(count)]
        rows = {row[0]: row for at in places for row in self._query(query, [tag_of(kind), at])}
        return [self._entry(*row) for _, row in sorted(rows.items())]

    @property
    def last_seq(self) -> int:
        """The newest entry's number; 0 for none. Whoever follows asks for `events(since_seq=…)`."""
        return int(self._query("SELECT coalesce(max(seq), 0) FROM events", [])[0][0])

    def claim(self, owner: str = "") -> int:
        """A new epoch, higher than all before; durable on return. Raises EnvironmentFault."""
        self._writing()
        return self._store.claim(owner)

    def put(self, epoch: int, key: str, value: bytes) -> bool:
        """Store a record; True when it is on the disk, False when a higher epoch was claimed and nothing was written.

        Raises ProtocolViolation for an epoch that nobody claimed, EnvironmentFault if the disk refuses.
        """
        self._writing()
        return self._store.put(epoch, key, value)

    def get(self, key: str) -> bytes | None:
        """The newest value stored under `key`, or None."""
        return self._store.get(key)

    def put_here(self, epoch: int, key: str, value: bytes) -> bool:
        """As `put`, but in this host's own record, also where hosts share one: for what is said of this journal, whose
        entries have other numbers than another host's. `epoch`: a claim that is known here, or 0 before the first."""
        self._writing()
        return self._record.put(epoch, key, value)

    def get_here(self, key: str) -> bytes | None:
        """The newest value that `put_here` stored under `key`, or None."""
        return self._record.get(key)

    @property
    def epoch_here(self) -> int:
        """The highest epoch that this host's own record knows of; 0 before the first."""
        return self._record.newest_epoch()

    @property
    def epoch(self) -> int:
        """The highest epoch claimed; 0 before the first."""
        return self._store.newest_epoch()

    @property
    def held(self) -> bool:
        """Whether nobody can have claimed a higher epoch: on one host the record says so at each write."""
        return self._shared is None or self._shared.held

    @property
    def confirmed_s(self) -> float:
        """Say when, by this host's monotonic clock, nobody had claimed a higher epoch yet. On one host whoever has just
        read `epoch` knows it of the present."""
        return math.inf if self._shared is None else self._shared.confirmed_s

    def tell_end(self, exit_code: int, within_s: float = FLUSH_S) -> bool:
        """The run is over: for those on other hosts who would coordinate next. Whether they can know it."""
        return self._shared is None or self._shared.end(exit_code, within_s)

    @property
    def _store(self) -> Record | SharedRecord:
        return self._shared or self._record

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Write what was appended and release the run; False if events were lost (the disk refused to the end).

        What is appended afterwards is dropped: a run that ends is not to fail on its last words.
        """
        with self._mutex:
            self._reader.close()
        return self._release(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _release(self, timeout_s: float = FLUSH_S) -> bool:
        kept = self._writer is None or self._writer.close(timeout_s)
        if self._shared is not None:
            self._shared.close()
        self._record.close()
        if self._lock is not None:
            self._lock.release()
        return kept

    def _writing(self) -> EventWriter:
        if self._writer is None:
            raise ValueError("this journal was opened to read; use Journal.open_writer")
        return self._writer

    def _query(self, query: str, values: list[int | str]) -> list[tuple[int, Any]]:
        try:
            with self._mutex:
                return self._reader.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise sqlite_fault(error, self.run_dir / EVENTS_NAME, reading=True) from error

    def _entry(self, seq: int, body: str) -> Entry:
        try:
            return Entry(seq, decode(body))
        except msgspec.DecodeError as error:
            raise damaged(self.run_dir / EVENTS_NAME, f"event {seq}: {error}") from error
