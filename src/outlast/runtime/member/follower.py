"""A rank of a replica that is not its lead: does with its tensors what the lead does with its own, when it is told.

It is no member of the run and speaks to no coordinator. It has a mesh of its own for each view, with the ranks of equal
place in the other replicas (its lane), and exchanges its part of each gradient there. It commits when the lead says so,
which is when all lanes of the replica are complete (protocol, 37). A view that ends is left when the lead drops it; an
exchange that breaks is told, and the sums stay for the next view.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.protocol.step.catching_up import SILENT_S
from outlast.errors import StepMisuse, ViewAbandoned
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.host.environment import Environment
from outlast.runtime.joining.inflow import Inflow
from outlast.runtime.member._followed_lane import FollowedLane
from outlast.runtime.member._sibling_lanes import NOTHING, what_has_come
from outlast.runtime.saving.resume import begin
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.evaluation import Evaluation
from outlast.runtime.training.losses import missing_backward, second_backward
from outlast.runtime.training.metrics import metric_outside
from outlast.runtime.training.warm_memory import at_low_priority
from outlast.runtime.transport import rank_words as say
from outlast.runtime.transport.rank_check_words import (
    AskRows,
    AuditLeaf,
    LookAgain,
    LookCloser,
    RepeatLeaf,
    RowsChosen,
)

__all__ = ["FollowingRank"]


_ALIKE_S = 5.0  # for a lead's word that it has left its loop, too


class FollowingRank(FollowedLane):
    """Carries out, in one rank, what the lead of its replica says."""

    def __init__(
        self,
        env: Environment,
        engine: Engine,
        facts: dict[str, str],
        guards: Guarding,
        audit: float | str = 0.0,
        critical: Sequence[str] = (),
    ) -> None:
        super().__init__(env, engine, guards, audit, critical)
        self.facts = facts
        self._left = False
        self.inflow = Inflow(engine, self.enter, self.listener.feeds, self.pipe.wake_fd, env.config.replicas)
        self._has: say.LaneHas | None = None
        self.ended: bool | None = None  # training is over; whether it ended well
        self._leaf: say.ComputeLeaf | None = None
        self._loss: float | None = None

    def ready(self) -> None:
        """All of this rank is there to hear what its lead says."""
        self.pipe.send(say.RankReady(self.listener.address, self.facts))

    # --- what the lead says --------------------------------------------------------------------------------------
    def next_step(self) -> int | None:
        """The step that the loop is to be given; None when training is over."""
        while self.ended is None:
            word = self._loop_word()
            if isinstance(word, say.BeginStep):
                self.committed = word.step
                if self.saves is not None and self.view is not None:
                    self.saves.enter(self.view, word.step)
                return word.step
            self._obey(word)
        return None

    def batches(self, step: int) -> Iterator[Any]:
        """This rank's microbatches of the step, until the lead's loop is through with it."""
        self.engine.begun(step)
        while self.ended is None:
            word = self._loop_word()
            if isinstance(word, say.EndStep):
                return
            if isinstance(word, say.ComputeLeaf):
                yield from self._one(word)
            elif isinstance(word, LookCloser | AuditLeaf | RepeatLeaf):
                yield from self.checks.batches(word)
            else:
                self._obey(word)
        raise SystemExit(0)

    def _loop_word(self) -> Any:
        """The lead's next word in a loop that both are in. Raises StepMisuse if it has left it."""
        word = self._word()
        if isinstance(word, say.LoopLeft):
            raise self._unlike("ended its loop", "trains on")
        return word

    def _word(self, until_s: float = math.inf) -> Any:
        """The lead's next word; None if it says none until then. Its loss ends the process meanwhile."""
        while (word := self.pipe.take()) is None and time.monotonic() < until_s:
            if self.clock.phase is not Phase.IDLE:
                self.clock.enter(Phase.IDLE, self.committed)
            if self.inflow.loaded or self.inflow.serving == NOTHING:
                self._hear(1.0)
            else:  # nobody waits for a replica that has no state yet
                at_low_priority(lambda: self._hear(1.0))
        return word

    def _hear(self, timeout_s: float) -> None:
        """Wait for the lead's next word, or for something to be told to it of what donors send."""
        self.inflow.take_in(timeout_s)
        self._tell_what_came()

    def _tell_what_came(self) -> None:
        has = what_has_come(self.inflow)
        if has != self._has:
            self._has = has
            self.pipe.send(has)

    def _obey(self, word: Any) -> None:
        done: dict[Any, Callable[[Any], None]] = {
            say.FormLane: self._form, say.DropLane: self._drop, say.ReduceLane: self._reduce, say.EndRun: self._end,
            say.ApplyOutcome: self._apply, say.GiveOutcome: self._give, say.TakeOutcome: self._take,
            say.SettleOutcome: self._settle, say.AskFingerprint: self._tell_state, say.ExpectLeaves: self._expect,
            say.BeginRun: self._begin_run, say.TakeSave: self._save, say.SaveStable: self._save_stable,
            say.LoopLeft: self._lead_left, say.ServedAs: self._served, say.LoadShares: self._load,
            say.ReplayOutcome: self._replay, say.DrainLane: self._drain, say.LiveOutcome: self._live,
            say.JoinedView: lambda word: self.inflow.over(),
            say.ServeJoiner: lambda word: self.donor.serve(word, self.committed),
            say.FeedWhole: self.donor.feed_whole, say.FlushStreams: lambda word: self.donor.flush_for(word.view),
            say.CloseStreams: lambda word: self.donor.close_all(), AskRows: self.checks.rows,
            LookAgain: self._look_again, RowsChosen: lambda word: None,  # of a lane that had broken
        }  # fmt: skip
        if isinstance(word, say.TakeFingerprint):
            raise self._unlike("calls training.fingerprint()", "does not")
        if type(word) not in done:
            raise self._unlike(f"goes on with its loop ({type(word).__name__})", "is elsewhere")
        done[type(word)](word)

    def _unlike(self, lead: str, here: str) -> StepMisuse:
        """The lead does one thing, and this rank another."""
        return StepMisuse(
            f"the lead of this replica {lead}, and this rank {here}",
            where=f"rank {self.env.place} of {self.env.me}",
            did="this replica ends",
            remedy="do the same on every rank: steps, evaluations, fingerprints; `break` by what is equal everywhere",
        )

    # --- a microbatch --------------------------------------------------------------------------------------------
    def _one(self, todo: say.ComputeLeaf) -> Iterator[Any]:
        engine = self.engine
        self._compare()
        self.enter(Phase.LOAD, todo.leaf)
        batch = engine.prepare(todo.step, todo.leaf)
        self.enter(Phase.BODY, todo.leaf)
        self._leaf, self._loss, engine.sums.printing = todo, None, todo.printing
        engine.metrics.begin(engine.mine(todo.leaf))
        yield batch
        if self._loss is None:
            raise missing_backward(todo.step, todo.leaf)
        self._leaf = None

    def backward(self, loss: Tensor) -> None:
        """The loop's backward of the microbatch under way."""
        if self.checks.active:
            self.checks.backward(loss)
            return
        if self._leaf is None or self._loss is not None:
            raise second_backward()
        step, leaf = self._leaf.step, self._leaf.leaf
        self.enter(Phase.BACKWARD, leaf)
        self.engine.begin(step, leaf, self.announcer(self._leaf))
        self.engine.state.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
        self.enter(Phase.MERGE, leaf)
        self._loss = float(loss.detach())
        self.engine.end(step, leaf, self._loss)
        self.checks.computed()
        self.enter(Phase.BODY, leaf)

    def metric(self, name: str, value: Any, weight: Any) -> None:
        """A number of the microbatch under way; of a check beside the step it is forgotten."""
        if self.checks.active:
            return
        if self._leaf is None:
            raise metric_outside(name)
        step, leaf = self._leaf.step, self.engine.mine(self._leaf.leaf)
        share = self.engine.samples.sizes(step)[leaf] if weight is None else weight
        self.engine.metrics.put(leaf, name, value, share)

    def evaluate(self, wanted: Evaluation) -> dict[str, float]:
        """Compute this rank's batches of an evaluation in which the lead's loop is as well; its means."""
        with wanted.quiet():
            while self.ended is None:
                word = self._loop_word()
                if isinstance(word, say.Evaluated):
                    self.engine.restore_buffers()
                    self.enter(Phase.BODY)
                    return word.means
                if isinstance(word, say.EvaluateBatches):
                    self._evaluate(wanted, word)
                else:
                    self._obey(word)
        raise SystemExit(0)

    def meet_for_fingerprint(self) -> None:
        """The script here asks for a fingerprint: wait until the lead's does. Raises StepMisuse if that one goes on."""
        phase = self.clock.phase
        while self.ended is None:
            word = self._word()
            if isinstance(word, say.TakeFingerprint):
                break
            if isinstance(word, say.BeginStep | say.ComputeLeaf | say.EndStep | say.EvaluateBatches):
                raise self._unlike("goes on with its loop", "calls training.fingerprint()")
            self._obey(word)
        if phase is not Phase.IDLE:
            self.enter(phase)

    def _evaluate(self, wanted: Evaluation, word: say.EvaluateBatches) -> None:
        if word.of != wanted.num_batches:
            raise StepMisuse(
                f"the ranks of one replica evaluate different things: {word.of} batches on the lead, "
                f"{wanted.num_batches} on rank {self.env.place}",
                did="nothing more was committed",
                remedy="the same dataset and batch_size everywhere; what a rank shall see of it outlast decides",
            )
        self.enter(Phase.BODY)
        rows = wanted.compute(word.batches[min(self.engine.shards.place, len(word.batches) - 1)])
        self.pipe.send(say.LaneEvaluated(word.number, rows))

    def _expect(self, word: say.ExpectLeaves) -> None:
        self.engine.expect(word.first, word.share, word.step, word.since)
        self.engine.expect_joiners(word.index, word.donors)

    # --- saves ---------------------------------------------------------------------------------------------------
    def _begin_run(self, word: say.BeginRun) -> None:
        self.view = word.view
        begin(self.env, self.engine, word.view, self.saves)
        self.pipe.send(say.RunBegun(word.number, self.committed))

    def _save(self, word: say.TakeSave) -> None:
        if self.saves is not None and self.view is not None and self.view.id == word.view:
            with contextlib.suppress(ViewAbandoned):
                self.saves.follow(self.view, word.step, word.reason, word.attempt, word.wait)

    def _save_stable(self, word: say.SaveStable) -> None:
        if self.saves is not None:
            self.saves.stable(word.view, word.step)

    def _lead_left(self, word: say.LoopLeft) -> None:
        self._left = True

    def broke(self) -> StepMisuse | None:
        """The loop was left on purpose. What it left is saved as the lead says, before the script goes on. Returns what
        is wrong where the lead trains on. One that keeps its loop's iterator says later that it was left: where there
        is nothing to save, it is not waited for."""
        until_s = time.monotonic() + _ALIKE_S if self.saves is None else math.inf
        try:
            alike = self._serve(lambda: self._left or time.monotonic() >= until_s, until_s)
        except StepMisuse as unlike:
            return unlike
        if not alike:
            return self._unlike("trains on", "ended its loop")
        if self.saves is not None:
            self.saves.copied()
        return None

    def see_out(self) -> None:
        """The script is over: my parts of saves are written until the lead's loop is."""
        if self.saves is not None:
            self._serve(lambda: False)

    def _serve(self, done: Callable[[], bool], until_s: float = math.inf) -> bool:
        """Do as the lead says, outside of the loop; False as soon as it goes on with its own."""
        while not done() and self.ended is None:
            word = self._word(until_s)
            if isinstance(word, say.BeginStep | say.ComputeLeaf):
                return False
            if word is not None:
                self._obey(word)
        return True

    # --- joining, and who joins ----------------------------------------------------------------------------------
    def _served(self, word: say.ServedAs) -> None:
        self.inflow.serve(word.serve)
        self._tell_what_came()

    def _load(self, word: say.LoadShares) -> None:
        self.inflow.load(self.inflow.tiles())
        self.committed = self.inflow.committed
        self._tell_what_came()

    def _replay(self, word: say.ReplayOutcome) -> None:
        self.inflow.apply(word.step)
        self.committed = self.inflow.committed

    def _drain(self, word: say.DrainLane) -> None:
        self.inflow.touched = True
        until_s = time.monotonic() + (self.env.config.ack_s if word.switched else SILENT_S)
        while not self.dropped and (waits_s := self.inflow.unsaid_s(word.view, until_s)):
            self._hear(waits_s)
        self._tell_what_came()
        self.pipe.send(say.LaneDrained(word.number))

    # --- the end -------------------------------------------------------------------------------------------------
    def _end(self, word: say.EndRun) -> None:
        self._close()
        self.listener.close()
        self.clock.enter(Phase.IDLE, self.committed)  # what its agent reads if this process ends: it was to
        self.ended = word.finished

    def retire(self) -> None:
        """Leave no socket behind. Once or more."""
        self._close()
        self.donor.close_all()
        self.inflow.streams.close()
        self.listener.close()
        if self.saves is not None:
            self.saves.close()

    def leave_early(self) -> None:
        """The loop was left, and the script is over."""
        if self.ended is None:
            self.pipe.over = True
            self.pipe.send(say.RankLeft())
