"""The coordinator's part in checkpoints: the commit rules carried out, and when to ask for a save. No torch.

It learns from the members' facts where checkpoints go, from their promises what may be published, and from what the
journal is told when the next save is due. Publishing, pruning and copying to the farther place run on threads of their
own; everything else on the loop's. Invariants: nothing is published that `core.protocol.saves.commit` did not release;
no failure of a store reaches membership; a coordinator without checkpoints does nothing here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.core.protocol import ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.saves import commit as cm
from outlast.errors import MembershipError, Unsaved
from outlast.runtime.coordinator._publisher import Archive
from outlast.runtime.coordinator._save_commits import SaveCommits
from outlast.runtime.settings.head_settings import recorded
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.transport import save_messages as wire

__all__ = ["Keeper"]

_AGAIN_S = 30.0  # between two tries to open a store that refuses
_SEVERAL = 4  # times as long as a step and its save have taken: the limit of a stop that nobody asked for
_CHANGED = 0.2  # an interval that differs by less is no news
_DEATHS = (ev.FleetGone, ev.ReplicaExited)
_COUNTING = (*_DEATHS, ev.JoinerCaughtUp, ev.ProgressMade, ev.AgentStarted)  # of how many spares are worth holding
_REPLACING = (ev.JoinerCaughtUp, ev.ViewFormed, ev.CheckpointSaved)  # of what a replacement takes
_TELLING = (*_DEATHS, ev.ProgressMade, ev.CheckpointSaved, ev.CheckpointFailed, ev.ViewFormed)  # of when to save next


class Keeper(SaveCommits):
    """Keeps the run's checkpoints: chooses when, hears of parts, and publishes. `write` appends to the journal, `tell`
    sends to members by name; both on the loop. `now`: the clock of the journal's events."""

    # --- the place -----------------------------------------------------------------------------------------------
    def look(self) -> None:
        """After every event: what the machine has learnt or decided that matters here."""
        shown = self._coordinator.facts.get("checkpoints")
        if self.settings is None and shown:
            self.settings = msgspec.json.decode(shown, type=SaveSettings)
            self._open()
        view = self._coordinator.view
        if self._base is None or view is None or view.id == self._view:
            return
        self._view = view.id
        self._arm()
        self._loop.call_soon(self._no_longer_early)
        self._loop.call_soon(self._tell_awaited)
        number = (self._base + view.id.epoch, view.id.n)
        self._feed(
            cm.ViewChanged(
                view=number,
                writers=tuple(range(len(view.members) * self._config.ranks)),
                begins=view.start or view.saved > 0,
            )
        )
        early, self._early = self._early, []
        for name, message in early:
            self.received(name, message)

    def _open(self) -> None:
        assert self.settings is not None
        extra = recorded(self._config, self.settings, self._coordinator.facts)
        archive = Archive(self.settings, self._run, self._said, self._probe, extra, lambda: self._journal.held)
        late = self._loop.call_later(self._timeout_s, self._not_opened, archive.url)
        self._later(self._opening, archive.newest_epoch, lambda done: self._opened(archive, done, late))

    def _not_opened(self, url: str) -> None:
        reason = f"it has not answered for {self._timeout_s:g} s; nothing is saved until it does"
        self._write("checkpoint_failed", step=-1, cause="unreadable", reason=reason, url=url)

    def _opened(self, archive: Archive, done: concurrent.futures.Future[int], late: asyncio.TimerHandle) -> None:
        late.cancel()  # a refusal is an answer, too
        error = done.exception()
        if error is not None:
            self._write("checkpoint_failed", step=-1, cause="unreadable", reason=str(error), url=archive.url)
            self._loop.call_later(_AGAIN_S, self._open)
            return
        stored = self._journal.get(wire.SAVE_EPOCHS)
        base = int(stored) if stored else done.result()
        if stored is None and not self._journal.put(self._epoch, wire.SAVE_EPOCHS, str(base).encode()):
            return  # a newer coordinator is there
        self.archive, self._base = archive, base
        assert self.settings is not None
        self._chooses = not self.settings.every
        self._tell(self._everyone(), wire.SaveBase(epoch=self._epoch, base=base))
        self.look()

    def greet(self, name: str) -> None:
        """A member said hello."""
        if self._base is not None:
            self._tell([name], wire.SaveBase(epoch=self._epoch, base=self._base))
            if self._reason:
                self._tell([name], wire.SaveNow(epoch=self._epoch, number=self._asked, reason=self._reason))

    # --- the commit rules ----------------------------------------------------------------------------------------

    def saved_in(self, view: ViewId) -> int:
        """Return the newest step that was published in this view: so many are committed, whoever has said so."""
        return max((step for said, step in self._told if said == (view.epoch, view.n)), default=0)

    def unsaved(self, steps: int) -> str:
        """For the end of a run that did all its steps: why the last of them are in no checkpoint; "" if they are."""
        newest = max((step for _, step in self._told), default=-1)
        if self.settings is None or not steps or newest >= steps:
            return ""
        url = self.archive.url if self.archive is not None else self.settings.target
        return str(Unsaved.of(steps, newest, url, self._why))

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

    # --- when ----------------------------------------------------------------------------------------------------

    def wanted(self, reason: str) -> None:
        """Somebody asks for a save now: as a wish of the run's own, and told in the journal."""
        c = self._coordinator
        if self._base is None or c.over or c.ending is not None:
            why = "the run is over" if c.over or c.ending is not None else "the run keeps no checkpoints, or not yet"
            self._write("notice", level="warning", text=f"{reason}, and none is made: {why}")
            return
        self._write("checkpoint_interval", interval_s=0.0, mtbr_s=0.0, reason=f"now: {reason}")
        self.ask(reason)

    def before(self, message: Any, go_on: Callable[[Any], None]) -> bool:
        """A stop or a departure: whether a save goes first. `go_on` is told of it when that is done, or its time is up;
        of departures that one save is made for at once."""
        if not isinstance(message, m.Stop | m.Leaving) or not self._stop_save_s:
            return False
        if self._view is None:
            return self._too_early(message, go_on)
        c = self._coordinator
        if c.over or c.ending is not None or c.view is None or not c.roster.alive(c.view.members):
            return False
        who = "the run was asked to stop"
        if isinstance(message, m.Leaving):
            who = f"{message.member} was asked to leave"
            self._going.add(message.member)
        self._stops = self._stops or isinstance(message, m.Stop)
        if c.change is not None and not (self._stops or self._nobody_stays()):
            return False  # a view is being made in any case, and others have the state
        self.ask(who)
        self._write("checkpoint_interval", interval_s=0.0, mtbr_s=0.0, reason=f"now: {who}")
        self._go_on = go_on
        self._hold(message)
        self._tell_awaited()
        self._loop.call_later(self._limit_s(message), self._time_is_up, message)
        return True

    def returned(self, hello: m.Hello, go_on: Callable[[Any], None]) -> m.Hello:
        """A member that was asked to leave says hello to a coordinator that has just taken over, or once more: its
        departure waits for a save all the same, and until then it is a member as any other."""
        c, going = self._coordinator, m.Leaving(member=hello.member)
        if not hello.leaving or c.view is None or hello.member not in c.view.members:
            return hello
        held = [*self._hasty, *(message for _, message in self._after)]
        if going not in held and not self.before(going, go_on):
            return hello
        return msgspec.structs.replace(hello, leaving=False)

    def _too_early(self, message: m.Stop | m.Leaving, go_on: Callable[[Any], None]) -> bool:
        """Whether it waits for what an earlier coordinator had saved to be known here."""
        known = self._journal.get(wire.SAVE_EPOCHS) is not None and not self._coordinator.over
        if known and message not in self._hasty:
            self._go_on = go_on
            self._hasty.append(message)
            self._loop.call_later(self._limit_s(message), self._no_longer_early, True)
        return known

    def _no_longer_early(self, at_last: bool = False) -> None:
        """What was asked too early is asked now; `at_last`: its time is up."""
        hasty, self._hasty = self._hasty, []
        for message in hasty:
            if at_last or not self.before(message, self._go_on):
                self._go_on(message)

    def heard(self, event: ev.AnyEvent) -> None:
        """What was just written into the journal: the record that decides when to save is made of nothing else."""
        self._record.take(event)
        if self._config.spares == "auto" and isinstance(event, _COUNTING):
            self._loop.call_soon(self._weigh_spares)  # not in the middle of what the machine is doing
        if isinstance(event, _REPLACING) and self._coordinator.settings.vacancies.kind != "shrink":
            self._loop.call_soon(self._believe)
        if isinstance(event, ev.VacancyDecided) and event.action == "stop":
            self._loop.call_soon(self._stop, f"too few replicas: {event.reason}")
        if isinstance(event, ev.StateCertified):
            self._feed(cm.Certified(step=event.step))
        if isinstance(event, ev.AlarmWeighed) and event.action == "save" and not event.told_only:
            self.wanted(f"{event.host} may fail: {event.evidence}")
        if isinstance(event, _DEATHS):
            self._shown_s = math.nan
        if isinstance(event, _TELLING):
            self._arm()

    def _weigh_spares(self) -> None:
        """Tell the machine how many spares are worth holding, where that is another number than it holds."""
        number = int(self._record.spares(self._now()).spares)
        if self._record.begun and number != self._coordinator.settings.num_spares:
            self._handle(m.SparesWorth(number=number, reason=self._record.spares_reason()))

    def _believe(self) -> None:
        """Tell the machine what the record says of replacements, where that is news."""
        found = self._record.replacements()
        if found != self._coordinator.shortage.replacements:
            self._handle(
                m.ReplacementsBelieved(
                    expected_s=found.expected_s, reshape_s=found.reshape_s, restart_s=found.restart_s
                )
            )

    def _stop(self, reason: str) -> None:
        """The run stops by itself, after a save."""
        self._own = m.Stop(reason=reason, exit_code=MembershipError.exit_code)
        if not self.before(self._own, self._handle):
            self._handle(self._own)

    def _limit_s(self, message: m.Stop | m.Leaving) -> float:
        """How long the save before it may take. Who asks for a stop kills soon; where the run stops by itself nobody
        does, and its save may take what steps and saves took so far, several times over: the first step of a new view
        is seldom the one that all can save, and those that are left have the work of all."""
        if message != self._own:
            return self._stop_save_s
        c, record = self._coordinator, self._record
        left = len(c.roster.alive(c.view.members)) if c.view is not None else 0
        step_s = record.step_s * c.settings.num_replicas / max(1, left)
        unseen_s = 0.0 if record.durable_s else self._timeout_s  # of a save, as long as its writers give a sign of life
        return max(self._stop_save_s, _SEVERAL * (step_s + record.durable_s) + unseen_s)

    def _arm(self) -> None:
        """Decide again when the next save is due."""
        if not self._chooses or not self._record.begun:
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
        if self._timer is not None:
            self._timer.cancel()
        if due_s < math.inf:
            self._timer = self._loop.call_later(max(0.0, due_s), self._due)

    def _due(self) -> None:
        self._asked_s = self._now()
        if (
            self._view is not None
            and self._commit.pending == ()
            and not (self._coordinator.over or self._coordinator.ending is not None)
        ):
            self.ask(f"due: {self._record.saving(self._asked_s).reason}")
        self._arm()

    # --- the journal, the threads, the end -----------------------------------------------------------------------

    async def close(self) -> None:
        """Finish what is being published and copied; nothing new is begun."""
        if self._timer is not None:
            self._timer.cancel()
        self._opening.leave(0.0)
        if self.archive is not None:
            await asyncio.to_thread(self.archive.close)
