"""One replica's checkpoints: saving beside training, and loading what is newest and whole. torch.

Role: ties plan, arena, snapshot, writer, tiers and retention together for one process; see the package's docstring
for how a runtime drives it. Invariants: `save` and `wait_copied` never raise because a disk or a network failed; what
a replica will not write it does not stage; host memory is `num_slots` streams and no more. Decides nothing about
when to save or whether a save may be published: that is `core.policy` and `core.protocol._commit`.
"""

from __future__ import annotations

import concurrent.futures
import errno
import fnmatch
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from outlast.checkpoint import _events as events
from outlast.checkpoint._arena import Arena, Slot
from outlast.checkpoint._drain import Drain, drain
from outlast.checkpoint._ladder import Candidate, first_valid
from outlast.checkpoint._load import fill, fresh, match, rebuild, select
from outlast.checkpoint._manifest import FORMAT, Chunk, FileRef, Part, digest
from outlast.checkpoint._memory import Hold, MemoryStore, memory_name
from outlast.checkpoint._plan import Layout, plan
from outlast.checkpoint._publish import publish, report_of
from outlast.checkpoint._reader import Reader, Skip
from outlast.checkpoint._retention import Pruned, Retention, prune
from outlast.checkpoint._snapshot import Snapshot
from outlast.checkpoint._stage import copies_of
from outlast.checkpoint._store import Store, open_store
from outlast.checkpoint._tensors import Schema, State, flatten
from outlast.checkpoint._writer import CHUNK_BYTES, Base, Written, base_of, write_part
from outlast.core.protocol._commit import PartReport, SaveId
from outlast.errors import CheckpointError

__all__ = ["Engine", "Handle", "LoadedState"]

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NICE_WRITE, _NICE_DRAIN = 7, 10  # at 10, beside a loop on every core, hashing took longer than writing


class LoadedState(NamedTuple):
    """`tree`: the state (None for a load by name pattern); `tensors`: what was loaded, by name; sizes by tier."""

    tree: Any
    tensors: dict[str, torch.Tensor]
    step: int
    generation: int
    view: tuple[int, int]
    certified: bool
    tier: str
    extra: dict[str, str]
    skipped: list[Skip]
    bytes_read: dict[str, int]


class Handle:
    """One save under way. `durable` resolves to the report that the coordinator waits for, or to the failure."""

    def __init__(self, save: SaveId, snapshot: Snapshot, slot: Slot, part: Part, timeout_s: float) -> None:
        self.save, self.part = save, part
        self.staged_bytes, self.state_bytes, self.written_bytes = part.stream_bytes, 0, 0
        self.durable: concurrent.futures.Future[PartReport] = concurrent.futures.Future()
        self.copied_s = self.durable_s = float("nan")
        self._snapshot, self._slot, self._timeout_s = snapshot, slot, timeout_s

    def wait_copied(self, names: Collection[str] | None = None) -> None:
        """Call before overwriting these tensors (all by default), as the optimizer step does. Helps copying."""
        self._snapshot.wait_for(names, timeout_s=self._timeout_s)

    @property
    def copied(self) -> bool:
        return self._snapshot.copied.is_set()


class Engine:
    """`target`: a directory, a URL or a `Store`. `replica` of `num_replicas` says what of a shared state is ours.

    `drain_to`: a farther store, filled in the background. `hold`: memory that outlives us, `local_replica` our place
    in it. `host_bytes` states what the snapshots take. `on_event` and `probe` are called from several threads.
    Raises `ConfigError` for a target of no known kind.
    """

    def __init__(
        self,
        target: str | Store,
        *,
        replica: int = 0,
        num_replicas: int = 1,
        run: str = "",
        drain_to: str | Store | None = None,
        hold: Hold | None = None,
        local_replica: int | None = None,
        num_slots: int = 2,
        retention: Retention | None = None,
        incremental: bool = True,
        num_retries: int = 2,
        retry_s: float = 0.5,
        timeout_s: float = 600.0,
        writer_of: Callable[[int], int] | None = None,
        on_event: Callable[[events.CheckpointEvent], None] | None = None,
        probe: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        nonce: Callable[[], str] | None = None,
    ) -> None:
        self.store = open_store(target) if isinstance(target, str) else target
        self.far = open_store(drain_to) if isinstance(drain_to, str) else drain_to
        self.replica, self.num_replicas, self.run = replica, num_replicas, run
        self.retention = retention if retention is not None else Retention()
        self._hold, self._local = hold, replica if local_replica is None else local_replica
        self._incremental, self._num_retries, self._retry_s = incremental, num_retries, retry_s
        self._timeout_s, self._writer_of = timeout_s, writer_of
        self._tell = on_event if on_event is not None else lambda event: None
        self._probe = probe if probe is not None else lambda phase: None
        self._clock, self._wall = clock, wall
        self._nonce = nonce if nonce is not None else lambda: secrets.token_hex(4)
        self._arena = Arena(num_slots, None if hold is None else self._held_slot)
        self._keep: frozenset[int] = frozenset() if hold is None else self._newest_in_memory(hold)
        self._copier = concurrent.futures.ThreadPoolExecutor(1, "outlast-copy")
        self._writers = concurrent.futures.ThreadPoolExecutor(num_slots, "outlast-write", _be_nice, (_NICE_WRITE,))
        self._publisher = concurrent.futures.ThreadPoolExecutor(1, "outlast-publish")
        self._drainer = concurrent.futures.ThreadPoolExecutor(1, "outlast-drain", _be_nice, (_NICE_DRAIN,))
        self._closing = threading.Event()
        self._plans: dict[tuple[str, int], list[Layout]] = {}
        self._schema: Schema | None = None
        self._base: Base = {}
        self._handles: dict[SaveId, Handle] = {}
        self._known: dict[int, dict[str, int]] = {}
        self.newest_drain: Drain | None = None

    # memory

    def _held_slot(self, index: int, size_bytes: int) -> Slot:
        assert self._hold is not None
        return self._hold.open_slot(self._local, index, size_bytes)

    def _newest_in_memory(self, hold: Hold) -> frozenset[int]:
        """Our slot of the newest complete snapshot must survive until a newer one is published."""
        index = MemoryStore(hold).newest_slot(self._local)
        return frozenset() if index is None else frozenset({index})

    @property
    def host_bytes(self) -> int:
        """What the snapshot slots take now; `num_slots` times this replica's share when all exist."""
        return self._arena.host_bytes

    def prepare(self, tree: Any) -> int:
        """Plan, allocate and touch the slots before the first save. Returns this replica's share in bytes."""
        _, layout = self._planned(tree)
        self._arena.reserve(layout.stream_bytes, keep=self._keep)
        return layout.stream_bytes

    def prepare_later(self, tree: Any) -> concurrent.futures.Future[None]:
        """As `prepare`, but the slots are made beside training. The tree is not looked at after this returns."""
        _, layout = self._planned(tree)
        return self._publisher.submit(self._arena.reserve, layout.stream_bytes, keep=self._keep)

    @property
    def can_save(self) -> bool:
        """Whether a slot is free just now."""
        return self._arena.has_free(keep=self._keep)

    def set_members(self, replica: int, num_replicas: int) -> None:
        """The view changed: other shares from the next save on."""
        self.replica, self.num_replicas = replica, num_replicas

    def _planned(self, tree: Any) -> tuple[State, Layout]:
        """The state, and this replica's share of it."""
        state = flatten(tree, writer_of=self._writer_of, like=self._schema)
        self._schema = state.schema
        sharded = [shards for shards in state.shards if shards is not None]
        key = (f"{state.schema.digest} {sharded}", self.num_replicas)
        if key not in self._plans:
            self._plans = {key: plan(state.specs, state.shards, self.num_replicas)}
        return state, self._plans[key][self.replica]

    # saving

    def save(
        self,
        step: int,
        tree: Any,
        *,
        view: tuple[int, int] = (0, 0),
        attempt: int = 0,
        changing: Sequence[str] = (),
        wait: bool = False,
    ) -> Handle | None:
        """Begin to save the state after `step`. Returns at once; None if no slot is free (the save is delayed).

        `changing`: patterns of tensors that change inside a step (buffers, loop state): copied before this returns.
        `wait`: wait for a slot instead. Raises `ConfigError` if the tree holds what cannot be kept.
        """
        began_s = self._clock()
        save = SaveId(epoch=view[0], n=view[1], step=step, attempt=attempt)
        state, layout = self._planned(tree)
        slot = self._lease(layout.stream_bytes, step, wait=wait)
        if slot is None:
            return None
        snapshot = Snapshot(copies_of(state, layout, slot), layout.stream_bytes, clock=self._clock)
        if changing:
            names = [spec.name for spec in state.specs]
            snapshot.copy_now({n for n in names if any(fnmatch.fnmatchcase(n, p) for p in changing)})
        handle = Handle(save, snapshot, slot, self._part(save, state, layout), self._timeout_s)
        self._handles[save] = handle
        handle.state_bytes = sum(spec.bytes for spec in state.specs)
        self._tell(events.SaveBegan(
            save=save.token, step=step, writer=self.replica, staged_bytes=layout.stream_bytes,
            state_bytes=handle.state_bytes,
        ))  # fmt: skip
        self._probe("save.began")
        self._copier.submit(snapshot.run)
        work = self._writers.submit(self._write, handle, began_s)
        work.add_done_callback(lambda done: self._ended(handle, done))
        return handle

    def _lease(self, size_bytes: int, step: int, *, wait: bool) -> Slot | None:
        """A slot, at once or (with `wait`) when one is free; None delays the save, and its reason is told."""
        if not wait and self._arena.is_too_small(size_bytes, keep=self._keep):
            # The share grew with a view change. Faulting pages in takes longer than a step may: beside it, then.
            self._publisher.submit(self._arena.reserve, size_bytes, keep=self._keep)
            self._tell(events.SaveDelayed(step=step, reason="the snapshot slots are being enlarged"))
            return None
        slot = self._arena.lease(size_bytes, keep=self._keep)
        while slot is None and wait and not self._closing.is_set():
            busy = [h.durable for h in self._handles.values() if not h.durable.done()]
            if not busy:
                break
            concurrent.futures.wait(busy, self._timeout_s, concurrent.futures.FIRST_COMPLETED)
            slot = self._arena.lease(size_bytes, keep=self._keep)
        if slot is None:
            self._tell(events.SaveDelayed(step=step, reason="every snapshot slot is still being written"))
        elif self._hold is not None:
            self._hold.clear(self._local, slot.index)
        return slot

    def _part(self, save: SaveId, state: State, layout: Layout) -> Part:
        first = self.replica == 0
        return Part(
            format=FORMAT, save=save.token, writer=self.replica, num_writers=self.num_replicas,
            schema=state.schema.digest, stream_bytes=layout.stream_bytes, files=[], chunks=[],
            pieces=list(layout.pieces), tensors=state.specs if first else None, tree=state.tree if first else None,
        )  # fmt: skip

    def _write(self, handle: Handle, began_s: float) -> PartReport:
        """The background's half of a save: seal the memory, write, promise. Retries what the store refuses."""
        part, slot = handle.part, handle._slot
        stream = slot.view[: part.stream_bytes]
        base = self._base if self._incremental else {}
        if self._hold is not None:
            handle._snapshot.ready(part.stream_bytes, timeout_s=self._timeout_s)
            self._seal(handle, stream)
        for attempt in range(self._num_retries + 1):
            name = f"{handle.save.token}-w{part.writer:04d}-{self._nonce()}"
            try:
                written = write_part(
                    self.store, stream, part, name=name, base=base, probe=self._probe,
                    wait=lambda end: handle._snapshot.ready(end, timeout_s=self._timeout_s),
                )  # fmt: skip
                break
            except OSError as error:
                self._after_refusal(handle, attempt, error)
        handle.part, handle.written_bytes = written.part, written.written_bytes
        handle.copied_s, handle.durable_s = handle._snapshot.copied_at_s - began_s, self._clock() - began_s
        self._tell_durable(handle, written)
        return report_of(written.ref, part.schema)

    def _after_refusal(self, handle: Handle, attempt: int, error: OSError) -> None:
        """Within the budget: make room if that is what is lacking, and wait a little. Beyond it: give up."""
        reason = f"{type(error).__name__}: {error}"
        if attempt == self._num_retries or self._closing.is_set():
            raise CheckpointError(
                f"writer {handle.part.writer} could not write step {handle.save.step}: {reason}",
                where=self.store.url,
                did=f"tried {attempt + 1} times; the save is dropped, training goes on, older generations stay",
                remedy="free space on, or repair, the checkpoint target",
            ) from error
        self._tell(events.SaveRetried(
            save=handle.save.token, writer=handle.part.writer, attempt=attempt + 1, reason=reason,
        ))  # fmt: skip
        if error.errno in _NO_SPACE:
            self.store.make_room()
        self._closing.wait(self._retry_s * 2**attempt)

    def _seal(self, handle: Handle, stream: memoryview) -> None:
        assert self._hold is not None
        part, save = handle.part, handle.save
        name = memory_name(save.token, part.writer)
        bounds = range(0, part.stream_bytes, CHUNK_BYTES)
        cuts = [(at, min(at + CHUNK_BYTES, part.stream_bytes)) for at in bounds]
        chunks = [Chunk(0, low, high - low, digest(stream[low:high])) for low, high in cuts]
        files = [FileRef(name=name, bytes=part.stream_bytes)] if chunks else []
        mine = msgspec.structs.replace(part, files=files, chunks=chunks)
        self._hold.seal(self._local, handle._slot, mine, step=save.step, view=save.view, run=self.run)
        self._probe("save.sealed")

    def _tell_durable(self, handle: Handle, written: Written) -> None:
        self._tell(events.SaveDurable(
            save=handle.save.token, step=handle.save.step, writer=handle.part.writer,
            stream_bytes=handle.part.stream_bytes, written_bytes=written.written_bytes,
            copied_s=handle.copied_s, durable_s=handle.durable_s,
        ))  # fmt: skip

    def _ended(self, handle: Handle, done: concurrent.futures.Future[PartReport]) -> None:
        """Runs once, in the writer's thread, whatever became of the save."""
        error = done.exception()
        if error is not None or self._hold is None:
            self._arena.release(handle._slot)
        if error is None:
            handle.durable.set_result(done.result())
            return
        self._handles.pop(handle.save, None)
        self._tell(events.SaveFailed(
            save=handle.save.token, step=handle.save.step, writer=handle.part.writer, reason=str(error),
        ))  # fmt: skip
        handle.durable.set_exception(error)

    # publishing

    def publish(self, save: SaveId, reports: Iterable[PartReport], *, certified: bool = False,
                extra: dict[str, str] | None = None) -> int:  # fmt: skip
        """Carry out a `Publish` action: returns the generation's number. See `_publish.publish` for what it raises."""
        self._probe("publish.began")
        number = publish(
            self.store, save, reports, created_s=self._wall(), run=self.run, certified=certified, extra=extra
        )
        self._tell(events.PublishedGeneration(
            save=save.token, step=save.step, generation=number, certified=certified, url=self.store.url,
        ))  # fmt: skip
        self._probe("publish.done")
        return number

    def settle(self, save: SaveId, generation: int | None) -> None:
        """What became of a save: published as `generation`, or (None) abandoned. Frees its slot, moves the base on."""
        handle = self._handles.pop(save, None)
        if handle is None:
            return
        if generation is not None:
            self._base = base_of([handle.part])
        if self._hold is not None:
            if generation is not None:
                self._keep = frozenset({handle._slot.index})
            self._arena.release(handle._slot)

    def commit(self, handle: Handle, *, certified: bool = False, extra: dict[str, str] | None = None) -> int:
        """For a fleet of one: wait until durable, publish, settle, prune, and start to drain."""
        report = handle.durable.result(self._timeout_s)
        generation = self.publish(handle.save, [report], certified=certified, extra=extra)
        self.settle(handle.save, generation)
        try:
            self.prune()
        except OSError as error:  # the generation stands; old ones go another time
            self._tell(events.Pruned(generations=[], freed_bytes=0, note=str(error)))
        self.drain(generation)
        return generation

    def commit_later(self, handle: Handle, *, certified: bool = False) -> concurrent.futures.Future[int]:
        """`commit` in the background, one after the other: the training loop goes on. Failures are in the future."""
        return self._publisher.submit(self.commit, handle, certified=certified)

    def prune(self, *, protected: Collection[int] = ()) -> Pruned:
        """Apply the retention policy to the store; for the one process that publishes. Raises `OSError`."""
        done = prune(self.store, self.retention, protected=protected, known=self._known)
        if done.generations or done.note:
            self._tell(events.Pruned(generations=done.generations, freed_bytes=done.freed_bytes, note=done.note))
        return done

    # draining

    def drain(self, generation: int) -> concurrent.futures.Future[int] | None:
        """Copy a generation to the farther store in the background; `newest_drain` is its progress.

        A farther store that is slower than the saves gets the newest generation each time it is free, not all of
        them: nothing piles up. The future is the number of bytes sent, 0 for a generation that was passed over.
        """
        if self.far is None:
            return None
        state = self.newest_drain = Drain(generation)
        return self._drainer.submit(self._drain, state)

    def _drain(self, state: Drain) -> int:
        assert self.far is not None
        if state is not self.newest_drain:
            return 0
        began_s = self._clock()
        for attempt in range(self._num_retries + 1):
            try:
                state.done_bytes = 0
                drain(self.store, self.far, state.generation, progress=state, stop=self._closing.is_set)
                prune(self.far, self.retention)
                break
            except (OSError, CheckpointError) as error:
                if attempt == self._num_retries or self._closing.is_set():
                    reason = f"{type(error).__name__}: {error}"
                    self._tell(events.DrainFailed(generation=state.generation, url=self.far.url, reason=reason))
                    raise
                self._closing.wait(self._retry_s * 2**attempt)
        self._tell(events.Drained(
            generation=state.generation, url=self.far.url, copied_bytes=state.sent_bytes,
            seconds=self._clock() - began_s,
        ))  # fmt: skip
        return state.sent_bytes

    # loading

    def load(
        self,
        *,
        into: Any = None,
        names: Sequence[str] | None = None,
        strict: bool = True,
        generation: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> LoadedState | None:
        """The newest generation that is whole, nearest tier first; None if there is none at all.

        `into`: a state whose tensors are filled in place (plain or DTensor, of any sharding); what does not fit is an
        error unless `strict` is off: then it is loaded into new memory, and missing tensors are left alone. `names`:
        only tensors whose name matches a pattern. `generation`: only this one.
        Raises `CheckpointError` if there are generations and none serves, or if the state does not fit.
        """
        began_s, skipped = self._clock(), list[Skip]()

        def note(skip: Skip) -> None:
            skipped.append(skip)
            self._tell(events.Skipped(**skip._asdict()))

        def use(reader: Reader, candidate: Candidate) -> LoadedState:
            return self._use(reader, candidate, into, names, strict, skipped, progress)

        # Snapshots in memory have no generation's number.
        near: list[Store] = [MemoryStore(self._hold)] if self._hold is not None and generation is None else []
        far = [self.far] if self.far is not None else []
        loaded = first_valid([*near, self.store, *far], use, note=note, generation=generation)
        if loaded is not None:
            self._tell(events.Loaded(
                generation=loaded.generation, step=loaded.step, tier=loaded.tier, bytes_read=loaded.bytes_read,
                seconds=self._clock() - began_s,
            ))  # fmt: skip
        return loaded

    def _use(
        self, reader: Reader, candidate: Candidate, into: Any, names: Sequence[str] | None, strict: bool,
        skipped: list[Skip], progress: Callable[[int], None] | None,
    ) -> LoadedState:  # fmt: skip
        if into is None:
            tensors = fresh(reader, select(reader.tensors, names), progress)
        else:
            tensors = self._fill(reader, into, names, strict, progress)
        tree = None
        if names is None and len(tensors) == len(reader.tensors):
            tree = rebuild(reader, tensors, "was not loaded")
        if self.store in candidate.stores and candidate.head.generation == max(self.store.generations()):
            self._base = base_of(reader.parts)
        head = reader.head
        return LoadedState(
            tree, {reader.tensors[i].name: t for i, t in tensors.items()}, head.step, head.generation, head.view,
            head.certified, candidate.stores[0].tier, head.extra, skipped, dict(reader.bytes_read),
        )  # fmt: skip

    def _fill(
        self, reader: Reader, into: Any, names: Sequence[str] | None, strict: bool,
        progress: Callable[[int], None] | None,
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        found = flatten(into, writer_of=self._writer_of)
        pairs, difference = match(reader, found, names)
        if strict and difference:
            raise CheckpointError(
                f"the state does not fit generation {reader.head.generation}:\n{difference}",
                where=self.store.url,
                did="nothing was loaded",
                remedy="load with strict=False to take what fits, or name patterns to take a part",
            )
        fill(reader, pairs, found.local, progress)
        tensors = {theirs: found.tensors[ours] for ours, theirs in pairs.items()}
        rest = [i for i in select(reader.tensors, names) if i not in tensors]
        return tensors | (fresh(reader, rest, progress) if rest else {})

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads. With `wait`, saves and drains under way end first; else they stop at their next chunk."""
        if not wait:
            self._closing.set()
        for pool in (self._copier, self._writers, self._publisher, self._drainer):
            pool.shutdown(wait=wait)


def _be_nice(level: int) -> None:
    """Background threads yield the processor to training where the two compete."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), level)
