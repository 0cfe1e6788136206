"""The invariants, checked where something happens that could break them. It sees everything and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from outlast.core.protocol import Header, RollEntry, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.saves.commit import SaveId
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._surroundings import Fellow, PublishedSave, Speaker, Surroundings

__all__ = ["Oracle", "Violation"]


_UNTOLD = ("no majority", "two cannot tell")
"""Why a run may end though somebody lives: it cannot be told who is wrong."""


class Befallen(Protocol):
    """Whom the schedule's faults have touched, so far."""

    touched: set[str]
    alarmed: set[str]
    everybody_touched: bool
    spoilt: int


class Scene(Surroundings, Protocol):
    """What the oracle sees: all of it."""

    @property
    def faults(self) -> Befallen: ...
    @property
    def coordinators(self) -> Sequence[Speaker]: ...
    def holders(self) -> Sequence[Fellow]: ...


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """An invariant that does not hold, and where."""

    invariant: str
    what: str
    at_s: float


class _SavedSteps:
    """Which steps a view's members save, all of them or none; and which it ends with: nobody begins a step after one
    that still counts."""

    def __init__(self) -> None:
        self._first: dict[tuple[ViewId, int], tuple[str, bool]] = {}  # who, whether it saved it
        self._steps: dict[ViewId, int] = {}
        self._over: set[tuple[ViewId, int]] = set()  # which nobody need wait for any longer

    def first(self, view: ViewId, step: int, name: str, saves: bool) -> tuple[str, bool]:
        return self._first.setdefault((view, step), (name, saves))

    def tried(self, view: ViewId, step: int) -> None:
        if (view, step) not in self._over:
            self._steps[view] = step

    def over(self, view: ViewId, step: int) -> None:
        self._over.add((view, step))
        if self._steps.get(view) == step:
            del self._steps[view]

    def given_up(self, view: ViewId, step: int) -> bool:
        return (view, step) in self._over

    def forbids(self, view: ViewId, step: int) -> bool:
        return step >= self._steps.get(view, step + 1)


class Oracle:
    """Judges a schedule by its invariants. Stops the world at the first violation."""

    def __init__(self, world: Scene) -> None:
        self.world = world
        self.violation: Violation | None = None
        self.num_killed = 0
        self.stable = 0  # steps that some member called stable
        self.views_formed: set[ViewId] = set()
        self._durable: dict[ViewId, int] = {}  # with the steps that were known to be saved when the view became so
        self._written: set[str] = set()  # replicas whose scripts ended well, as the writer's
        self._last_epoch_written = 0
        self._first_decided: dict[ViewId, int] = {}
        self._epochs: dict[str, int] = {}
        self._sizes: dict[tuple[int, int], int] = {}  # members of each view that was formed
        self._saves = _SavedSteps()
        self._stopped = False  # by members whose states differ, with good reason
        self._dropped: set[str] = set()  # whom a coordinator had given up when it wrote its record; for good
        self._given_up: set[str] = set()  # rightly told to start again, or let go; they may not have heard it yet

    def violated(self, invariant: str, what: str) -> None:
        if self.violation is None:
            self.violation = Violation(invariant=invariant, what=what, at_s=self.world.kernel.now)
            self.world.note(f"VIOLATION {invariant}: {what}")
            self.world.kernel.stop()

    # --- epochs and durability -----------------------------------------------------------------------------------
    def durable(self, coordinator: Speaker, record: m.FleetRecord) -> None:
        """A record was written."""
        if coordinator.epoch < (newest := self.world.durable.epoch):
            self.violated("Epochs", f"{coordinator.name} wrote after epoch {newest} had been claimed")
        if coordinator.epoch < self._last_epoch_written:
            self.violated("Epochs", f"{coordinator.name} wrote after epoch {self._last_epoch_written} had")
        self._last_epoch_written = max(self._last_epoch_written, coordinator.epoch)
        self._dropped |= {name for name, peer in coordinator.machine.roster.peers.items() if not peer.alive}
        for view in (record.view, record.planned):
            if view is not None:
                self._durable.setdefault(view.id, record.saved)

    def told(self, replica: Fellow, message: object) -> None:
        """A member reacted to the coordinator: its epoch never falls."""
        if isinstance(message, (m.Install, m.Rejoin)):
            self._given_up.discard(replica.name)
        epoch = replica.member.epoch
        if epoch < self._epochs.get(replica.name, 0):
            self.violated("Epochs", f"{replica.name} went back to epoch {epoch}")
        self._epochs[replica.name] = epoch

    def entered(self, replica: Fellow, view: View) -> None:
        """A member begins to form a view."""
        self.world.note(f"{replica.name} forms {view.id} {view.members}")
        self._sizes[view.id.epoch, view.id.n] = len(view.members)
        if view.id not in self._durable:
            self.violated("Durable", f"{replica.name} forms view {view.id}, which was never written")
        if view.id.epoch < self._epochs.get(replica.name, 0) and replica.member.formed:
            self.violated("Epochs", f"{replica.name} forms view {view.id} after epoch {self._epochs[replica.name]}")

    # --- steps ---------------------------------------------------------------------------------------------------
    def called(self, replica: Fellow, view: View, entries: Sequence[RollEntry]) -> None:
        """A roll call is complete: nothing stable may be lost while somebody has it."""
        self.views_formed.add(view.id)
        top = max(entry.committed for entry in entries)
        self.world.note(f"{replica.name} called the roll of {view.id}: {[e.committed for e in entries]}")
        if top < self.stable and view.id == max(self.views_formed):  # who wakes up in an older view is alone there
            names = [r.name for r in self._unlost() if r.member.committed >= self.stable]
            if names:
                self.violated(
                    "Bounded loss", f"view {view.id} goes back to step {top} of {self.stable}; {names} had it"
                )
        if max(top, self.world.store.unread) < (saved := self._durable.get(view.id, 0)):
            self.violated("Bounded loss", f"view {view.id} goes on from step {top}, and {saved} is saved")

    def _unlost(self) -> list[Fellow]:
        """Living members that nobody was entitled to give up."""
        coordinator = self.world.coordinators[-1].machine
        peers = coordinator.roster.peers
        unlost = [r for r in self.world.holders() if r.name not in peers or peers[r.name].alive]
        return [r for r in unlost if r.name not in self._given_up | self._dropped]

    def demoted(self, name: str) -> None:
        """A coordinator has a member start again. It may give up a state that somebody alive is ahead of."""
        replica = self.world.replicas.get(name)
        if replica and any(r.member.committed > replica.member.committed for r in self._unlost()):
            self._given_up.add(name)

    def let_go(self, name: str) -> None:
        """A coordinator tells a member that had asked to leave, or has to, that it may: it is on its way out, with its
        state."""
        replica = self.world.replicas[name]
        if replica.member.leaving or replica.agent.name in self.world.faults.alarmed:
            self._given_up.add(name)

    def scattered(self, replica: Fellow, view: View) -> None:
        """A member calls its committed steps stable: all members must have committed them."""
        step = replica.member.committed
        self.stable = max(self.stable, step)
        for name in view.members:
            other = self.world.replicas[name]
            if other.member.committed < step:
                self.violated("Stable", f"{replica.name} calls {step} stable, {name} is at {other.member.committed}")

    def decided(self, replica: Fellow, view: View, step: int, headers: Sequence[Header]) -> None:
        """A member decided a step in a view."""
        num, num_rows = self.world.scenario.num_microbatches, self.world.scenario.num_rows
        leaves = sorted(leaf for header in headers for leaf, _, _ in header.losses)
        if leaves != list(range(num)):
            self.violated("Exactly once", f"step {step} in view {view.id} counts microbatches {leaves} of {num}")
        if (tuple(replica.out), replica.norm) != algebra.outcome_of(step, num, num_rows):
            self.violated("Bits", f"{replica.name} decided another step {step} in view {view.id}")
        self._states(view, step, headers)
        self._first_decided.setdefault(view.id, step)
        for other, first in self._first_decided.items():
            if other > view.id and step > first:
                self.violated("One outcome", f"views {view.id} and {other} both commit past step {first}")
        if self.world.kernel.now > replica.lease_until_s + 1e-9:
            self.violated("Lease", f"{replica.name} decided step {step} after its lease")

    def _states(self, view: View, step: int, headers: Sequence[Header]) -> None:
        """Whoever said of its state what others did not is gone by now. Where all are alike in what nobody can tell
        any more, the rule has done what it can."""
        told = {header.state[1] for header in headers}
        if len(told) > 1:
            names = [header.member for header in headers]
            self.violated("Agreement", f"step {step} of view {view.id} is decided, and states of {names} differ")

    def diverged(self, replica: Fellow) -> None:
        """A member ends the run, as states differ and it cannot be told which one is right."""
        self._stopped = True
        self.world.note(f"{replica.name} stops the run")
        if not self.world.spoilt_states:
            self.violated("Agreement", f"{replica.name} stops the run, and all states are alike")

    def applied(self, replica: Fellow, how: str, step: int | None = None) -> None:
        """A member's state changed; it is the one after so many steps: those committed, if they are not said."""
        committed = replica.member.committed if step is None else step
        self.world.note(f"{replica.name} is at step {committed} by {how}")
        right = algebra.chain(committed, self.world.scenario.num_microbatches, self.world.scenario.num_rows)
        if replica.state != right and replica.state not in self.world.spoilt_states:
            self.violated("Bits", f"{replica.name} has another state at step {committed} after {how}")

    def wrote(self, replica: Fellow) -> None:
        """A script after its loop has written what only one should."""
        self.world.note(f"{replica.name} has written")
        self._written.add(replica.name)

    # --- checkpoints ---------------------------------------------------------------------------------------------
    def at_boundary(self, replica: Fellow, view: View, step: int, *, saves: bool) -> None:
        """A member goes on to the next step of a view: all of them have saved this one, or none has."""
        who, saved = self._saves.first(view.id, step, replica.name, saves)
        if saved != saves:
            first, second = (who, replica.name) if saved else (replica.name, who)
            self.violated("One save", f"{first} saves step {step} of view {view.id}, {second} does not")

    def last_save(self, view: View, step: int) -> None:
        """A member has saved what the run is to stop with."""
        self._saves.tried(view.id, step)

    def no_last_save(self, view: ViewId, step: int) -> None:
        """The coordinator has given a save up, or the time for it is up: the run need not stop with it."""
        self._saves.over(view, step)

    def stops_with(self, save: SaveId) -> None:
        """The run is stopped because this save is there: what its view has committed is what was saved."""
        view = ViewId(save.epoch, save.n)
        if not self._saves.given_up(view, save.step):
            for replica in self.world.replicas.values():
                seen, committed = replica.member.view, replica.member.committed
                if not replica.ended and seen is not None and seen.id == view and committed > save.step:
                    self.violated("Last save", f"the run stops with step {save.step}, {replica.name} has {committed}")

    def begins(self, replica: Fellow, view: View, step: int) -> None:
        """A member computes, or exchanges, what follows."""
        if self._saves.forbids(view.id, step):
            self.violated("Last save", f"{replica.name} begins step {step} of view {view.id}, which stops before it")

    def published(self, generation: PublishedSave) -> None:
        """A generation is the whole state after a step that nothing can take back."""
        save, parts, num = generation.save, generation.parts, self._sizes[generation.save.view]
        self.world.note(f"{save.token} is published")
        if sorted((part.writer, int(part.name)) for part in parts) != [(index, num) for index in range(num)]:
            shares = [(part.writer, part.name) for part in parts]
            self.violated("Whole saves", f"{save.token}, of {num} members, is published with the shares {shares}")
        right = algebra.chain(save.step, self.world.scenario.num_microbatches, self.world.scenario.num_rows)
        if any(int(part.digest) not in self.world.spoilt_states | {right} for part in parts):
            self.violated("Bits", f"{save.token} is not the state after step {save.step}")
        if save.step > self.stable:
            self.violated("Stable", f"{save.token} is published, and {self.stable} steps are stable")

    def resumed(self, replica: Fellow, step: int) -> None:
        """A replica of a first view begins with what was published, as far as that goes."""
        newest = max((made.step for made in self.world.store.generations), default=0)
        self.world.note(f"{replica.name} begins at step {step}")
        if step < newest:
            self.violated("Bounded loss", f"{replica.name} begins at step {step}, and step {newest} is published")

    def unreadable(self, replica: Fellow) -> None:
        """A generation cannot be read by who has a state of its own: nobody need go on from it."""
        self.world.note(f"{replica.name} cannot read what is newer than step {replica.member.committed}")
        self.world.store.unread = self.world.store.generations[-1].step

    # --- ends ----------------------------------------------------------------------------------------------------
    def killed(self, name: str) -> None:
        """The coordinator has somebody killed: it must have been stopped, slow, cut off, or condemned with cause."""
        self.num_killed += 1
        self._check_cause(name, "is killed")

    def evicted(self, name: str) -> None:
        """One ends because it is told, or sees by itself, that it has to go."""
        self._check_cause(name, "goes")

    def _check_cause(self, name: str, what: str) -> None:
        faults = self.world.faults
        replica = self.world.replicas.get(name)
        if replica is None or replica.ended or faults.everybody_touched or name in faults.touched:
            return
        if replica.state in self.world.spoilt_states:
            return  # as it was given it
        if replica.member.view is None and any(self._unborn(seat, name) for seat in self.world.coordinators):
            return
        self.violated("Innocent", f"{name} {what} though nothing befell it")

    def _unborn(self, coordinator: Speaker, name: str) -> bool:
        """Whether it was still starting when there was nothing left to train, or is to go because it was; that stays so
        where the word is lost with this coordinator, and all has to be done again for want of a writer."""
        peer = coordinator.machine.roster.peers.get(name)
        condemned = peer is not None and not peer.alive
        newest = coordinator is self.world.coordinators[-1]
        return coordinator.machine.ending is not None and (condemned or newest)

    def finished(self, coordinator: Speaker, finish: m.Finish) -> None:
        """The run is over: done, or lost with good reason."""
        steps = self.world.scenario.num_steps
        if finish.outcome == "finished":
            view = coordinator.machine.view
            members = view.members if view is not None else ()
            late = [name for name in members if self.world.replicas[name].member.committed < steps]
            if not self._written:
                self.violated("Ending", "the run is called finished, and nobody's script has written")
            if late or finish.steps != steps:
                self.violated("Liveness", f"finished after {finish.steps} of {steps} steps, {late} are not done")
        elif finish.exit_code == 6:
            holders = [r.name for r in self._unlost()]
            if holders:
                self.violated("Bounded loss", f"the fleet is called lost while {holders} live")
        elif finish.outcome == "failed" and not (
            self._stopped or (self.world.faults.spoilt and any(words in finish.detail for words in _UNTOLD))
        ):
            self.violated("Liveness", f"the run failed: {finish.detail}")
