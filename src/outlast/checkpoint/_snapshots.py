"""Snapshots and their parts: memory, copying in the read-only window, and writing this replica's share.

What an engine has is put together here, once. Publishing, loading, pruning and draining are `_engine.py`'s.
"""

from __future__ import annotations

import concurrent.futures
import fnmatch
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from outlast.checkpoint import save_events as events
from outlast.checkpoint._arena import Arena, Growth, Slot
from outlast.checkpoint._handle import COPY_S, Handle
from outlast.checkpoint._memory import Hold, MemoryStore, in_memory
from outlast.checkpoint._open import open_store
from outlast.checkpoint._plan import PartLayout, plan
from outlast.checkpoint._publish import report_of
from outlast.checkpoint._stage import copies_of
from outlast.checkpoint._writer import CHUNK_BYTES, Base, Written, write_part
from outlast.checkpoint.draining import Drainer
from outlast.checkpoint.manifest import FORMAT, Part
from outlast.checkpoint.neighbours import Neighbours
from outlast.checkpoint.retention import Retention
from outlast.checkpoint.room import is_full
from outlast.checkpoint.snapshot import Snapshot
from outlast.checkpoint.state_tensors import FlatState, Schema, flatten
from outlast.checkpoint.store import Store
from outlast.checkpoint.threads import Threads, be_nice
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.errors import CheckpointError

__all__ = ["SnapshotWriter"]

_NICE_WRITE, _NICE_DRAIN = 7, 10  # at 10, beside a loop on every core, hashing took longer than writing


class SnapshotWriter:
    """Takes snapshots of a state, and hands their bytes to storage."""

    def __init__(
        self,
        target: str | Store,
        *,
        replica: int = 0,
        num_replicas: int = 1,
        run: str = "",
        extra: dict[str, str] | None = None,
        drain_to: str | Store | None = None,
        hold: Hold | None = None,
        local_replica: int | None = None,
        num_slots: int = 2,
        retention: Retention | None = None,
        incremental: bool = True,
        num_retries: int = 2,
        retry_s: float = 0.5,
        timeout_s: float = 600.0,
        writer_of: Callable[[int], int | Sequence[int]] | None = None,
        on_event: Callable[[events.CheckpointEvent], None] | None = None,
        probe: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        nonce: Callable[[], str] | None = None,
    ) -> None:
        self.store = open_store(target) if isinstance(target, str) else target
        self.far = open_store(drain_to) if isinstance(drain_to, str) else drain_to
        self.replica, self.num_replicas, self.run, self._extra = replica, num_replicas, run, extra
        self.retention = retention if retention is not None else Retention()
        self._hold, self._local = hold, replica if local_replica is None else local_replica
        self._incremental, self._num_retries, self._retry_s = incremental, num_retries, retry_s
        self._timeout_s, self._writer_of, self._clock, self._wall = timeout_s, writer_of, clock, wall
        self._tell = on_event if on_event is not None else lambda event: None
        self._probe = probe if probe is not None else lambda phase: None
        self._nonce = nonce if nonce is not None else lambda: secrets.token_hex(4)
        self._arena = Arena(num_slots, None if hold is None else self._held_slot)
        self._keep: frozenset[int] = frozenset() if hold is None else self._newest_in_memory(hold)
        self._make_threads(num_slots)
        self._closing = threading.Event()
        self._drainer = self._make_drainer() if self.far is not None else None
        self._plans: dict[tuple[str, int], list[PartLayout]] = {}
        self._schema: Schema | None = None
        self._base: tuple[Base, int | None] = ({}, None)  # what may be referred to, and the generation it lies in
        self._lock, self._pruning = threading.Lock(), threading.Lock()  # the first: over the base and who refers to it
        self._handles: dict[SaveId, Handle] = {}
        self._stuck: list[Handle] = []  # given up before their writes had returned
        self._known: dict[int, dict[str, int]] = {}
        self._neighbours = Neighbours(self.store, run)

    def _make_threads(self, num_slots: int) -> None:
        """The first two touch memory only; the others may meet a disk that never answers."""
        limit_s = self._timeout_s
        memory_s = max(COPY_S, limit_s)
        self._copier = Threads(1, "outlast-copy", limit_s=memory_s)
        self._preparer = Threads(1, "outlast-prepare", limit_s=memory_s)
        self._writers = Threads(num_slots, "outlast-write", limit_s=limit_s, prepare=lambda: be_nice(_NICE_WRITE))
        self._publisher = Threads(1, "outlast-publish", limit_s=limit_s)
        self._growth = Growth(self._arena, self._preparer)

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
        return self._preparer.try_submit(self._arena.reserve, layout.stream_bytes, keep=self._keep)

    @property
    def can_save(self) -> bool:
        """Whether a slot is free just now, and no free one has to be made larger first (that is begun)."""
        return self._arena.has_free(keep=self._keep) and not self._growth.under_way(self._keep)

    @property
    def held_up(self) -> str:
        """Which writes never came back from their disk and hold their slots; empty if there are none."""
        steps = ", ".join(map(str, sorted(handle.save.step for handle in self._stuck if not handle.returned)))
        return f"the write of step {steps} to {self.store.url} has not returned, and holds its memory" if steps else ""

    def set_members(self, replica: int, num_replicas: int) -> None:
        """The view changed: other shares from the next save on."""
        self.replica, self.num_replicas = replica, num_replicas

    def _planned(self, tree: Any) -> tuple[FlatState, PartLayout]:
        """The state, and this replica's share of it."""
        state = flatten(tree, writer_of=self._writer_of, like=self._schema)
        self._schema = state.schema
        sharded = [shards for shards in state.shards if shards is not None]
        key = (f"{state.schema.digest} {sharded}", self.num_replicas)
        if key not in self._plans:
            self._plans = {key: plan(state.specs, state.shards, self.num_replicas)}
        self._growth.size_bytes = self._plans[key][self.replica].stream_bytes
        return state, self._plans[key][self.replica]

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
        with self._lock:
            handle.base, self._handles[save] = self._base if self._incremental else ({}, None), handle
        handle.state_bytes = sum(spec.bytes for spec in state.specs)
        self._tell(events.SaveBegan(
            save=save.token, step=step, writer=self.replica, staged_bytes=layout.stream_bytes,
            state_bytes=handle.state_bytes,
        ))  # fmt: skip
        self._probe("save.began")
        try:
            self._copier.submit(snapshot.run)
        except (RuntimeError, MemoryError):
            snapshot.run()  # no thread is to be had for it: then the step waits
        work = self._writers.try_submit(self._write, handle, began_s)
        work.add_done_callback(lambda done: self._ended(handle, done))
        return handle

    def _lease(self, size_bytes: int, step: int, *, wait: bool) -> Slot | None:
        """A slot, at once or (with `wait`) when one is free; None delays the save, and its reason is told."""
        if not wait and self._arena.is_too_small(size_bytes, keep=self._keep):
            # The share grew with a view change. Faulting pages in takes longer than a step may: beside it, then.
            self._growth.begin(self._keep)
            self._tell(events.SaveDelayed(step=step, reason="the snapshot slots are being enlarged"))
            return None
        slot, end_s = self._arena.lease(size_bytes, keep=self._keep), time.monotonic() + self._timeout_s
        while slot is None and wait and not self._closing.is_set():
            busy = [h.durable for h in list(self._handles.values()) if not h.durable.done()]
            if not busy or time.monotonic() >= end_s:
                break
            concurrent.futures.wait(busy, end_s - time.monotonic(), concurrent.futures.FIRST_COMPLETED)
            slot = self._arena.lease(size_bytes, keep=self._keep)
        if slot is None:
            reason = self.held_up or "every snapshot slot is still being written"
            self._tell(events.SaveDelayed(step=step, reason=reason))
        elif self._hold is not None:
            self._hold.clear(self._local, slot.index)
        return slot

    def _part(self, save: SaveId, state: FlatState, layout: PartLayout) -> Part:
        first = self.replica == 0
        return Part(
            format=FORMAT, save=save.token, writer=self.replica, num_writers=self.num_replicas,
            schema=state.schema.digest, stream_bytes=layout.stream_bytes, files=[], chunks=[],
            pieces=list(layout.pieces), tensors=state.specs if first else None, tree=state.tree if first else None,
        )  # fmt: skip

    def _write(self, handle: Handle, began_s: float) -> PartReport:
        """The background's half of a save: seal the memory, write, promise. Retries what the store refuses."""
        part, stream = handle.part, handle._slot.view[: handle.part.stream_bytes]
        handle.watch(self._late)
        if self._hold is not None:
            handle._snapshot.ready(part.stream_bytes, timeout_s=handle.copy_s)
            self._seal(handle, stream)
        for attempt in range(self._num_retries + 1):
            name = f"{handle.save.token}-w{part.writer:04d}-{self._nonce()}"
            try:
                written = write_part(
                    self.store, stream, part, name=name, base=handle.base[0], probe=lambda at: self._passed(handle, at),
                    wait=lambda end: self._await_copy(handle, end),
                )  # fmt: skip
                break
            except OSError as error:
                self._after_refusal(handle, attempt, error)
        handle.part, handle.written_bytes = written.part, written.written_bytes
        handle.copied_s, handle.durable_s = handle._snapshot.copied_at_s - began_s, self._clock() - began_s
        self._tell_durable(handle, written)
        return report_of(written.ref, part.schema)

    def _await_copy(self, handle: Handle, end: int) -> None:
        self._moved(handle)
        if self._closing.is_set():
            raise CheckpointError(
                f"the save of step {handle.save.step} was not finished: its engine was closed",
                where=self.store.url, did="the save is dropped, older generations stay",
                remedy="close(wait=True) finishes what is under way first",
            )  # fmt: skip
        handle._snapshot.ready(end, timeout_s=handle.copy_s)

    def _passed(self, handle: Handle, phase: str) -> None:
        self._moved(handle)
        self._probe(phase)

    def _moved(self, handle: Handle) -> None:
        self._writers.moved()
        handle.moved()

    def _late(self, handle: Handle) -> None:
        """The disk does not answer: the save is given up. Its slot stays taken, for the write may yet read from it."""
        self._stuck = [h for h in self._stuck if not h.returned] + [handle]
        self._fail(handle, handle.given_up(self.store.url))

    def _fail(self, handle: Handle, error: BaseException) -> None:
        self._handles.pop(handle.save, None)
        self._tell(events.SaveFailed(
            save=handle.save.token, step=handle.save.step, writer=handle.part.writer, reason=str(error),
        ))  # fmt: skip
        handle.durable.set_exception(error)

    def _after_refusal(self, handle: Handle, attempt: int, error: OSError) -> None:
        """Within the budget: make room if that is what is lacking, and wait a little. Beyond it: give up."""
        self._moved(handle)  # a refusal is an answer
        reason = f"{type(error).__name__}: {error}"
        newer = is_full(error) and any(save.step > handle.save.step for save in list(self._handles))  # if one fits, it
        if newer or attempt == self._num_retries or self._closing.is_set():
            raise CheckpointError(
                f"writer {handle.part.writer} could not write step {handle.save.step}: {reason}",
                where=self.store.url,
                did=f"tried {attempt + 1} times; the save is dropped, training goes on, older generations stay",
                remedy="free space on, or repair, the checkpoint target",
            ) from error
        if is_full(error):
            handle.base = {}, None  # the generation that it would refer to may have to go
            self.store.make_room()
        self._tell(events.SaveRetried(
            save=handle.save.token, writer=handle.part.writer, attempt=attempt + 1, reason=reason, full=is_full(error),
        ))  # fmt: skip
        self._closing.wait(self._retry_s * 2**attempt)

    def _seal(self, handle: Handle, stream: memoryview) -> None:
        assert self._hold is not None
        save, mine = handle.save, in_memory(handle.part, stream, CHUNK_BYTES)
        self._hold.seal(self._local, handle._slot, mine, step=save.step, view=save.view, run=self.run)
        self._probe("save.sealed")

    def _tell_durable(self, handle: Handle, written: Written) -> None:
        self._tell(events.SaveDurable(
            save=handle.save.token, step=handle.save.step, writer=handle.part.writer,
            stream_bytes=handle.part.stream_bytes, written_bytes=written.written_bytes,
            copied_s=handle.copied_s, durable_s=handle.durable_s,
        ))  # fmt: skip

    def _ended(self, handle: Handle, done: concurrent.futures.Future[PartReport]) -> None:
        """Runs once, in the writer's thread (the caller's, if none is to be had), whatever became of the save."""
        handle.ended()
        mine, error = handle.claim(), done.exception()
        # A slot that is still being copied into must not become another save's.
        over = error is not None or not mine or self._hold is None
        if handle._snapshot.copied.wait(handle.copy_s) and over:
            self._arena.release(handle._slot)
        if mine and error is not None:
            self._fail(handle, error)
        elif mine:
            handle.durable.set_result(done.result())

    def _make_drainer(self) -> Drainer:
        assert self.far is not None
        tell, url = self._tell, self.far.url
        return Drainer(
            self.store, self.far, self.retention, closing=self._closing, num_tries=self._num_retries + 1,
            retry_s=self._retry_s, limit_s=self._timeout_s, prepare=lambda: be_nice(_NICE_DRAIN),
            drained=lambda state, seconds: tell(events.Drained(
                generation=state.generation, url=url, copied_bytes=state.sent_bytes, seconds=seconds,
            )),
            failed=lambda state, reason: tell(events.DrainFailed(
                generation=state.generation, url=url, reason=reason,
            )),
        )  # fmt: skip
