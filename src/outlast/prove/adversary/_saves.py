"""Checkpoints in the simulated world: a member's part, the coordinator's, and the store that both write to.

Which step is saved, when a part may be promised and when a save is published is decided by `core/protocol/saves`, as
in the runtime; here is what the runtime does with disks: parts become durable after a while or not at all, a store
takes a while to publish, and says the same number again to who publishes the same save again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from outlast.core.protocol import Member, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.saves import commit as cm
from outlast.core.protocol.saves.agreement import SavePromise, learn_stable
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._kernel import SimulatedProcess
from outlast.prove.adversary._surroundings import Owner, Speaker, Surroundings

__all__ = ["SaveWord", "SimulatedKeeper", "SimulatedSaves"]

_SLOTS = 2  # saves in flight, of one member
_FAILS = 0.05  # of a part's writes
_REFUSED = 0.15  # at once, where a run is asked to stop
_UNREADABLE = 0.1  # of a generation, for whoever has another state
_END_S = 1.0  # from when the end first waits for a save, however slow disks and coordinators are
_STOP_S = 3.0  # from when a stop is first asked for
_AGAIN_S = 0.05  # until the save before it is asked for again


class SaveWord(NamedTuple):
    """What members and a coordinator say to each other of saves. `kind`: base, ask, began, done, lost or settled.
    `number`: an epoch; of a request; of the newest one that a save answers; 1 for one that was published."""

    kind: str
    save: cm.SaveId | None = None
    report: cm.PartReport | None = None
    number: int = 0


class SimulatedSaves:
    """One member's part. What is saved is its state, and which share of it its place in the view gives it."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.votes = owner.world.variant.votes()
        self.every = owner.world.scenario.save_every
        self.base: int | None = None
        self.promises: dict[cm.SaveId, SavePromise] = {}
        self._share = (0, 0)  # (place, members) of the view that was entered
        self._view: ViewId | None = None
        self._reports: dict[cm.SaveId, cm.PartReport] = {}
        self._answers: dict[cm.SaveId, int] = {}
        self._end_by_s = math.inf

    def resume(self, member: Member) -> None:
        """Before a first view forms: become the newest generation, if there is one."""
        newest = self.owner.world.variant.newest(self.owner.world.store.generations)
        self.promises.clear()
        self._view = None
        if newest is not None:
            self.owner.state = newest.state
            member.committed = member.stable = newest.step
        else:
            self.owner.state, member.committed, member.stable = algebra.INITIAL, 0, 0

    def read_newer(self, member: Member) -> bool:
        """In a view to which nobody brought the one before: whether the newest generation was read, and is newer than
        what I have."""
        world = self.owner.world
        newest = world.variant.newest(world.store.generations)
        if newest is None or newest.step <= member.committed:
            return False
        if self.owner.kernel.rng.random() < _UNREADABLE:
            world.oracle.unreadable(self.owner)
            return False
        self.owner.state = newest.state
        member.replayed(newest.step)
        member.stable = newest.step
        return True

    def vote(self, step: int) -> int:
        """For my header of a step."""
        rng = self.owner.kernel.rng
        if (step + 1) % self.every == 0 or rng.random() < 0.05:
            self.votes.wanted = "due"
        view = self.owner.mesh.view if self.owner.mesh is not None else None
        here = view is not None and view.id == self._view
        return self.votes.vote(self.base is not None and here and len(self.promises) < _SLOTS)

    def boundary(self, view: View, committed: int) -> None:
        """The next step is about to begin in this view: take the save that is due."""
        reason = self.votes.due(view.id, committed)
        self.owner.world.oracle.at_boundary(self.owner, view, committed, saves=reason is not None)
        if reason is not None:
            self._take(view, committed)
        if committed:
            self._enter(view)

    def stopping(self, view: View, committed: int) -> bool:
        """Whether the run stops with what was just saved, so that no step is begun."""
        if not self.owner.world.variant.stops(self.votes, view.id, committed, bool(self.promises)):
            return False
        self._end_by_s = math.inf
        self.owner.world.oracle.last_save(view, committed)
        return True

    def stopped(self, view: View, committed: int) -> bool:
        """Whether the stop is not waited for any longer: the save has come to nothing, or the time for it is up."""
        if not self.owner.world.variant.awaits_stop(self.votes, view.id, committed):
            return True
        if self._has_time():
            return False
        self.owner.world.oracle.no_last_save(view.id, committed)
        return True

    def _enter(self, view: View) -> None:
        if view.id != self._view:
            self._view, self._end_by_s = view.id, math.inf
            self._share = self.owner.world.variant.share(view.members.index(self.owner.name), view, self._share)

    def last(self, view: View, committed: int) -> bool:
        """The loop is over: save what it leaves, once there is a slot. Whether that is done, or cannot be."""
        if self.base is None or self.votes.tried(view.id, committed):
            return True
        if len(self.promises) >= _SLOTS and self._has_time():
            return False
        self._enter(view)
        self._take(view, committed, attempt=1)
        return True

    def settled(self, view: View, committed: int) -> bool:
        """All have passed the barrier: whether nothing is under way any more, or the time for it is up."""
        self.stable(view.id, committed)
        return not (self.promises and self._has_time())

    def _has_time(self) -> bool:
        """Whether the end may still wait for disks; it is looked at again when the time is up."""
        kernel = self.owner.kernel
        if self._end_by_s == math.inf:
            self._end_by_s = kernel.now + _END_S
            kernel.after(_END_S, self.owner, self.owner.run)
        return kernel.now < self._end_by_s

    def _take(self, view: View, step: int, attempt: int = 0) -> None:
        assert self.base is not None
        self.votes.taken = (view.id, step)
        save = cm.SaveId(epoch=self.base + view.id.epoch, n=view.id.n, step=step, attempt=attempt)
        stops = self.owner.world.scenario.stops
        if len(self.promises) >= _SLOTS or (stops and self.owner.kernel.rng.random() < _REFUSED):
            self._lost(save)
            return
        place, members = self._share
        self.promises[save] = SavePromise(save=save, view=view.id)
        self._answers[save] = self.owner.world.variant.meets(self.votes, view.id, step)
        self._reports[save] = cm.PartReport(
            writer=place, name=str(members), bytes=1, digest=str(self.owner.state), schema="s"
        )
        self.owner.say(SaveWord("began", save, self._reports[save]))
        kernel = self.owner.kernel
        took_s = kernel.rng.choice((0.0005, 0.01, 0.1)) * (0.5 + kernel.rng.random())
        kernel.after(took_s, self.owner, self._written, save, kernel.rng.random() < _FAILS)

    def _written(self, save: cm.SaveId, failed: bool) -> None:
        promise = self.promises.get(save)
        if promise is None:
            return
        if failed:
            del self.promises[save]
            self._lost(save)
        else:
            promise.durable = True
            self._promise(promise)

    def _lost(self, save: cm.SaveId) -> None:
        place = cm.PartReport(writer=self._share[0], name="", bytes=0, digest="", schema="")
        self.owner.say(SaveWord("lost", save, place))

    def stable(self, view: ViewId, stable: int) -> None:
        """All members of the view have committed so many steps."""
        for lapsed in learn_stable(self.promises.values(), view, stable):
            del self.promises[lapsed.save]
        for promise in self.promises.values():
            self._promise(promise)

    def _promise(self, promise: SavePromise) -> None:
        if self.owner.world.variant.promises(promise):
            promise.given = True
            self.owner.say(self._word("done", promise.save))

    def _word(self, kind: str, save: cm.SaveId) -> SaveWord:
        return SaveWord(kind, save, self._reports[save], self._answers[save])

    def told(self, word: SaveWord) -> None:
        """The coordinator says something of saves."""
        if word.kind == "base":
            self.base = word.number
        elif word.kind == "ask":
            self.votes.request(word.number, "asked")
        elif word.save is not None:
            self.promises.pop(word.save, None)
            if not word.number and self.base is not None:
                self.votes.lost(ViewId(word.save.epoch - self.base, word.save.n), word.save.step)

    def repeat(self) -> list[SaveWord]:
        """What a coordinator that was out of reach may have missed."""
        kinds = {save: "done" if promise.given else "began" for save, promise in self.promises.items()}
        return [self._word(kind, save) for save, kind in kinds.items()]


class SimulatedKeeper:
    """One coordinator's part: `commit_step` over what members say, in an order that the store keeps."""

    def __init__(self, world: Surroundings, process: SimulatedProcess, speaker: Speaker, tell: Any) -> None:
        self.world, self.process, self.speaker, self._tell = world, process, speaker, tell
        self.commit = cm.CommitState()
        self._view: ViewId | None = None
        self._early: list[tuple[str, SaveWord]] = []
        self._dead: set[cm.SaveId] = set()
        self._asked = speaker.epoch << 20
        self._stop_asked = False  # the run
        self._met: dict[cm.SaveId, int] = {}

    def look(self) -> None:
        """After every event: a view that is new here, as the record has it."""
        view = self.speaker.machine.view
        if view is None or view.id == self._view:
            return
        self._view = view.id
        number, writers = (view.id.epoch, view.id.n), tuple(range(len(view.members)))
        self._feed(cm.ViewChanged(view=number, writers=writers, begins=view.start or view.saved > 0))
        early, self._early = self._early, []
        for name, word in early:
            self.received(name, word)
        if self.world.kernel.rng.random() < 0.3 or self._stop_asked:
            self._ask()

    def _ask(self) -> None:
        """An odd number: the run stops with it."""
        self._asked = self._asked // 2 * 2 + (3 if self._stop_asked else 2)
        view = self.speaker.machine.view
        for member in view.members if view is not None else ():
            self._tell(member, SaveWord("ask", number=self._asked))

    def greet(self, name: str) -> None:
        """A member said hello."""
        self._tell(name, SaveWord("base", number=0))
        if self._stop_asked:
            self._tell(name, SaveWord("ask", number=self._asked))

    def stop(self) -> None:
        """The run is asked to stop: with a save, or when its time is up."""
        if not self._stop_asked:
            self._stop_asked = True
            self._ask()
            self.process.kernel.after(_STOP_S, self.process, self._stop)

    def _stop(self) -> None:
        self.speaker.handle(m.Stop(reason="it was asked to", exit_code=143))

    def _ask_again(self) -> None:
        if not self.commit.pending:
            self._ask()

    def received(self, name: str, word: SaveWord) -> None:
        """A member says something of its part."""
        save, report = word.save, word.report
        assert save is not None
        assert report is not None
        known = any(p.save == save for p in self.commit.pending)
        if save.view > self.commit.view:
            self._early.append((name, word))
        elif save in self._dead:
            self._tell(name, SaveWord("settled", save))
        elif word.kind == "lost":
            self._lost(save, report.writer, known)
        elif word.kind == "began":
            self._answer(name, save, self._step(cm.WriterBegan(save=save, writer=report.writer)))
        else:
            self._met[save] = max(self._met.get(save, 0), word.number)
            durable = self._step(cm.WriterDurable(save=save, report=report))
            self._answer(name, save, durable + self._step(cm.StepStable(step=save.step)))

    def _lost(self, save: cm.SaveId, writer: int, known: bool) -> None:
        if save.view < self.commit.view:
            return
        self._feed(cm.WriterFailed(save=save, writer=writer, reason="its disk failed"))
        if not known:
            self._abandon(save)

    def _answer(self, name: str, save: cm.SaveId, actions: tuple[cm.CommitAction, ...]) -> None:
        for action in actions:
            if isinstance(action, cm.Refuse):
                self._tell(name, SaveWord("settled", save))
            else:
                self._carry_out(action)

    def _step(self, event: cm.CommitEvent) -> tuple[cm.CommitAction, ...]:
        self.commit, actions = self.world.variant.commit(self.commit, event)
        return actions

    def _feed(self, event: cm.CommitEvent) -> None:
        for action in self._step(event):
            self._carry_out(action)

    def _carry_out(self, action: cm.CommitAction) -> None:
        if isinstance(action, cm.Publish):
            kernel = self.world.kernel
            took_s = kernel.rng.choice((0.001, 0.05)) * (0.5 + kernel.rng.random())
            kernel.after(took_s, self.process, self._publish, action)
        elif isinstance(action, cm.Announce):
            self._settle(action.save, published=1)
            self.process.kernel.after(0.0, self.process, self.speaker.handle, m.SavePublished(step=action.save.step))
            met = self._met.get(action.save, 0)
            if self._stop_asked and met % 2:  # of an earlier coordinator's request, too
                self.world.oracle.stops_with(action.save)
                self.process.kernel.after(0.0, self.process, self._stop)
        elif isinstance(action, cm.Abandon):
            self._abandon(action.save)

    def _publish(self, action: cm.Publish) -> None:
        number = self.world.store.publish(action.save, action.reports)
        if number is None:
            self._feed(cm.PublishFailed(save=action.save, reason="older than the newest"))
            return
        self.world.oracle.published(self.world.store.generations[number])
        self.world.point("publish", self.process)
        self._feed(cm.Published(save=action.save, generation=number))

    def _abandon(self, save: cm.SaveId) -> None:
        self._dead.add(save)
        self.world.oracle.no_last_save(ViewId(save.epoch, save.n), save.step)
        self._settle(save)
        if self._stop_asked:
            self.process.kernel.after(_AGAIN_S, self.process, self._ask_again)

    def _settle(self, save: cm.SaveId, published: int = 0) -> None:
        for name in list(self.speaker.machine.roster.peers):
            self._tell(name, SaveWord("settled", save, number=published))
