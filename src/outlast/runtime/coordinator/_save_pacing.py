"""When the next save is due where that is left to outlast, and how long one may take: by the run's record.

Asks for a save each time one is due, and says in the journal how far they are apart. No torch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from outlast.core import events as ev
from outlast.core.policy import RunRecord
from outlast.core.protocol import Coordinator
from outlast.runtime.coordinator._save_place import SavePlace

__all__ = ["SavePacing"]

_SEVERAL = 4  # times as long as a step and its save have taken: the limit of a stop that nobody asked for
_CHANGED = 0.2  # an interval that differs by less is no news
_DEATHS = (ev.FleetGone, ev.ReplicaExited)
_TELLING = (*_DEATHS, ev.ProgressMade, ev.CheckpointSaved, ev.CheckpointFailed, ev.ViewFormed)  # of when to save next


class SavePacing:
    """Asks for a save each time the run's record says that one is due. `now`: the clock of the record's events;
    `ask(reason)`; `free()`: whether one can be made and none is."""

    def __init__(
        self,
        record: RunRecord,
        coordinator: Coordinator,
        place: SavePlace,
        *,
        write: Callable[..., None],
        now: Callable[[], float],
        ask: Callable[[str], None],
        free: Callable[[], bool],
    ) -> None:
        self._record, self._coordinator, self._place = record, coordinator, place
        self._write, self._now, self._ask, self._free = write, now, ask, free
        self._asked_s = -math.inf
        self._shown_s = math.nan
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def heard(self, event: ev.AnyEvent) -> None:
        """The record has just taken this event."""
        if isinstance(event, _DEATHS):
            self._shown_s = math.nan
        if isinstance(event, _TELLING):
            self.arm()

    def arm(self) -> None:
        """Decide again when the next save is due."""
        if not self._place.chooses or not self._record.begun:
            return
        now_s = self._now()
        decision = self._record.saving(now_s)
        due_s = max(self._record.since_s, self._asked_s) + decision.interval_s - now_s
        same = decision.interval_s == self._shown_s
        if not (same or abs(decision.interval_s - self._shown_s) <= _CHANGED * min(decision.interval_s, self._shown_s)):
            self._shown_s = decision.interval_s
            interval_s = None if decision.interval_s == math.inf else decision.interval_s
            self._write(
                "checkpoint_interval", at_s=now_s, interval_s=interval_s, mtbr_s=decision.mtbr_s, reason=decision.reason
            )
        self.rest()
        if due_s < math.inf:
            self._timer = self._loop.call_later(max(0.0, due_s), self._due)

    def rest(self) -> None:
        """Nothing is due until it is decided again."""
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        self._asked_s = self._now()
        if self._free():
            self._ask(f"due: {self._record.saving(self._asked_s).reason}")
        self.arm()

    def takes_s(self) -> float:
        """How long the last save of a run that stops by itself may take: what steps and saves took so far, several
        times over. The first step of a new view is seldom the one that all can save, and those that are left have the
        work of all."""
        c, record = self._coordinator, self._record
        left = len(c.roster.alive(c.view.members)) if c.view is not None else 0
        step_s = record.step_s * c.settings.num_replicas / max(1, left)
        # Of a save, as long as its writers give a sign of life:
        unseen_s = 0.0 if record.durable_s else self._place.timeout_s
        return _SEVERAL * (step_s + record.durable_s) + unseen_s
