"""What the run's record believes, for its coordinator: kept up with the journal, told to the machine where it is news.

It is how many spares are worth holding and what a replacement takes; when to save is `_save_pacing.py`'s. No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.policy import RunRecord
from outlast.core.protocol import Coordinator
from outlast.core.protocol import messages as m

__all__ = ["RunBeliefs"]

# Of how many spares are worth holding:
_COUNTING = (ev.FleetGone, ev.ReplicaExited, ev.JoinerCaughtUp, ev.ProgressMade, ev.AgentStarted)
_REPLACING = (ev.JoinerCaughtUp, ev.ViewFormed, ev.CheckpointSaved)  # of what a replacement takes


class RunBeliefs:
    """Keeps up the run's record (`record`, of all that the journal holds) and tells the machine what follows for
    spares and replacements. `now`: the clock of the journal's events; `handle`: what the machine hears, on the loop."""

    def __init__(
        self,
        record: RunRecord,
        coordinator: Coordinator,
        config: RunConfig,
        *,
        now: Callable[[], float],
        handle: Callable[[Any], None],
    ) -> None:
        self._coordinator, self._weighs_spares = coordinator, config.spares == "auto"
        self._now, self._handle = now, handle
        self._loop = asyncio.get_running_loop()
        self.record = record
        coordinator.shortage.replacements = self.record.replacements()

    def heard(self, event: ev.AnyEvent) -> None:
        """What was just written into the journal."""
        self.record.take(event)
        if self._weighs_spares and isinstance(event, _COUNTING):
            self._loop.call_soon(self._weigh_spares)  # not in the middle of what the machine is doing
        if isinstance(event, _REPLACING) and self._coordinator.settings.vacancies.kind != "shrink":
            self._loop.call_soon(self._believe)

    def _weigh_spares(self) -> None:
        """Tell the machine how many spares are worth holding, where that is another number than it holds."""
        number = int(self.record.spares(self._now()).spares)
        if self.record.begun and number != self._coordinator.settings.num_spares:
            self._handle(m.SparesWorth(number=number, reason=self.record.spares_reason()))

    def _believe(self) -> None:
        """Tell the machine what the record says of replacements, where that is news."""
        found = self.record.replacements()
        if found != self._coordinator.shortage.replacements:
            self._handle(
                m.ReplacementsBelieved(
                    expected_s=found.expected_s, reshape_s=found.reshape_s, restart_s=found.restart_s
                )
            )
