"""What the journal is told of checkpoints: part of the vocabulary of `events.py`."""

from __future__ import annotations

from typing import Literal

from outlast.core.event_base import Event

__all__ = [
    "CheckpointBegan",
    "CheckpointDelayed",
    "CheckpointDiffers",
    "CheckpointDrained",
    "CheckpointFailed",
    "CheckpointInterval",
    "CheckpointLoaded",
    "CheckpointPruned",
    "CheckpointRetried",
    "CheckpointSaved",
    "CheckpointSkipped",
]


_SaveFailure = Literal[
    "writer_failed", "view_changed", "superseded", "diverged", "publish_failed", "unreadable", "drain_failed",
    "unwritable",
]  # fmt: skip


class CheckpointBegan(Event, frozen=True, kw_only=True, tag="checkpoint_began"):
    """The members of `view` have begun to save the state after `step`; training goes on meanwhile. What follows is
    `checkpoint_saved` or `checkpoint_failed`. `reason`: why it was taken."""

    step: int
    view: list[int]
    reason: str


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """A generation was published: the state after `step`. `blocked_s`: how long the slowest writer's loop was held up;
    `copied_s`, `durable_s`: from its begin to the end of the snapshot, and to the last durable part. `written_bytes`:
    by all writers; what had not changed since the generation before is not among them. `reason`: why it was taken."""

    step: int
    generation: int
    view: list[int]
    num_writers: int
    state_bytes: int
    written_bytes: int
    blocked_s: float
    copied_s: float
    durable_s: float
    reason: str
    url: str


class CheckpointFailed(Event, frozen=True, kw_only=True, tag="checkpoint_failed"):
    """A save came to nothing; training goes on and older generations stay. `step` is -1 where it concerns none."""

    step: int
    cause: _SaveFailure
    reason: str
    url: str


class CheckpointDelayed(Event, frozen=True, kw_only=True, tag="checkpoint_delayed"):
    """A save waits: the one before is still being written."""

    replica: str
    step: int
    reason: str


class CheckpointRetried(Event, frozen=True, kw_only=True, tag="checkpoint_retried"):
    """A writer was refused by its disk or store, and tries again."""

    replica: str
    attempt: int
    reason: str


class CheckpointLoaded(Event, frozen=True, kw_only=True, tag="checkpoint_loaded"):
    """A replica begins with a generation (its number is a tier's own where `tier` is memory). `bytes_read`: by tier."""

    replica: str
    generation: int
    step: int
    tier: str
    bytes_read: dict[str, int]
    seconds: float


class CheckpointSkipped(Event, frozen=True, kw_only=True, tag="checkpoint_skipped"):
    """A load could not use this, and went on elsewhere."""

    replica: str
    generation: int
    step: int
    tier: str
    url: str
    file: str
    reason: str


class CheckpointDiffers(Event, frozen=True, kw_only=True, tag="checkpoint_differs"):
    """The state after `step` was saved with other settings, or on another machine, than the run goes on with: it does,
    but perhaps not to the bits of a run that was never stopped. `detail`: which, there and now. `kept`: they are those
    of optimizers and schedulers, and hold in place of what the script says now."""

    replica: str
    step: int
    detail: str
    kept: bool = False


class CheckpointPruned(Event, frozen=True, kw_only=True, tag="checkpoint_pruned"):
    """Old generations were removed, or (`note`) why not."""

    generations: list[int]
    freed_bytes: int
    note: str


class CheckpointDrained(Event, frozen=True, kw_only=True, tag="checkpoint_drained"):
    """A generation was copied to the farther place."""

    generation: int
    url: str
    copied_bytes: int
    seconds: float


class CheckpointInterval(Event, frozen=True, kw_only=True, tag="checkpoint_interval"):
    """When to save next, decided anew: `interval_s` from one save to the next, from a mean time `mtbr_s` between
    losses; 0 where a save is wanted at once, None where none pays before the end of the loop, which saves."""

    interval_s: float | None
    mtbr_s: float
    reason: str
