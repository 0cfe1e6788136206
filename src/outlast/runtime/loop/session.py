"""The user's loop over steps: `Training`. Everything under it is `member/step.py`'s and `training/`'s.

    run = outlast.join()
    training = run.protect(model, optimizer, dataset, global_batch_size=64, microbatches=8, seed=0)
    for step in training.steps(until=2000):
        for batch in step:                              # this replica's microbatches
            step.backward(loss_fn(model, batch))
        log(step.number, step.loss)                     # committed

Exhausting the inner loop commits the step; `break` or an exception never does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.protocol import Certificate, Leave, Wait
from outlast.errors import DeviceFault, Evicted, FleetLost, MembershipError, StepMisuse, ViewAbandoned
from outlast.runtime.checks.unregistered_variables import UnregisteredVariables
from outlast.runtime.loop._allocator import keep_freed_memory
from outlast.runtime.loop._boundary import boundary
from outlast.runtime.loop._ending import ScriptEnd, changed_since, end_with_error, left_open, report_failure, unwritten
from outlast.runtime.loop._epochs import Epoch, Epochs, begun_amid
from outlast.runtime.loop._first_steps import look_for_habits
from outlast.runtime.loop._iterators import Left, WatchedLoop, put_off, values_of
from outlast.runtime.loop._loop_watch import LoopWatch, steps_again
from outlast.runtime.loop._mid_epoch import kept
from outlast.runtime.loop._own_lines import OwnLines
from outlast.runtime.loop._step import Step
from outlast.runtime.loop._writer_turn import Turn
from outlast.runtime.member.driver import Replica
from outlast.runtime.member.shared_evaluation import SharedEvaluations
from outlast.runtime.member.step import StepCourse
from outlast.runtime.training.arguments import positive
from outlast.runtime.training.evaluation import evaluation_inside, evaluation_of
from outlast.runtime.training.followers import check_follower
from outlast.runtime.training.pipelined import ScheduleCall, check_schedule, no_schedule
from outlast.runtime.training.run_facts import warm_up
from outlast.runtime.training.state import digest_of

__all__ = ["Step", "Training"]


class Training:
    """What `protect` returns (`run.py`)."""

    def __init__(self, replica: Replica, audit: float | str = 0.0, critical: Sequence[str] = ()) -> None:
        self.replica, self.engine = replica, replica.engine
        self._course = StepCourse(replica, audit, critical)
        self._evaluations, self._lines = SharedEvaluations(replica, self._ended), OwnLines(self.engine.seed)
        self._inside = False  # the loop over a step's batches
        self._started = self._failed = False
        self._epochs: Callable[[], Epochs | None] = lambda: None
        self._step: Step | None = None
        self._home = os.getpid()  # what the script forks inherits hooks and handlers, and is not the replica
        self._watch = LoopWatch(
            self.engine.state, self.engine.samples.num_leaves, self.engine.witness, self.engine.shards
        )
        self._open = False  # the loop has been given a step, and has not asked for the next
        self._left: Left | None = None  # how the loop over a step's batches was
        self._saved = False  # what a loop that was left early leaves
        self._committed: list[tuple[int, int]] | None = None  # the parameters at the last commit, by `values_of`
        self._broken, self._turn = False, Turn(self.replica)  # the loop over the steps was left, on purpose
        self._variables = UnregisteredVariables(self.engine.state, self._turn.leads)
        self._previous: Any = None  # what SIGTERM did before the loop

    def steps(self, until: int) -> Iterator[Step]:
        """Steps 0 … until-1 that are still to be done, one object each. Returns when all replicas committed the last.

        `break` out of this loop is allowed if every replica does it after the same step.
        """
        return WatchedLoop(self._steps(until), self._watch.given, self._watch.returned, self._dropped)

    def epochs(self, num: int) -> Iterator[Epoch]:
        """Epochs 0 … num-1 that are still to be done, each an iterable of its steps, with its `number`. What the loop
        does after an epoch's last step is done on every replica, and belongs to that step."""
        size = self.steps_per_epoch
        steps = self.steps(positive("epochs", num) * size)
        loop = Epochs(steps, size, lambda number: kept(self.engine.loop, self._lines, number, size))
        self._epochs = weakref.ref(loop)
        return loop

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which each sample is seen once. Raises StepMisuse for a stream, whose length nobody knows."""
        return self.engine.samples.steps_per_epoch

    def stop(self, reason: str = "the loop asked for it") -> None:
        """End training on every replica after the step under way, or the next one: any replica may ask.

        Go on with the loop, which ends by itself everywhere after the same step; do not `break`.
        """
        self.engine.stop_wanted = reason or "the loop asked for it"

    @property
    def stopped(self) -> str:
        """Why training ended before its last step, the same on every replica; "" if it did not."""
        return self.engine.stopped

    def evaluate(
        self,
        dataset: Any,
        fn: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Evaluate on a dataset, its batches shared by the replicas, and return the same numbers on every one of them.

        `fn(batch)` returns a mapping of names to values, or to (value, weight); the result is each name's mean,
        weighted by samples where no weight is given. It runs without gradients, with the model in `eval` mode.
        `batch_size`: a microbatch's samples if not given. A replica's death costs what it had not told yet. Call it on
        every replica, before or after a step's inner loop; outside of the loop whoever calls it computes all of it.
        Raises StepMisuse inside the inner loop and where replicas evaluate different things, ConfigError for bad input.
        """
        wanted = evaluation_of(self.engine.state, self.engine.samples, dataset, fn, batch_size, collate_fn)
        if self._inside:
            raise evaluation_inside()
        known = begun_amid(self._epochs, self.engine.opening)
        if known is not None:
            return known
        return self._evaluations.run(wanted) if self._open else wanted.here()

    def after_step(self, function: Callable[[], object]) -> None:
        """Have it called after each step, when the optimizer has taken it: for averages of weights and the like.

        Replicas that join call it for each step that they replay, so it may only follow from the model and from
        registered state, and change only those. Raises StepMisuse once the loop has begun, ConfigError for what it
        would change and nobody has registered.
        """
        check_follower(function, self.engine.state, self._started)
        self.engine.after_step.append(function)

    def _steps(self, until: int) -> Iterator[Step]:
        limit = self.replica.env.until or until
        self.replica.member.until = min(positive("until", until), limit)
        self._start()
        try:
            yield from self._until_it_is_over(limit)
        finally:
            self._let_go()
        if limit < until:
            raise SystemExit(0)

    def _until_it_is_over(self, limit: int) -> Iterator[Step]:
        while (todo := self.replica.resume()) is not None:
            if self.engine.late is not None:  # it came in by replaying: the newest step is its loop's, too
                yield from self._lived(self.engine.late.step)
                continue
            if isinstance(todo, Leave):
                self._course.entrance.conclude()
                self.replica.close_barrier(todo)
                continue
            boundary(self.replica)
            assert not isinstance(todo, Wait)
            yield self._begin(todo.step)
            self._open = False
            if self.replica.member.committed == todo.step:
                raise left_open(todo.step, self.replica.env.me)
        self._watch.over()
        self._ended()
        self._retire()

    def _let_go(self, anew: bool = False, _is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        """Alone: let go now, and not when the script ends, of what a loop held that will not be continued. A step that
        it left open may still be taken through. `anew`: the process goes on to another training."""
        if _is_over():  # a script's variable kept the loop to the interpreter's end, where modules are empty already
            return
        if self.replica.env.coordinator is not None or self._script_end.is_over or os.getpid() != self._home:
            return
        step, saves = self._step if self._open else None, self.replica.saves is not None
        done = step is None or self.replica.member.committed != step.number
        if step is not None and saves and not anew and not (done and self._broken):
            put_off(functools.partial(self._let_go, True), self._script_end.forget)
        elif step is not None and done and (saves or self._broken):
            self._leave_early()
        elif step is None or done:
            self._retire()
        else:  # it goes with the last who refers to it
            self._script_end.forget()
            if self._left in ("break", "unknown"):
                end_with_error(left_open(step.number, self.replica.env.me))

    def _dropped(self, left: Left) -> None:
        """The loop is over before its end, if `left` is "break" on purpose. In the middle of a step nothing is saved:
        that is never a good end."""
        self._watch.over()
        if left == "break":
            self._broken = True
            self._save_what_is_left()
            self.replica.siblings.leave()

    def _save_what_is_left(self) -> None:
        """What the last step left, unless the loop's code has made something else of it since."""
        step, saves = self._step, self.replica.saves
        if saves is None or step is None or self._saved or self.replica.member.committed == step.number:
            return
        self._saved = True
        if self._committed == values_of(self.engine.state.params):
            with contextlib.suppress(ViewAbandoned):
                saves.last(final=True)
            return
        saves.forgo()
        print(changed_since(step.number), file=sys.stderr, flush=True)

    def _lived(self, step: int) -> Iterator[Step]:
        """The step whose outcome this process only has to apply: what the loop does around it is done here as well."""
        yield self._begin(step)
        self._open = False
        if self.engine.late is not None and self.engine.late.step == step:
            raise left_open(step, self.replica.env.me)

    def _begin(self, step: int) -> Step:
        """What the loop is given, here and on this replica's other ranks."""
        self.replica.siblings.begin_step(step)
        self._step, self._open = self._as_seen(step), True
        self.engine.given(step)
        self._evaluations.given()
        self._variables.given()
        self._lines.before(step)
        return self._step

    def _as_seen(self, step: int) -> Step:
        return Step(
            step, batches=self._batches, backward=self._backward, pipeline=self._pipeline,
            newest=lambda: self.engine.meta, metric=self._course.metric, epoch_of=self.engine.samples.epoch_of,
        )  # fmt: skip

    def _ended(self) -> None:
        """The coordinator closed the run for this replica: finished is the only end after which the script goes on."""
        member = self.replica.member
        if member.leaving and not member.done:
            raise SystemExit(0)
        if member.closed == "finished" and not member.done:
            print(f"outlast: the run is over: it finished without {member.me}", file=sys.stderr, flush=True)
            raise SystemExit(0)
        if not member.done:
            raise MembershipError(
                f"the run is over: {member.closed}",
                where=f"replica {member.me}, step {member.committed}",
                did="this replica stops",
                remedy="outlast why tells what happened",
            )

    def _start(self) -> None:
        if self._started:
            raise steps_again(self.engine.samples)
        self._started = True
        self._script_end = ScriptEnd(self._report, self._at_the_script_s_end, self._at_exit)
        keep_freed_memory()
        warm_up()
        self.engine.loop.find_schedulers()
        if self.replica.env.config.bitwise:
            last, turn = self.replica.member.is_last, self._turn
            look_for_habits(self.replica.env, self.engine, last, turn.leads, lambda: turn.asked)
        self.replica.link.start()
        if threading.current_thread() is threading.main_thread() and self.replica.env.coordinator is not None:
            self._previous = signal.signal(signal.SIGTERM, self._asked_to_leave)

    def _report(self, error: BaseException) -> None:
        """The script ends by it: the coordinator is told whose it is, unless another rank's was told already."""
        self._failed = True
        self.replica.link.beat()
        known = isinstance(error, MembershipError) and not isinstance(
            error, DeviceFault
        )  # it is the coordinator's word
        mine = not known and not self.replica.siblings.reported
        if isinstance(error, Exception) and mine:
            siblings = self.replica.siblings
            siblings.all_there()
            if (elsewhere := siblings.raised()) is not None:
                self.replica.tell_of(elsewhere)
            else:
                self.replica.link.send([report_failure(self.replica, siblings.told_as(error))])
        self.replica.close()

    def _at_the_script_s_end(self) -> None:
        """Who left the loop early waits for the others to leave it too; who may have to write, for the writer's end."""
        if os.getpid() != self._home or self._failed:
            return
        try:
            self._leave_early()
            if self._turn.skipped and self.replica.member.ended is not None and self._turn.mine():
                raise unwritten(self.replica)
        except (MembershipError, FleetLost, StepMisuse) as error:
            if isinstance(error, StepMisuse):
                self.replica.link.send([report_failure(self.replica, error)])
            print(error, file=sys.stderr, flush=True)
            self.replica.close()
            os._exit(error.exit_code)

    def _at_exit(self) -> None:
        if os.getpid() == self._home:
            self.replica.link.beat()
            self.replica.close()

    def _leave_early(self) -> None:
        """The loop was left, after a step or in the middle of one."""
        if not self._open or self._step is None:
            return
        self.replica.link.beat()  # the steps since the last one are known to nobody yet
        if self.replica.member.committed != self._step.number:
            self._save_what_is_left()
            self.replica.leave_early()
            self._retire()
        elif self._left in ("break", "unknown"):
            raise left_open(self._step.number, self.replica.env.me)

    def _retire(self) -> None:
        """Training is over; the rest of the script is its own. Only the coordinator's word is still listened to."""
        self._open, alone = False, self.replica.env.coordinator is None
        self.replica.close() if alone else self.replica.retire()
        self.engine.sums.over()
        if self.engine.step_checks.averages is not None:
            self.engine.step_checks.averages.over()
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None
        if alone:  # nobody is left to be told how the script ends
            self._script_end.forget()

    def writes(self) -> bool:
        """See `Run.is_writer`."""
        if self._broken and os.getpid() == self._home:
            self._leave_early()
        return self._turn.mine()

    def _asked_to_leave(self, *_: Any) -> None:
        """SIGTERM: tell the coordinator; the view without this replica takes effect after a step."""
        if os.getpid() != self._home:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.replica.link.leave()

    def fingerprint(self) -> str:
        """SHA-256 over parameters and optimizer state by name: name, dtype, shape, bytes. Of a sharded model, and of
        stages, every rank must ask for it; a replica in which one alone does ends with a sentence that says so."""
        if self.engine.sharded or self.engine.state.stages is not None:
            self.replica.siblings.take_fingerprint()
        return digest_of(self.engine.state)

    @property
    def certified(self) -> Certificate | None:
        """The newest state known to be finite, agreed and audited; None without audits."""
        return self.replica.member.audits.certificate

    # --- one step ------------------------------------------------------------------------------------------------
    def _batches(self, step: int) -> Iterator[Any]:
        def left(how: Left) -> None:
            self._left = how

        self._left = None
        return WatchedLoop(self._microbatches(step), self._watch.given, self._watch.returned, left)

    def _microbatches(self, step: int) -> Iterator[Any]:
        """Batches until the step is committed: mine, and orphans of the dead."""
        self._evaluations.inner()
        self._inside = True
        yield from self._course.batches(step, self._ended)
        self._inside = False
        if self.engine.meta is None or self.engine.meta.step != step:  # a newer state was taken: the loop missed steps
            raise Evicted(
                f"the run went on without this replica after step {step}",
                where=f"replica {self.replica.env.me}",
                did="it is started again",
                remedy="outlast why says more",
            )
        self._watch.committed(self.engine.meta)
        if self.replica.saves is not None:
            self._committed = values_of(self.engine.state.params)
        self._lines.after(step)
        self.replica.enter(Phase.BODY)  # the loop's own time: an evaluation may take as long as it likes

    def _backward(self, loss: Tensor) -> None:
        if self.engine.state.stages is not None:
            raise no_schedule()
        self._watch.loss(loss)
        self._course.backward(loss)
        self._watch.after_backward()

    def _pipeline(self, schedule: Any, inputs: Sequence[Any], keywords: Mapping[str, Any], target: Any) -> None:
        engine = self.engine
        check_schedule(engine.state, schedule, self.replica.env.width)
        call = ScheduleCall(engine.state, engine.sums.quiet, schedule, inputs, keywords, target)
        self._course.backward(cast(Tensor, call))  # which asks a loss for its backward and its value alone
        self._watch.after_backward()
