"""What a checkpoint engine has to say: frozen records for the journal and the terminal. No torch.

Role: one record a fact; the runtime maps them onto `core.events`. Sizes are bytes, durations seconds.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "CheckpointEvent", "Differs", "Drained", "DrainFailed", "Loaded", "Neighbour", "Pruned", "PublishedGeneration",
    "SaveBegan", "SaveDelayed", "SaveDurable", "SaveFailed", "SaveRetried", "Skipped",
    "Unwritable",
]  # fmt: skip


class SaveBegan(msgspec.Struct, frozen=True, kw_only=True, tag="save_began"):
    """`staged_bytes`: what this writer will write, of the state's `state_bytes`."""

    save: str
    step: int
    writer: int
    staged_bytes: int
    state_bytes: int


class SaveDelayed(msgspec.Struct, frozen=True, kw_only=True, tag="save_delayed"):
    step: int
    reason: str


class SaveDurable(msgspec.Struct, frozen=True, kw_only=True, tag="save_durable"):
    """`copied_s`: begin to the end of the snapshot; `durable_s`: begin to durable."""

    save: str
    step: int
    writer: int
    stream_bytes: int
    written_bytes: int
    copied_s: float
    durable_s: float


class SaveRetried(msgspec.Struct, frozen=True, kw_only=True, tag="save_retried"):
    save: str
    writer: int
    attempt: int
    reason: str
    full: bool = False


class Unwritable(msgspec.Struct, frozen=True, kw_only=True, tag="unwritable"):
    """Before the first save: the place cannot be written, or has no room for a generation."""

    reason: str
    url: str


class SaveFailed(msgspec.Struct, frozen=True, kw_only=True, tag="save_failed"):
    save: str
    step: int
    writer: int
    reason: str


class PublishedGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="published"):
    save: str
    step: int
    generation: int
    certified: bool
    url: str


class Pruned(msgspec.Struct, frozen=True, kw_only=True, tag="pruned"):
    generations: list[int]
    freed_bytes: int
    note: str


class Skipped(msgspec.Struct, frozen=True, kw_only=True, tag="skipped"):
    """A load could not use this: where and why, and it went on elsewhere."""

    generation: int
    step: int
    tier: str
    url: str
    file: str
    reason: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """`bytes_read`: by tier."""

    generation: int
    step: int
    tier: str
    bytes_read: dict[str, int]
    seconds: float


class Differs(msgspec.Struct, frozen=True, kw_only=True, tag="differs"):
    """What was loaded was saved under other settings, on which the bits may depend. `kept`: they are optimizers' and
    schedulers', and hold in place of the script's."""

    step: int
    detail: str
    kept: bool = False


class Neighbour(msgspec.Struct, frozen=True, kw_only=True, tag="neighbour"):
    """Another run saves in the same place."""

    detail: str


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    generation: int
    url: str
    copied_bytes: int
    seconds: float


class DrainFailed(msgspec.Struct, frozen=True, kw_only=True, tag="drain_failed"):
    generation: int
    url: str
    reason: str


CheckpointEvent = (
    SaveBegan
    | SaveDelayed
    | SaveDurable
    | SaveRetried
    | SaveFailed
    | PublishedGeneration
    | Pruned
    | Skipped
    | Loaded
    | Differs
    | Neighbour
    | Drained
    | DrainFailed
    | Unwritable
)
