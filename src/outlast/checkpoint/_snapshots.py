"""Snapshots and their parts: copying in the read-only window, and writing this replica's share.

What is ours to write is `_shares.py`'s, memory for it `_snapshot_slots.py`'s, what is under way `_under_way.py`'s.
Publishing, loading, pruning and draining are `_engine.py`'s.
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
from outlast.checkpoint._arena import Slot
from outlast.checkpoint._handle import COPY_S, Handle
from outlast.checkpoint._publish import report_of
from outlast.checkpoint._shares import WriterShares
from outlast.checkpoint._snapshot_slots import SnapshotSlots
from outlast.checkpoint._stage import copies_of
from outlast.checkpoint._under_way import SavesUnderWay
from outlast.checkpoint._writer import Written, write_part
from outlast.checkpoint.room import is_full
from outlast.checkpoint.snapshot import Snapshot
from outlast.checkpoint.store import Store
from outlast.checkpoint.threads import Threads, be_nice
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.errors import CheckpointError

__all__ = ["SnapshotWriter"]

_NICE_WRITE = 7  # at 10, beside a loop on every core, hashing took longer than writing


class SnapshotWriter:
    """Takes snapshots of a state, and hands their bytes to storage. `shares`: what of the state is ours; `slots`:
    memory for it; `saves`: those under way."""

    def __init__(
        self,
        store: Store,
        shares: WriterShares,
        slots: SnapshotSlots,
        *,
        incremental: bool,
        num_retries: int,
        retry_s: float,
        timeout_s: float,
        on_event: Callable[[events.CheckpointEvent], None] | None,
        probe: Callable[[str], None] | None,
        clock: Callable[[], float],
        nonce: Callable[[], str] | None,
    ) -> None:
        self.store, self.shares, self.slots, self.saves = store, shares, slots, SavesUnderWay(incremental)
        self._num_retries, self._retry_s, self._timeout_s, self._clock = num_retries, retry_s, timeout_s, clock
        self._tell = on_event if on_event is not None else lambda event: None
        self._probe = probe if probe is not None else lambda phase: None
        self._nonce = nonce if nonce is not None else lambda: secrets.token_hex(4)
        self._closing = threading.Event()
        self._copier = Threads(1, "outlast-copy", limit_s=max(COPY_S, timeout_s))  # touches memory only
        self._writers = Threads(
            slots.arena.num_slots, "outlast-write", limit_s=timeout_s, prepare=lambda: be_nice(_NICE_WRITE)
        )

    @property
    def replica(self) -> int:
        """The number of this writer."""
        return self.shares.replica

    @property
    def host_bytes(self) -> int:
        """What the snapshot slots take now; `num_slots` times this replica's share when all exist."""
        return self.slots.arena.host_bytes

    def prepare(self, tree: Any) -> int:
        """Plan, allocate and touch the slots before the first save. Returns this replica's share in bytes."""
        _, layout = self.shares.planned(tree)
        self.slots.reserve(layout.stream_bytes)
        return layout.stream_bytes

    def prepare_later(self, tree: Any) -> concurrent.futures.Future[None]:
        """As `prepare`, but the slots are made beside training. The tree is not looked at after this returns."""
        _, layout = self.shares.planned(tree)
        return self.slots.reserve_later(layout.stream_bytes)

    @property
    def can_save(self) -> bool:
        """Whether a slot is free just now, and no free one has to be made larger first (that is begun)."""
        slots = self.slots  # asked in every step: nothing is called for it that need not be
        return slots.arena.has_free(keep=slots.keep) and not slots.growth.under_way(slots.keep)

    @property
    def held_up(self) -> str:
        """Which writes never came back from their disk and hold their slots; empty if there are none."""
        steps = ", ".join(map(str, self.saves.stuck_steps))
        return f"the write of step {steps} to {self.store.url} has not returned, and holds its memory" if steps else ""

    def set_members(self, replica: int, num_replicas: int) -> None:
        """The view changed: other shares from the next save on."""
        self.shares.replica, self.shares.num_replicas = replica, num_replicas

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
        state, layout = self.shares.planned(tree)
        self.slots.growth.size_bytes = layout.stream_bytes
        slot = self._lease(layout.stream_bytes, step, wait=wait)
        if slot is None:
            return None
        snapshot = Snapshot(copies_of(state, layout, slot), layout.stream_bytes, clock=self._clock)
        if changing:
            names = [spec.name for spec in state.specs]
            snapshot.copy_now({n for n in names if any(fnmatch.fnmatchcase(n, p) for p in changing)})
        handle = Handle(save, snapshot, slot, self.shares.part(save, state, layout), self._timeout_s)
        self.saves.begin(handle)
        handle.state_bytes = sum(spec.bytes for spec in state.specs)
        self._tell(events.SaveBegan(
            save=save.token, step=step, writer=self.shares.replica, staged_bytes=layout.stream_bytes,
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
        if not wait and self.slots.grows_for(size_bytes):  # the share grew with a view change
            self._tell(events.SaveDelayed(step=step, reason="the snapshot slots are being enlarged"))
            return None
        slot, end_s = self.slots.lease(size_bytes), time.monotonic() + self._timeout_s
        while slot is None and wait and not self._closing.is_set():
            busy = [h.durable for h in list(self.saves.handles.values()) if not h.durable.done()]
            if not busy or time.monotonic() >= end_s:
                break
            concurrent.futures.wait(busy, end_s - time.monotonic(), concurrent.futures.FIRST_COMPLETED)
            slot = self.slots.lease(size_bytes)
        if slot is None:
            reason = self.held_up or "every snapshot slot is still being written"
            self._tell(events.SaveDelayed(step=step, reason=reason))
        return slot

    def _write(self, handle: Handle, began_s: float) -> PartReport:
        """The background's half of a save: seal the memory, write, promise. Retries what the store refuses."""
        part, stream = handle.part, handle._slot.view[: handle.part.stream_bytes]
        handle.watch(self._late)
        if self.slots.hold is not None:
            handle._snapshot.ready(part.stream_bytes, timeout_s=handle.copy_s)
            self.slots.seal(handle, stream)
            self._probe("save.sealed")
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
        self.saves.given_up(handle)
        self._fail(handle, handle.given_up(self.store.url))

    def _fail(self, handle: Handle, error: BaseException) -> None:
        self.saves.handles.pop(handle.save, None)
        self._tell(events.SaveFailed(
            save=handle.save.token, step=handle.save.step, writer=handle.part.writer, reason=str(error),
        ))  # fmt: skip
        handle.durable.set_exception(error)

    def _after_refusal(self, handle: Handle, attempt: int, error: OSError) -> None:
        """Within the budget: make room if that is what is lacking, and wait a little. Beyond it: give up."""
        self._moved(handle)  # a refusal is an answer
        reason = f"{type(error).__name__}: {error}"
        newer = is_full(error) and self.saves.any_after(handle.save)  # if one fits, it
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
        over = error is not None or not mine or self.slots.hold is None
        if handle._snapshot.copied.wait(handle.copy_s) and over:
            self.slots.arena.release(handle._slot)
        if mine and error is not None:
            self._fail(handle, error)
        elif mine:
            handle.durable.set_result(done.result())
