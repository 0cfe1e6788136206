"""The coordinator's part in checkpoints: the commit rules carried out, and when to ask for a save. No torch.

It learns from the members' facts where checkpoints go, from their promises what may be published, and from what the
journal is told when the next save is due. Publishing, pruning and copying to the farther place run on threads of their
own; everything else on the loop's. Invariants: nothing is published that `core.protocol.saves.commit` did not release;
no failure of a store reaches membership; a coordinator without checkpoints does nothing here.

Here is the door, which puts its parts together and deals out to them what happens: where saves go (`_save_place.py`),
what the journal is told of them (`_save_story.py`), the commit rules (`_save_commits.py`), the requests for saves
(`_save_requests.py`), when the next one is due (`_save_pacing.py`), what waits for one (`_held_back.py`), and the run's
record (`_run_beliefs.py`), with what earlier coordinators have left of it (`_record_summary.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.core.protocol import Coordinator, ViewId
from outlast.core.protocol import messages as m
from outlast.errors import Unsaved
from outlast.journal import Journal
from outlast.runtime.coordinator._held_back import HeldBack
from outlast.runtime.coordinator._record_summary import RecordSummary
from outlast.runtime.coordinator._run_beliefs import RunBeliefs
from outlast.runtime.coordinator._save_commits import SaveCommits
from outlast.runtime.coordinator._save_pacing import SavePacing
from outlast.runtime.coordinator._save_place import SavePlace
from outlast.runtime.coordinator._save_requests import Leavers, SaveRequests
from outlast.runtime.coordinator._save_story import SaveStory
from outlast.runtime.transport import save_messages as wire

__all__ = ["Keeper"]


class Keeper:
    """Keeps the run's checkpoints: chooses when, hears of parts, and publishes. `write` appends to the journal, `tell`
    sends to members by name, `handle` is what the machine hears; all on the loop. `now`: the clock of the journal's
    events. `place`: where the saves go; `progress`: how far earlier coordinators have told it."""

    def __init__(
        self,
        journal: Journal,
        coordinator: Coordinator,
        *,
        run: str,
        config: RunConfig,
        write: Callable[..., None],
        tell: Callable[[Iterable[str], Any], None],
        probe: Callable[[Phase, int], None],
        now: Callable[[], float],
        handle: Callable[[Any], None],
    ) -> None:
        self._coordinator, self._ranks = coordinator, config.ranks
        self._view: ViewId | None = None
        self.summary = RecordSummary(journal, coordinator.epoch, config)
        earlier = self.summary.taken()  # by coordinators before this one
        self.progress, self._story = earlier.progress, SaveStory(earlier, write)
        self._beliefs = RunBeliefs(earlier.record, coordinator, config, now=now, handle=handle)
        self.place = SavePlace(
            journal, coordinator, run=run, config=config, write=write, tell=tell, probe=probe, opened=self.look
        )
        leavers = Leavers(coordinator)
        self._requests = SaveRequests(coordinator, leavers, self.place, tell=tell, write=write)
        self._pacing = SavePacing(
            self._beliefs.record, coordinator, self.place,
            write=write, now=now, ask=self._requests.ask, free=self._may_save,
        )  # fmt: skip
        self._held = HeldBack(
            journal, coordinator, self._requests, leavers,
            limit_s=config.stop_save_s, takes_s=self._pacing.takes_s,
            under_way=lambda: self._commits.under_way, handle=handle,
        )  # fmt: skip
        self._commits = SaveCommits(
            journal, coordinator, self.place, self._story, self._held, tell=tell, handle=handle
        )  # fmt: skip

    # --- what happens --------------------------------------------------------------------------------------------
    def look(self) -> None:
        """After every event: what the machine has learnt or decided that matters here."""
        self.place.look()
        view, base = self._coordinator.view, self.place.base
        if base is None or view is None or view.id == self._view:
            return
        self._view = view.id
        self._pacing.arm()
        self._held.view_changed()
        self._commits.view_changed(view, base, len(view.members) * self._ranks)

    def greet(self, name: str) -> None:
        """A member said hello."""
        self.place.greet(name)
        self._requests.greet(name)

    def received(self, name: str, message: wire.FromMember) -> None:
        """A promise, a failure, or something for the journal."""
        self._commits.received(name, message)

    def heard(self, event: ev.AnyEvent) -> None:
        """What was just written into the journal: the record that decides when to save is made of nothing else."""
        self._beliefs.heard(event)
        self.summary.heard()
        self._held.heard(event)
        if isinstance(event, ev.StateCertified):
            self._commits.certified(event.step)
        if isinstance(event, ev.AlarmWeighed) and event.action == "save" and not event.told_only:
            self.wanted(f"{event.host} may fail: {event.evidence}")
        self._pacing.heard(event)

    def _may_save(self) -> bool:
        c = self._coordinator
        return self._view is not None and not self._commits.under_way and not (c.over or c.ending is not None)

    # --- what somebody wants -------------------------------------------------------------------------------------
    def wanted(self, reason: str) -> None:
        """Somebody asks for a save now: as a wish of the run's own, and told in the journal."""
        self._requests.wanted(reason)

    def before(self, message: Any, go_on: Callable[[Any], None]) -> bool:
        """A stop or a departure: whether a save goes first. `go_on` is told of it when that is done, or its time is up;
        of departures that one save is made for at once."""
        return self._held.before(message, go_on)

    def returned(self, hello: m.Hello, go_on: Callable[[Any], None]) -> m.Hello:
        """A member that was asked to leave says hello to a coordinator that has just taken over, or once more: its
        departure waits for a save all the same, and until then it is a member as any other."""
        return self._held.returned(hello, go_on)

    # --- the end -------------------------------------------------------------------------------------------------
    def saved_in(self, view: ViewId | None) -> int:
        """Return the newest step that was published in this view: so many are committed, whoever has said so. None:
        there is no view, and the next one goes on from what is published."""
        return max(0, self._story.newest) if view is None else self._story.newest_in(self.place.counted(view))

    def unsaved(self, steps: int) -> str:
        """For the end of a run that did all its steps: why the last of them are in no checkpoint; "" if they are."""
        newest, settings = self._story.newest, self.place.settings
        if settings is None or not steps or newest >= steps:
            return ""
        return str(Unsaved.of(steps, newest, self.place.url or settings.target, self._story.why))

    def with_unsaved(self, actions: Sequence[m.Action]) -> Sequence[m.Action]:
        """Where the run ends now, and its last steps are in no checkpoint: have the record, the agents and the journal
        say so alike."""
        ends = [action for action in actions if isinstance(action, m.Finish)]
        if not ends or ends[0].outcome != "finished" or ends[0].exit_code or not (why := self.unsaved(ends[0].steps)):
            return actions
        code: dict[str, Any] = {"exit_code": Unsaved.exit_code}
        said = code | {"detail": why}

        def ended(action: m.Action) -> m.Action:
            if isinstance(action, m.Finish):
                return msgspec.structs.replace(action, **said)
            if isinstance(action, m.Persist) and action.record.outcome:
                return msgspec.structs.replace(action, record=msgspec.structs.replace(action.record, **said))
            if isinstance(action, m.Tell) and isinstance(action.message, m.Stop):
                return msgspec.structs.replace(action, message=msgspec.structs.replace(action.message, **code))
            return action

        return [ended(action) for action in actions]

    async def close(self) -> None:
        """Finish what is being published and copied; nothing new is begun."""
        self._pacing.rest()
        self.summary.close()
        await self.place.close()
