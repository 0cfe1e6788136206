"""One replica's checkpoints: saving beside training, and loading what is newest and whole. torch.

Role: ties plan, arena, snapshot, writer, tiers and retention together for one process; see the package's docstring
for how a runtime drives it. Invariants: `save` and `wait_copied` never raise because a disk or a network failed; what
a replica will not write it does not stage; host memory is `num_slots` streams and no more. Decides nothing about
when to save or whether a save may be published: that is `core.policy` and `core.protocol.saves.commit`.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from outlast.checkpoint import save_events as events
from outlast.checkpoint._handle import Handle
from outlast.checkpoint._memory import Hold, MemoryStore
from outlast.checkpoint._open import open_store
from outlast.checkpoint._publish import publish
from outlast.checkpoint._shares import WriterShares
from outlast.checkpoint._snapshot_slots import SnapshotSlots
from outlast.checkpoint._snapshots import SnapshotWriter
from outlast.checkpoint._writer import base_of
from outlast.checkpoint.draining import Drain, Drainer
from outlast.checkpoint.ladder import Rung, first_valid
from outlast.checkpoint.loading import LoadedState, fill_in_place, fresh, rebuild, select
from outlast.checkpoint.neighbours import Neighbours
from outlast.checkpoint.patience import newest_of
from outlast.checkpoint.reader import Reader, Skip
from outlast.checkpoint.retention import PruneResult, Retention, prune
from outlast.checkpoint.state_tensors import flatten
from outlast.checkpoint.store import Store
from outlast.checkpoint.threads import Threads, be_nice, within
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.errors import CheckpointError

__all__ = ["CheckpointEngine", "Handle", "LoadedState"]

_NICE_DRAIN = 10
_LEAVE_S = 10.0  # how long the end of the process waits for threads whose work is of no use any more


class CheckpointEngine(SnapshotWriter):
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
        super().__init__(
            open_store(target) if isinstance(target, str) else target,
            WriterShares(replica, num_replicas, writer_of),
            SnapshotSlots(num_slots, hold, replica if local_replica is None else local_replica, run, timeout_s),
            incremental=incremental, num_retries=num_retries, retry_s=retry_s, timeout_s=timeout_s,
            on_event=on_event, probe=probe, clock=clock, nonce=nonce,
        )  # fmt: skip
        self.run, self._extra, self._wall = run, extra, wall
        self.far = open_store(drain_to) if isinstance(drain_to, str) else drain_to
        self.retention = retention if retention is not None else Retention()
        self._publisher = Threads(1, "outlast-publish", limit_s=timeout_s)
        self._drainer = self._make_drainer(self.far) if self.far is not None else None
        self._pruning = threading.Lock()
        self._known: dict[int, dict[str, int]] = {}
        self._neighbours = Neighbours(self.store, run)

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
        handle = self.saves.handles.pop(save, None)
        if handle is None:
            return
        if generation is not None:
            self.saves.refer_to(base_of([handle.part]), generation)
        self.slots.settled(handle._slot, generation is not None)

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
        work = self._publisher.try_submit(self.commit, handle, certified=certified)
        return within(work, self._timeout_s, lambda: handle.unpublished(self.store.url), since=handle.durable)

    def prune(self, *, protected: Collection[int] = ()) -> PruneResult:
        """Apply the retention policy to the store; for the one process that publishes. Raises `OSError`.

        What saves of this engine refer to stays until they have settled.
        """
        kept = {*protected, *self.saves.bases}
        with self._pruning:
            done = prune(self.store, self.retention, protected=kept, known=self._known)
        if done.generations or done.note:
            self._tell(events.Pruned(generations=done.generations, freed_bytes=done.freed_bytes, note=done.note))
        return done

    # draining

    def _make_drainer(self, far: Store) -> Drainer:
        tell, url = self._tell, far.url
        return Drainer(
            self.store, far, self.retention, closing=self._closing, num_tries=self._num_retries + 1,
            retry_s=self._retry_s, limit_s=self._timeout_s, prepare=lambda: be_nice(_NICE_DRAIN),
            drained=lambda state, seconds: tell(events.Drained(
                generation=state.generation, url=url, copied_bytes=state.sent_bytes, seconds=seconds,
            )),
            failed=lambda state, reason: tell(events.DrainFailed(
                generation=state.generation, url=url, reason=reason,
            )),
        )  # fmt: skip

    def drain(self, generation: int) -> concurrent.futures.Future[int] | None:
        """Copy a generation to the farther store in the background; `newest_drain` is its progress. See `Drainer`."""
        return self._drainer.begin(generation) if self._drainer is not None else None

    @property
    def newest_drain(self) -> Drain | None:
        return self._drainer.newest if self._drainer is not None else None

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
        near: list[Store] = [MemoryStore(self.slots.hold)] if self.slots.hold is not None and generation is None else []
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
            found = flatten(into, writer_of=self.shares.writer_of)
            tensors = fill_in_place(reader, found, names, strict, progress, touched, where=self.store.url)
        tree = None
        if names is None and len(tensors) == len(reader.tensors):
            tree = rebuild(reader, tensors, "was not loaded")
        if candidate.head.generation == newest_of(candidate.stores, self.store):
            self.saves.refer_to(base_of(reader.parts), candidate.head.generation)
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
        for memory in (self._copier, self.slots.preparer):
            memory.shutdown(wait=wait)
        drains = [self._drainer.threads] if self._drainer is not None else []  # last: a commit that ends begins one
        for pool in (self._writers, self._publisher, *drains):
            if wait:
                pool.finish()
            else:
                pool.leave(_LEAVE_S)
