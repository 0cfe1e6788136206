"""What members and the coordinator tell each other about checkpoints. Nothing of it is sent unless a save happens.

Frozen tagged records beside `core/protocol/messages.py`: membership does not know them. No torch.
"""

from __future__ import annotations

import msgspec

from outlast.checkpoint.save_events import Differs, Loaded, SaveDelayed, SaveRetried, Skipped, Unwritable
from outlast.core.protocol.saves.commit import PartReport, SaveId

__all__ = [
    "COORDINATOR_RECORD", "FROM_MEMBER", "SAVE_EPOCHS", "TO_MEMBER", "FromMember", "SaveAsked", "SaveBase", "SaveBegun",
    "SaveCertified", "SaveDone", "SaveLost", "SaveNow", "SaveSaid", "SaveSettled", "ToMember",
]  # fmt: skip

COORDINATOR_RECORD = "protocol"
"""The journal's record: the coordinator's own (`core.protocol.messages.Record`)."""

SAVE_EPOCHS = "checkpoint_epochs"
"""The journal's record, once checkpoints have a place: how much higher the epochs of saves are than the run's."""


class SaveBegun(msgspec.Struct, frozen=True, kw_only=True, tag="SaveBegan"):
    """I have begun a save that the headers agreed on. Each member says so: whoever dies, somebody has told."""

    member: str
    save: SaveId
    writer: int
    reason: str


class SaveDone(msgspec.Struct, frozen=True, kw_only=True, tag="SaveDone"):
    """My part of a save is durable, and its step is stable. `reason`: why it was taken; `asked`: the newest
    request (`SaveNow`) that it answers. `blocked_s`: how long the loop was held up by it; `steps_left`: until the end
    of the loop; `step_s`: what a step takes."""

    member: str
    save: SaveId
    report: PartReport
    reason: str
    state_bytes: int
    staged_bytes: int
    written_bytes: int
    blocked_s: float
    copied_s: float
    durable_s: float
    steps_left: int = 0
    step_s: float = 0.0
    asked: int = 0


class SaveLost(msgspec.Struct, frozen=True, kw_only=True, tag="SaveLost"):
    """My part of a save will never be durable."""

    member: str
    save: SaveId
    writer: int
    reason: str


class SaveCertified(msgspec.Struct, frozen=True, kw_only=True, tag="SaveCertified"):
    """The state after `step` was verified: finite, agreed by fingerprint, audited."""

    member: str
    step: int


class SaveSaid(msgspec.Struct, frozen=True, kw_only=True, tag="SaveSaid"):
    """Something for the journal."""

    member: str
    event: SaveDelayed | SaveRetried | Skipped | Loaded | Differs | Unwritable


class SaveAsked(msgspec.Struct, frozen=True, kw_only=True, tag="SaveAsked"):
    """The launcher: somebody wants a save now."""

    reason: str


class SaveBase(msgspec.Struct, frozen=True, kw_only=True, tag="SaveBase"):
    """Epochs of saves are this much higher than the coordinator's: above those of every earlier run in the store."""

    epoch: int
    base: int


class SaveNow(msgspec.Struct, frozen=True, kw_only=True, tag="SaveNow"):
    """Save after the next step in which all can. `number` rises; one that was acted on is not acted on again. An odd
    one is the last save of a run that is asked to stop: after it no step is begun. It is in the number because that
    is what the headers carry, so that all conclude the same."""

    epoch: int
    number: int
    reason: str


class SaveSettled(msgspec.Struct, frozen=True, kw_only=True, tag="SaveSettled"):
    """What became of a save: published as `generation`, or (None) not at all."""

    epoch: int
    save: SaveId
    generation: int | None
    reason: str = ""


FromMember = SaveBegun | SaveDone | SaveLost | SaveCertified | SaveSaid
ToMember = SaveBase | SaveNow | SaveSettled
FROM_MEMBER = (SaveBegun, SaveDone, SaveLost, SaveCertified, SaveSaid)
TO_MEMBER = (SaveBase, SaveNow, SaveSettled)
