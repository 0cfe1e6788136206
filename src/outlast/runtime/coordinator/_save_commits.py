"""The coordinator's part in a save: what members say of their parts goes through the rules of commit, and out again.

Nothing is published that `core.protocol.saves.commit` did not release, and nothing while another coordinator may have
followed this one. Where the saves go is `_save_place.py`'s, what is told of them `_save_story.py`'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from outlast.checkpoint.save_events import SaveRetried
from outlast.core.protocol import Coordinator, View
from outlast.core.protocol import messages as m
from outlast.core.protocol.saves import commit as cm
from outlast.journal import Journal
from outlast.runtime.coordinator._publisher import Unheld
from outlast.runtime.coordinator._save_place import SavePlace, on_thread
from outlast.runtime.coordinator._save_story import SaveStory
from outlast.runtime.transport import save_messages as wire

__all__ = ["SaveCommits", "SaveWishes"]

_OVERDUE_S, _OVERDUE = 900.0, 1.5  # or times what a writer may be silent: who is there says sooner that it failed
_REMEMBERED = 32
_UNHELD_S = 0.1  # until it is seen again whether this coordinator's claim is confirmed


class SaveWishes(Protocol):
    """Who wished for saves, and hears what becomes of each."""

    @property
    def reason(self) -> str:
        """Why the newest save was asked for; "" once one that answers it has been."""

    def saved(self, number: int, last: bool) -> None:
        """A save was published, which answers the request of this number and all before it. `last`: no step follows."""

    def abandoned(self, step: int, cause: str) -> None:
        """The save of this step came to nothing."""


class SaveCommits:
    """Carries out the rules of commit for each save, from its first part to its publishing. `tell` sends to members by
    name; `handle`: what the machine hears, on the loop."""

    def __init__(
        self,
        journal: Journal,
        coordinator: Coordinator,
        place: SavePlace,
        story: SaveStory,
        wishes: SaveWishes,
        *,
        tell: Callable[[Iterable[str], Any], None],
        handle: Callable[[Any], None],
    ) -> None:
        self._journal, self._coordinator = journal, coordinator
        self._place, self._story, self._wishes = place, story, wishes
        self._tell, self._handle = tell, handle
        self._commit = cm.CommitState()
        # Of a view, or to a store, not known here yet:
        self._early: list[tuple[str, wire.SaveBegun | wire.SaveDone]] = []
        self._dead: dict[cm.SaveId, str] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def under_way(self) -> bool:
        """Whether a save is."""
        return bool(self._commit.pending)

    # --- what comes in -------------------------------------------------------------------------------------------
    def received(self, name: str, message: wire.FromMember) -> None:
        """A promise, a failure, or something for the journal."""
        if isinstance(message, wire.SaveSaid):
            self._said(name, message.event)
        elif isinstance(message, wire.SaveCertified):
            self.certified(message.step)
        elif isinstance(message, wire.SaveLost) and message.save not in self._dead:
            self._lost(message.save, message.writer, message.reason)
        elif isinstance(message, wire.SaveLost):  # said again, by who has not heard the answer
            self._settle([name], message.save, None, self._dead[message.save])
        elif self._place.base is None or message.save.view > self._commit.view:
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

    def certified(self, step: int) -> None:
        """The state after this step is verified."""
        self._feed(cm.Certified(step=step))

    def view_changed(self, view: View, base: int, num_writers: int) -> None:
        """A view is installed, whose saves have epochs higher by `base`."""
        number, writers = (base + view.id.epoch, view.id.n), tuple(range(num_writers))
        self._feed(cm.ViewChanged(view=number, writers=writers, begins=view.start or view.saved > 0))
        early, self._early = self._early, []
        for name, message in early:
            self.received(name, message)

    def _said(self, name: str, event: Any) -> None:
        """Something for the journal; who has no room in the store is given some first."""
        archive = self._place.archive
        if isinstance(event, SaveRetried) and event.full and archive is not None and self._journal.held:
            archive.make_room(self._commit.protected)
        self._story.said(name, event)

    def _went_with_its_view(self, save: cm.SaveId) -> bool:
        """Whether the first news of a save came after its view: who wished for it must not wait for it in vain."""
        state = self._commit
        later = state.newest is not None and state.newest[0].step >= save.step
        pending = any(p.save == save for p in state.pending)
        return save.view < state.view and not (later or pending)

    def _known(self, save: cm.SaveId, reason: str, *, refused: bool = False) -> None:
        """The first news of a save."""
        if not refused and self._story.began(save, reason):
            self._loop.call_later(self._overdue_s, self._overdue, save)

    def _promised(self, name: str, message: wire.SaveDone) -> None:
        save = message.save
        self._story.promised(message)
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

    @property
    def _overdue_s(self) -> float:
        """Seconds after which a save is given up as a whole; it may take long and be well, for its writers' own watch
        is over their silence."""
        return max(_OVERDUE_S, _OVERDUE * self._place.timeout_s)

    # --- what follows --------------------------------------------------------------------------------------------
    def _step(self, event: cm.CommitEvent) -> tuple[cm.CommitAction, ...]:
        self._commit, actions = cm.commit_step(self._commit, event)
        return actions

    def _feed(self, event: cm.CommitEvent) -> None:
        for action in self._step(event):
            self._carry_out(action)

    def _carry_out(self, action: cm.CommitAction) -> None:
        archive = self._place.archive
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
        archive = self._place.archive
        if archive is None or not self._publishing(action.save):
            return
        if not self._journal.held:
            if self._journal.epoch == self._coordinator.epoch:
                self._loop.call_later(_UNHELD_S, self._publish, action)
            return
        publish = lambda: archive.publish(action.save, action.reports, certified=action.certified)  # noqa: E731
        late = self._loop.call_later(self._place.timeout_s, self._unanswered, action.save)
        on_thread(archive.publisher, publish, lambda done: self._published(action, done, late), self._loop)

    def _publishing(self, save: cm.SaveId) -> bool:
        return any(p.save == save and p.publishing for p in self._commit.pending)

    def _published(self, action: cm.Publish, done: concurrent.futures.Future[int], late: asyncio.TimerHandle) -> None:
        late.cancel()
        error, save, archive = done.exception(), action.save, self._place.archive
        if isinstance(error, Unheld):
            self._publish(action)  # as soon as the claim is confirmed again
        elif error is not None:
            self._feed(cm.PublishFailed(save=save, reason=f"{type(error).__name__}: {error}"))
            mine = self._journal.held and self._journal.epoch == self._coordinator.epoch
            if archive is not None and mine:  # else a newer one may publish them
                archive.give_back(save)
        else:
            self._feed(cm.Published(save=save, generation=done.result()))

    def _unanswered(self, save: cm.SaveId) -> None:
        """The store hangs: said, so that nobody waits for it unknowing. Should it come back, what it made is whole."""
        if self._publishing(save):
            reason = f"the store has not answered for {self._place.timeout_s:g} s; what follows waits for it"
            self._feed(cm.PublishFailed(save=save, reason=reason))

    def _announce(self, action: cm.Announce) -> None:
        self._settle(self._everyone(), action.save, action.generation, "")
        self._loop.call_soon(self._handle, m.SavePublished(step=action.save.step))
        archive = self._place.archive
        if archive is None:
            return
        answers = self._story.saved(action.save, action.generation, archive.url, self._wishes.reason)
        if answers is None:
            return
        if self._journal.held:
            archive.tidy(action.generation, self._commit.protected)
        self._wishes.saved(*answers)

    def _abandon(self, action: cm.Abandon) -> None:
        self._dead[action.save] = action.reason
        for old in list(self._dead)[:-_REMEMBERED]:
            del self._dead[old]
        self._settle(self._everyone(), action.save, None, action.reason)
        self._story.failed(action.save, action.cause, action.reason, self._place.url)
        self._wishes.abandoned(action.save.step, action.cause)

    def _everyone(self) -> list[str]:
        return list(self._coordinator.roster.peers)

    def _settle(self, names: Iterable[str], save: cm.SaveId, generation: int | None, reason: str) -> None:
        epoch = self._coordinator.epoch
        self._tell(names, wire.SaveSettled(epoch=epoch, save=save, generation=generation, reason=reason))
