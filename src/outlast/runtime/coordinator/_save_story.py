"""What a coordinator writes into the journal about saves, and knows from it.

A save's begin and its publishing are each written once, whichever coordinator does it. Decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from outlast.core.protocol import ViewId
from outlast.core.protocol.saves.commit import SaveId
from outlast.runtime.coordinator._record_summary import JournalFold
from outlast.runtime.transport.save_messages import SaveDone

__all__ = ["SaveStory"]

_OURS = {"save_delayed": "checkpoint_delayed", "save_retried": "checkpoint_retried"}  # else after what they are


class SaveStory:
    """Writes into the journal what becomes of each save, and knows which are published. `why`: what the newest one that
    failed failed of, "" if none has. `earlier`: what an earlier coordinator wrote down, which is not told twice."""

    def __init__(self, earlier: JournalFold, write: Callable[..., None]) -> None:
        self._write = write
        self._begun, self._saved, self._failed_before = earlier.begun, earlier.published, earlier.failed
        self._promises: dict[SaveId, dict[int, SaveDone]] = defaultdict(dict)
        self._differing: list[Any] = []
        self.why = ""

    @property
    def newest(self) -> int:
        """The newest step that was published; -1 if none was."""
        return max((step for _, step in self._saved), default=-1)

    def newest_in(self, view: ViewId) -> int:
        """The newest step that was published in this view, its epoch counted as saves count it; 0 if none was."""
        return max((step for said, step in self._saved if said == (view.epoch, view.n)), default=0)

    def began(self, save: SaveId, reason: str) -> bool:
        """Tell of the first news of a save. Return whether it is the first."""
        if (save.view, save.step) in self._begun:
            return False
        self._begun.add((save.view, save.step))
        self._write("checkpoint_began", step=save.step, view=list(save.view), reason=reason)
        return True

    def promised(self, message: SaveDone) -> None:
        """Note what a writer's part has cost, until its save is told of."""
        self._promises[message.save][message.report.writer] = message

    def saved(self, save: SaveId, generation: int, url: str, reason: str) -> tuple[int, bool] | None:
        """Tell that a save is published; `reason`: why, where its writers do not say. Return the newest request that
        it answers, 0 if none, and whether its writers had made the loop's last step when their parts were there; None
        where it was told before."""
        costs = list(self._promises.pop(save, {}).values())
        if (save.view, save.step) in self._saved:
            return None
        self._saved.add((save.view, save.step))
        self._write(
            "checkpoint_saved",
            step=save.step,
            generation=generation,
            view=list(save.view),
            num_writers=len(costs),
            state_bytes=max((c.state_bytes for c in costs), default=0),
            written_bytes=sum(c.written_bytes for c in costs),
            blocked_s=max((c.blocked_s for c in costs), default=0.0),
            copied_s=max((c.copied_s for c in costs), default=0.0),
            durable_s=max((c.durable_s for c in costs), default=0.0),
            reason=next((c.reason for c in costs if c.reason), reason),
            url=url,
        )
        return max((c.asked for c in costs), default=0), bool(costs) and not any(c.steps_left for c in costs)

    def failed(self, save: SaveId, cause: str, reason: str, url: str) -> None:
        """Tell that a save came to nothing, unless an earlier coordinator has."""
        self._promises.pop(save, None)
        self.why = reason
        if (save.view, save.step) in self._failed_before:
            return
        self._write("checkpoint_failed", step=save.step, cause=cause, reason=reason, url=url)

    def said(self, name: str, event: Any) -> None:
        """Tell what a member says of its saving; once, where all say the same."""
        fields = msgspec.structs.asdict(event)
        kind = str(event.__struct_config__.tag)
        if kind == "unwritable":
            self._write("checkpoint_failed", step=-1, cause="unwritable", **fields)
            return
        if kind == "differs":
            if event in self._differing:
                return
            self._differing.append(event)
        if kind == "save_retried":
            fields = {"reason": fields["reason"], "attempt": fields["attempt"]}
        self._write(_OURS.get(kind, f"checkpoint_{kind}"), replica=name, **fields)
