"""The coordinator's part in a save: what members say of their parts goes through the rules of commit, and out again.

What a keeper has is put together here, once. Where the saves go, when they are due and what a stop waits for are
`_saves.py`'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from outlast.checkpoint.threads import Threads
from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.core.policy import RunRecord
from outlast.core.protocol import Coordinator, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.saves import commit as cm
from outlast.journal import Journal
from outlast.runtime.coordinator._publisher import Archive, Unheld
from outlast.runtime.settings.save_settings import TIMEOUT_S, SaveSettings
from outlast.runtime.transport import save_messages as wire

__all__ = ["SaveCommits"]

_OVERDUE_S, _OVERDUE = 900.0, 1.5  # or times what a writer may be silent: who is there says sooner that it failed


_REMEMBERED = 32
_AGAIN_S = 0.5  # until a save that people wait for is asked for again
_UNHELD_S = 0.1  # until it is seen again whether this coordinator's claim is confirmed


_Saves = set[tuple[tuple[int, int], int]]


def _written(journal: Journal) -> tuple[_Saves, _Saves]:
    """(begun, published): what an earlier coordinator wrote down, by view and step. It is not told twice."""
    found: dict[str, _Saves] = {"checkpoint_began": set(), "checkpoint_saved": set()}
    for entry in journal.events(kinds=[ev.CheckpointBegan, ev.CheckpointSaved]):
        event = entry.event
        if isinstance(event, ev.CheckpointBegan | ev.CheckpointSaved):
            found[str(event.__struct_config__.tag)].add(((event.view[0], event.view[1]), event.step))
    return found["checkpoint_began"], found["checkpoint_saved"]


class SaveCommits:
    """Follows each save from its first part to its publishing."""

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
        self._now, self._handle = now, handle
        self._journal, self._coordinator, self._run = journal, coordinator, run
        self._epoch, self._config, self._stop_save_s = coordinator.epoch, config, config.stop_save_s
        self._write, self._tell, self._probe = write, tell, probe
        self.settings: SaveSettings | None = None
        self.archive: Archive | None = None
        self._base: int | None = None
        self._commit = cm.CommitState()
        self._view: ViewId | None = None
        # Of a view, or to a store, not known here yet:
        self._early: list[tuple[str, wire.SaveBegun | wire.SaveDone]] = []
        self._begun, self._told = _written(journal)
        self._costs: dict[cm.SaveId, dict[int, wire.SaveDone]] = defaultdict(dict)
        self._dead: dict[cm.SaveId, str] = {}
        self._asked = self._epoch << 20
        self._reason = self._why = ""  # of a wish to save; of the newest save that failed
        self._record = RunRecord(min_s=config.checkpoint_min_s, num_replicas=config.replicas)
        for entry in journal.each():  # an earlier coordinator's; a run of weeks has millions
            self._record.take(entry.event)
        coordinator.shortage.replacements = self._record.replacements()
        self._chooses = False  # when to save is left to outlast
        self._asked_s = -math.inf
        self._shown_s = math.nan
        self._timer: asyncio.TimerHandle | None = None
        self._stops = False  # the run was asked to stop: its last save is asked for
        self._own: m.Stop | None = None  # the run stops by itself
        self._going: set[str] = set()  # members that were asked to leave
        self._after: list[tuple[int, m.Stop | m.Leaving]] = []  # (number of the request, what goes on when it is met)
        self._go_on: Callable[[Any], None] = lambda message: None
        self._hasty: list[m.Stop | m.Leaving] = []  # said to a coordinator that does not know yet what was saved
        self._differing: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self._opening = Threads(1, "outlast-open")

    def _everyone(self) -> list[str]:
        return list(self._coordinator.roster.peers)

    def received(self, name: str, message: wire.FromMember) -> None:
        """A promise, a failure, or something for the journal."""
        if isinstance(message, wire.SaveSaid):
            self._write_said(name, message.event)
        elif isinstance(message, wire.SaveCertified):
            self._feed(cm.Certified(step=message.step))
        elif isinstance(message, wire.SaveLost):
            self._lost(message.save, message.writer, message.reason)
        elif self._base is None or message.save.view > self._commit.view:
            self._early = [*self._early[-_REMEMBERED:], (name, message)]
        elif message.save in self._dead:
            self._settle([name], message.save, None, self._dead[message.save])
        elif self._went_with_its_view(message.save):
            self._known(message.save, message.reason)
            reason = "its view had ended when it became known"
            self._carry_out(cm.Abandon(save=message.save, reason=reason, cause="view_changed"))
        elif isinstance(message, wire.SaveBegun):
            actions = self._step(cm.WriterBegan(save=message.save, writer=message.writer))
            self._known(message.save, message.reason, refused=bool(actions))
            self._answer(name, message.save, actions)
        else:
            self._promised(name, message)

    def _went_with_its_view(self, save: cm.SaveId) -> bool:
        """Whether the first news of a save came after its view: who wished for it must not wait for it in vain."""
        state = self._commit
        later = state.newest is not None and state.newest[0].step >= save.step
        pending = any(p.save == save for p in state.pending)
        return save.view < state.view and not (later or pending)

    def _known(self, save: cm.SaveId, reason: str, *, refused: bool = False) -> None:
        """The first news of a save."""
        if refused or (save.view, save.step) in self._begun:
            return
        self._begun.add((save.view, save.step))
        self._write("checkpoint_began", step=save.step, view=list(save.view), reason=reason)
        self._loop.call_later(self._overdue_s, self._overdue, save)

    def _promised(self, name: str, message: wire.SaveDone) -> None:
        save = message.save
        self._costs[save][message.report.writer] = message
        durable = self._step(cm.WriterDurable(save=save, report=message.report))
        self._known(save, message.reason, refused=any(isinstance(action, cm.Refuse) for action in durable))
        self._answer(name, save, durable + self._step(cm.StepStable(step=save.step)))

    def _answer(self, name: str, save: cm.SaveId, actions: Iterable[cm.CommitAction]) -> None:
        for action in actions:
            if isinstance(action, cm.Refuse):
                newest = self._commit.newest
                same = newest is not None and (newest[0].view, newest[0].step) == (save.view, save.step)
                self._settle([name], save, newest[1] if same and newest is not None else None, action.reason)
            else:
                self._carry_out(action)

    def _lost(self, save: cm.SaveId, writer: int, reason: str) -> None:
        """Also of a save that no promise was heard of yet: those that come must not wait for this writer. A view that
        has ended took its saves with it, or they are complete."""
        if save in self._dead or save.view < self._commit.view:
            return
        known = any(p.save == save for p in self._commit.pending)
        self._feed(cm.WriterFailed(save=save, writer=writer, reason=reason))
        if not known:
            self._carry_out(cm.Abandon(save=save, reason=f"writer {writer}: {reason}", cause="writer_failed"))

    def _overdue(self, save: cm.SaveId) -> None:
        for pending in [p for p in self._commit.pending if p.save == save and not p.durable]:
            missing = min(set(pending.writers) - {r.writer for r in pending.reports})
            self._lost(save, missing, f"nothing was heard of it for {self._overdue_s:g} s")

    def _step(self, event: cm.CommitEvent) -> tuple[cm.CommitAction, ...]:
        self._commit, actions = cm.commit_step(self._commit, event)
        return actions

    def _feed(self, event: cm.CommitEvent) -> None:
        for action in self._step(event):
            self._carry_out(action)

    def _carry_out(self, action: cm.CommitAction) -> None:
        archive = self.archive
        if isinstance(action, cm.Publish):
            self._publish(action)
        elif isinstance(action, cm.Announce):
            self._announce(action)
        elif isinstance(action, cm.Abandon):
            self._abandon(action)
        elif isinstance(action, cm.Certify) and archive is not None:
            archive.certify(action.generation)

    def _publish(self, action: cm.Publish) -> None:
        """While another may have followed this coordinator it writes nothing to the store, and tries again later."""
        archive = self.archive
        if archive is None or not any(p.save == action.save and p.publishing for p in self._commit.pending):
            return
        if not self._journal.held:
            if self._journal.epoch == self._epoch:
                self._loop.call_later(_UNHELD_S, self._publish, action)
            return
        publish = lambda: archive.publish(action.save, action.reports, certified=action.certified)  # noqa: E731
        late = self._loop.call_later(self._timeout_s, self._unanswered, action.save)
        self._later(archive.publisher, publish, lambda done: self._published(action, done, late))

    def _published(self, action: cm.Publish, done: concurrent.futures.Future[int], late: asyncio.TimerHandle) -> None:
        late.cancel()
        error, save = done.exception(), action.save
        if isinstance(error, Unheld):
            self._publish(action)  # as soon as the claim is confirmed again
        elif error is not None:
            self._feed(cm.PublishFailed(save=save, reason=f"{type(error).__name__}: {error}"))
            mine = self._journal.held and self._journal.epoch == self._epoch
            if self.archive is not None and mine:  # else a newer one may publish them
                self.archive.give_back(save)
        else:
            self._feed(cm.Published(save=save, generation=done.result()))

    def _unanswered(self, save: cm.SaveId) -> None:
        """The store hangs: said, so that nobody waits for it unknowing. Should it come back, what it made is whole."""
        if any(p.save == save and p.publishing for p in self._commit.pending):
            reason = f"the store has not answered for {self._timeout_s:g} s; what follows waits for it"
            self._feed(cm.PublishFailed(save=save, reason=reason))

    @property
    def _overdue_s(self) -> float:
        """Seconds after which a save is given up as a whole; it may take long and be well, for its writers' own watch
        is over their silence."""
        return max(_OVERDUE_S, _OVERDUE * self._timeout_s)

    @property
    def _timeout_s(self) -> float:
        return self.settings.timeout_s if self.settings is not None else TIMEOUT_S

    def _announce(self, action: cm.Announce) -> None:
        self._settle(self._everyone(), action.save, action.generation, "")
        self._loop.call_soon(self._handle, m.SavePublished(step=action.save.step))
        archive, costs = self.archive, list(self._costs.pop(action.save, {}).values())
        if (action.save.view, action.save.step) in self._told or archive is None:
            return
        self._told.add((action.save.view, action.save.step))
        blocked_s = max((c.blocked_s for c in costs), default=0.0)
        durable_s = max((c.durable_s for c in costs), default=0.0)
        self._write(
            "checkpoint_saved",
            step=action.save.step,
            generation=action.generation,
            view=list(action.save.view),
            num_writers=len(costs),
            state_bytes=max((c.state_bytes for c in costs), default=0),
            written_bytes=sum(c.written_bytes for c in costs),
            blocked_s=blocked_s,
            copied_s=max((c.copied_s for c in costs), default=0.0),
            durable_s=durable_s,
            reason=next((c.reason for c in costs if c.reason), self._reason),
            url=archive.url,
        )
        self._reason = ""
        if self._journal.held:
            archive.tidy(action.generation, self._commit.protected)
        met = max((c.asked for c in costs), default=0)
        if self._after and self._coordinator.change is not None and self._nobody_stays():
            # A view is being made, in which a step more is committed before anybody hears of the stop.
            self.ask("every replica was asked to leave")
            self._hold(*(message for _, message in self._after))
        else:
            self._release(met)

    def _abandon(self, action: cm.Abandon) -> None:
        self._costs.pop(action.save, None)
        self._dead[action.save] = action.reason
        for old in list(self._dead)[:-_REMEMBERED]:
            del self._dead[old]
        self._settle(self._everyone(), action.save, None, action.reason)
        url = self.archive.url if self.archive is not None else ""
        self._why = action.reason
        self._write("checkpoint_failed", step=action.save.step, cause=action.cause, reason=action.reason, url=url)
        if action.cause == "view_changed":
            self.ask(f"the save of step {action.save.step} was lost with its view")
        elif self._own is not None:  # it was tried: another is not waited for as long
            self._loop.call_later(self._stop_save_s, self._tried, self._own)
        elif self._after:
            self._loop.call_later(_AGAIN_S, self._ask_again)

    def _settle(self, names: Iterable[str], save: cm.SaveId, generation: int | None, reason: str) -> None:
        self._tell(names, wire.SaveSettled(epoch=self._epoch, save=save, generation=generation, reason=reason))

    def ask(self, reason: str) -> None:
        """Have the members save after the next step in which all can."""
        if self._base is None:
            return
        self._asked = self._asked // 2 * 2 + (3 if self._stops or self._nobody_stays() else 2)
        self._reason = reason
        self._tell(self._everyone(), wire.SaveNow(epoch=self._epoch, number=self._asked, reason=reason))

    def _ask_again(self) -> None:
        """The save before a stop, or a departure, came to nothing, and there may be time for another."""
        if self._after and not self._commit.pending:
            self.ask(self._reason or "the save before it came to nothing")

    def _nobody_stays(self) -> bool:
        """Whether all who have the state were asked to leave and nobody comes: the run stops with its next save."""
        roster, view = self._coordinator.roster, self._coordinator.view
        coming = [n for n in roster.having("spawning", "fresh", "joining", "ready") if n not in self._going]
        return view is not None and not coming and self._going.issuperset(roster.alive(view.members))

    def _hold(self, *messages: m.Stop | m.Leaving) -> None:
        """They go on when the newest request is met."""
        held = [(asked, message) for asked, message in self._after if message not in messages]
        self._after = [*held, *((self._asked, message) for message in messages)]

    def _time_is_up(self, message: m.Stop | m.Leaving) -> None:
        """However often its save was asked for."""
        self._release(max((asked for asked, held in self._after if held == message), default=0))

    def _tried(self, message: m.Stop) -> None:
        """A save came to nothing a while ago. The stop goes on, unless another is under way."""
        if not self._commit.pending:
            self._time_is_up(message)

    def _release(self, number: int) -> None:
        """The request of this number is met, and all before it, or its time is up."""
        met = [message for asked, message in self._after if asked <= number]
        self._after = [(asked, message) for asked, message in self._after if asked > number]
        for stop in (message for message in met if isinstance(message, m.Stop)):
            self._go_on(stop)
        if going := tuple(message.member for message in met if isinstance(message, m.Leaving)):
            self._go_on(m.Departing(members=going))
        self._tell_awaited()

    def _tell_awaited(self) -> None:
        """Who waits for lost replicas makes no step: not while a stop, or the departure of all, waits for its save."""
        c, going = self._coordinator, self._going
        all_go = c.view is not None and going.issuperset(c.roster.alive(c.view.members))
        awaited = bool(self._after) and (self._stops or all_go)
        may_wait = c.settings.vacancies.kind != "shrink" or c.settings.min_replicas > 1
        if may_wait and awaited != c.shortage.saving:
            self._handle(m.SaveAwaited(waits=awaited))

    def _write_said(self, name: str, event: Any) -> None:
        fields = msgspec.structs.asdict(event)
        kind = str(event.__struct_config__.tag)
        if kind == "differs":
            if event in self._differing:
                return  # all say the same
            self._differing.append(event)
        names = {"save_delayed": "checkpoint_delayed", "save_retried": "checkpoint_retried"}
        if kind == "save_retried":
            if event.full and self.archive is not None and self._journal.held:
                self.archive.make_room(self._commit.protected)
            fields = {"reason": fields["reason"], "attempt": fields["attempt"]}
        if kind == "unwritable":
            self._write("checkpoint_failed", step=-1, cause="unwritable", **fields)
            return
        self._write(names.get(kind, f"checkpoint_{kind}"), replica=name, **fields)

    def _said(self, kind: str, fields: dict[str, Any]) -> None:
        """From the archive's threads."""
        self._loop.call_soon_threadsafe(lambda: self._write(kind, **fields))

    def _later(
        self,
        pool: concurrent.futures.Executor,
        work: Callable[[], Any],
        then: Callable[[concurrent.futures.Future[Any]], None],
    ) -> None:
        """`work` on a thread, `then` on the loop."""
        pool.submit(work).add_done_callback(lambda done: self._loop.call_soon_threadsafe(then, done))
