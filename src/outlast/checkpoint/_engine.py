"""One replica's checkpoints: saving beside training, and loading what is newest and whole. torch.

Role: ties plan, arena, snapshot, writer, tiers and retention together for one process; see the package's docstring
for how a runtime drives it. Invariants: `save` and `wait_copied` never raise because a disk or a network failed; what
a replica will not write it does not stage; host memory is `num_slots` streams and no more. Decides nothing about
when to save or whether a save may be published: that is `core.policy` and `core.protocol.saves.commit`.
"""

from __future__ import annotations

import concurrent.futures
import fnmatch
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from outlast.checkpoint import save_events as events
from outlast.checkpoint._arena import Arena, Growth, Slot
from outlast.checkpoint._handle import Handle
from outlast.checkpoint._memory import Hold, MemoryStore, in_memory
from outlast.checkpoint._open import open_store
from outlast.checkpoint._plan import PartLayout, plan
from outlast.checkpoint._publish import publish, report_of
from outlast.checkpoint._stage import copies_of
from outlast.checkpoint._writer import CHUNK_BYTES, Base, Written, base_of, write_part
from outlast.checkpoint.draining import Drain, Drainer
from outlast.checkpoint.ladder import Rung, first_valid
from outlast.checkpoint.loading import LoadedState, fill_in_place, fresh, rebuild, select
from outlast.checkpoint.manifest import FORMAT, Part
from outlast.checkpoint.neighbours import Neighbours
from outlast.checkpoint.patience import newest_of
from outlast.checkpoint.reader import Reader, Skip
from outlast.checkpoint.retention import PruneResult, Retention, prune
from outlast.checkpoint.room import is_full
from outlast.checkpoint.snapshot import Snapshot
from outlast.checkpoint.state_tensors import FlatState, Schema, flatten
from outlast.checkpoint.store import Store
from outlast.checkpoint.threads import Threads, be_nice, within
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.errors import CheckpointError

__all__ = ["CheckpointEngine", "Handle", "LoadedState"]

_LEAVE_S = 10.0  # how long the end of the process waits for threads whose work is of no use any more
_NICE_WRITE, _NICE_DRAIN = 7, 10  # at 10, beside a loop on every core, hashing took longer than writing


class CheckpointEngine:
    """`target`: a directory, a URL or a `Store`. `replica` of `num_replicas` says what of a shared state is ours.

    `drain_to`: a farther store, filled in the background. `hold`: memory that outlives us, `local_replica` our place
    in it. `extra`: what heads say besides. `host_bytes` states what the snapshots take. `on_event` and `probe` are
    called from several threads.
    Raises `ConfigError` for a target of no known kind.
    """

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
        # The first two touch memory only; the others may meet a disk that never answers.
        self._copier = concurrent.futures.ThreadPoolExecutor(1, "outlast-copy")
        self._preparer = concurrent.futures.ThreadPoolExecutor(1, "outlast-prepare")
        self._writers = Threads(num_slots, "outlast-write", limit_s=timeout_s, prepare=lambda: be_nice(_NICE_WRITE))
        self._publisher = Threads(1, "outlast-publish", limit_s=timeout_s)
        self._growth = Growth(self._arena, self._preparer)
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
        return self._preparer.submit(self._arena.reserve, layout.stream_bytes, keep=self._keep)

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
        with self._lock:
            handle.base, self._handles[save] = self._base if self._incremental else ({}, None), handle
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
        """Runs once, in the writer's thread, whatever became of the save."""
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

    # publishing

    def publish(self, save: SaveId, reports: Iterable[PartReport], *, certified: bool = False,
                extra: dict[str, str] | None = None) -> int:  # fmt: skip
        """Carry out a `Publish` action: returns the generation's number. See `_publish.publish` for what it raises."""
        self._probe("publish.began")
        number = publish(
            self.store, save, reports, created_s=self._wall(), run=self.run, certified=certified,
            extra=self._extra if extra is None else extra,
        )  # fmt: skip
        self._tell(events.PublishedGeneration(
            save=save.token, step=save.step, generation=number, certified=certified, url=self.store.url,
        ))  # fmt: skip
        other = self._neighbours.after(number)
        if other:
            self._tell(events.Neighbour(detail=other))
        self._probe("publish.done")
        return number

    def settle(self, save: SaveId, generation: int | None) -> None:
        """What became of a save: published as `generation`, or (None) abandoned. Frees its slot, moves the base on."""
        handle = self._handles.pop(save, None)
        if handle is None:
            return
        if generation is not None:
            with self._lock:
                self._base = (base_of([handle.part]), generation)
        if self._hold is not None:
            if generation is not None:
                self._keep = frozenset({handle._slot.index})
            self._arena.release(handle._slot)

    def commit(self, handle: Handle, *, certified: bool = False, extra: dict[str, str] | None = None) -> int:
        """For a fleet of one: wait until durable, publish, settle, prune, and start to drain."""
        report = handle.durable.result()  # the watch over the save sees to it that it is settled
        self._publisher.moved()  # it was not the publisher that was silent
        try:
            generation = self.publish(handle.save, [report], certified=certified, extra=extra)
        except CheckpointError:  # a newer one stands: what this one refers to may go
            self._settle_and_prune(handle.save, None)
            raise
        self._settle_and_prune(handle.save, generation)
        self.drain(generation)
        return generation

    def _settle_and_prune(self, save: SaveId, generation: int | None) -> None:
        self.settle(save, generation)
        try:
            self.prune()
        except OSError as error:  # what is published stands; old generations go another time
            self._tell(events.Pruned(generations=[], freed_bytes=0, note=str(error)))

    def commit_later(self, handle: Handle, *, certified: bool = False) -> concurrent.futures.Future[int]:
        """`commit` in the background, one after the other: the training loop goes on. Failures are in the future.

        So is a store that does not answer: `timeout_s` after the save was durable.
        """
        work = self._publisher.submit(self.commit, handle, certified=certified)
        return within(work, self._timeout_s, lambda: handle.unpublished(self.store.url), since=handle.durable)

    def prune(self, *, protected: Collection[int] = ()) -> PruneResult:
        """Apply the retention policy to the store; for the one process that publishes. Raises `OSError`.

        What saves of this engine refer to stays until they have settled.
        """
        with self._lock:
            bases = [self._base[1], *(handle.base[1] for handle in list(self._handles.values()))]
        kept = {*protected, *(base for base in bases if base is not None)}
        with self._pruning:
            done = prune(self.store, self.retention, protected=kept, known=self._known)
        if done.generations or done.note:
            self._tell(events.Pruned(generations=done.generations, freed_bytes=done.freed_bytes, note=done.note))
        return done

    # draining

    def drain(self, generation: int) -> concurrent.futures.Future[int] | None:
        """Copy a generation to the farther store in the background; `newest_drain` is its progress. See `Drainer`."""
        return self._drainer.begin(generation) if self._drainer is not None else None

    @property
    def newest_drain(self) -> Drain | None:
        return self._drainer.newest if self._drainer is not None else None

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

    # loading

    def load(
        self, *, into: Any = None, names: Sequence[str] | None = None, strict: bool = True,
        generation: int | None = None, progress: Callable[[int], None] | None = None,
    ) -> LoadedState | None:  # fmt: skip
        """The newest generation that is whole, nearest tier first; None if there is none at all.

        `into`: a state whose tensors are filled in place (plain or DTensor, of any sharding); what does not fit is an
        error unless `strict` is off: then it is loaded into new memory, and missing tensors are left alone. `names`:
        only tensors whose name matches a pattern. `generation`: only this one.
        A tier that has not answered for `timeout_s` is skipped, too. Raises `CheckpointError` if there are generations
        and none serves, or if the state does not fit.
        """
        began_s, skipped, touched = self._clock(), list[Skip](), dict[str, int]()

        def note(skip: Skip) -> None:
            skipped.append(skip)
            self._tell(events.Skipped(**skip._asdict()))

        def use(reader: Reader, candidate: Rung) -> LoadedState:
            return self._use(reader, candidate, into, names, strict, skipped, touched, progress)

        # Snapshots in memory have no generation's number.
        near: list[Store] = [MemoryStore(self._hold)] if self._hold is not None and generation is None else []
        far = [self.far] if self.far is not None else []
        places = [*near, self.store, *far]
        loaded = first_valid(places, use, note=note, limit_s=self._timeout_s, generation=generation)
        if loaded is not None:
            self._tell(events.Loaded(
                generation=loaded.generation, step=loaded.step, tier=loaded.tier, bytes_read=loaded.bytes_read,
                seconds=self._clock() - began_s,
            ))  # fmt: skip
        return loaded

    def _use(
        self, reader: Reader, candidate: Rung, into: Any, names: Sequence[str] | None, strict: bool,
        skipped: list[Skip], touched: dict[str, int], progress: Callable[[int], None] | None,
    ) -> LoadedState:  # fmt: skip
        if into is None:
            tensors = fresh(reader, select(reader.tensors, names), progress)
        else:
            found = flatten(into, writer_of=self._writer_of)
            tensors = fill_in_place(reader, found, names, strict, progress, touched, where=self.store.url)
        tree = None
        if names is None and len(tensors) == len(reader.tensors):
            tree = rebuild(reader, tensors, "was not loaded")
        if candidate.head.generation == newest_of(candidate.stores, self.store):
            self._base = (base_of(reader.parts), candidate.head.generation)
        head = reader.head
        return LoadedState(
            tree, {reader.tensors[i].name: t for i, t in tensors.items()}, head.step, head.generation, head.view,
            head.certified, candidate.stores[0].tier, head.extra, skipped, dict(reader.bytes_read),
        )  # fmt: skip

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads. With `wait`, saves and drains under way end first; else they stop at their next chunk.

        A thread that its disk or store has not answered for `timeout_s` is left behind, and said so at the exit.
        """
        if not wait:
            self._closing.set()
        for memory in (self._copier, self._preparer):
            memory.shutdown(wait=wait)
        drains = [self._drainer.threads] if self._drainer is not None else []  # last: a commit that ends begins one
        for pool in (self._writers, self._publisher, *drains):
            if wait:
                pool.finish()
            else:
                pool.leave(_LEAVE_S)
