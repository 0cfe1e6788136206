"""The loop on a rank that is not its replica's lead: the same loop, step by step and batch by batch as the lead's goes.

What `protect` returns there. It reads like `Training` and decides nothing: which step and which microbatch is next, and
when training is over, is what the lead says.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from outlast.core.phases import Phase
from outlast.errors import LoopUnrepeatable, OutlastError
from outlast.runtime.loop._allocator import keep_freed_memory
from outlast.runtime.loop._ending import ScriptEnd, left_open, told, what_is_alike
from outlast.runtime.loop._epochs import Epoch, Epochs, begun_amid
from outlast.runtime.loop._first_steps import look_for_habits
from outlast.runtime.loop._iterators import Left, WatchedLoop
from outlast.runtime.loop._loop_watch import LoopWatch, steps_again
from outlast.runtime.loop._mid_epoch import kept
from outlast.runtime.loop._own_lines import OwnLines
from outlast.runtime.loop._step import Step
from outlast.runtime.member.follower import FollowingRank
from outlast.runtime.training.arguments import positive
from outlast.runtime.training.evaluation import evaluation_of
from outlast.runtime.training.followers import check_follower
from outlast.runtime.training.pipelined import ScheduleCall, check_schedule, no_schedule
from outlast.runtime.training.run_facts import warm_up
from outlast.runtime.training.state import digest_of
from outlast.runtime.transport.rank_words import RankFailed

__all__ = ["FollowingTraining"]


class FollowingTraining:
    """Takes the place of `Training` in a rank that follows; what each method does is said there."""

    certified = None
    """Audits are the lead's matter."""

    def __init__(self, follower: FollowingRank) -> None:
        self.replica, self.engine = follower, follower.engine
        self._lines = OwnLines(self.engine.seed)
        self._watch = LoopWatch(
            self.engine.state, self.engine.samples.num_leaves, self.engine.witness, self.engine.shards
        )
        self._started = False
        self._epochs: Callable[[], Epochs | None] = lambda: None
        self._failed = False
        self._open = False  # the loop has been given a step, and has not asked for the next
        self._home = os.getpid()

    def steps(self, until: int) -> Iterator[Step]:
        """Does what `Training.steps` does."""
        return WatchedLoop(self._steps(until), self._watch.given, self._watch.returned, self._dropped)

    def epochs(self, num: int) -> Iterator[Epoch]:
        """Does what `Training.epochs` does."""
        size = self.steps_per_epoch
        steps = self.steps(positive("epochs", num) * size)
        loop = Epochs(steps, size, lambda number: kept(self.engine.loop, self._lines, number, size))
        self._epochs = weakref.ref(loop)
        return loop

    @property
    def steps_per_epoch(self) -> int:
        """Does what `Training.steps_per_epoch` does."""
        return self.engine.samples.steps_per_epoch

    def stop(self, reason: str = "the loop asked for it") -> None:
        """Does what `Training.stop` does, which every rank must call: the lead's call is the one that counts."""
        self.engine.stop_wanted = reason

    @property
    def stopped(self) -> str:
        """Does what `Training.stopped` does."""
        return self.engine.stopped

    def after_step(self, function: Callable[[], object]) -> None:
        """Does what `Training.after_step` does."""
        check_follower(function, self.engine.state, self._started)
        self.engine.after_step.append(function)

    def fingerprint(self) -> str:
        """Does what `Training.fingerprint` does, which every rank must call: what they hold is gathered."""
        if self.engine.sharded or self.engine.state.stages is not None:
            self.replica.meet_for_fingerprint()
        return digest_of(self.engine.state)

    def evaluate(
        self,
        dataset: Any,
        fn: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Does what `Training.evaluate` does, which every rank must call: all go through the model together."""
        wanted = evaluation_of(self.engine.state, self.engine.samples, dataset, fn, batch_size, collate_fn)
        known = begun_amid(self._epochs, self.engine.opening)
        if known is not None:
            return known
        return self.replica.evaluate(wanted) if self._open else wanted.here()

    def writes(self) -> bool:
        """Only a lead does."""
        return False

    def _steps(self, until: int) -> Iterator[Step]:
        positive("until", until)
        self._start()
        while (step := self.replica.next_step()) is not None:
            self._open = True
            self.engine.given(step)
            self._lines.before(step)
            yield Step(
                step,
                batches=self._batches,
                backward=self._backward,
                pipeline=self._pipeline,
                newest=lambda: self.engine.meta,
                metric=self.replica.metric,
                epoch_of=self.engine.samples.epoch_of,
            )
            self._open = False
            if self.engine.meta is None or self.engine.meta.step != step:
                raise left_open(step, self.replica.env.me)
        self._watch.over()
        if not self.replica.ended or (self.replica.env.until and self.replica.env.until < until):
            raise SystemExit(0)

    def _start(self) -> None:
        if self._started:
            raise steps_again(self.engine.samples)
        self._started = True
        ScriptEnd(self._report, self._at_the_script_s_end, self.replica.retire)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._asked_to_leave)
        keep_freed_memory()
        warm_up()
        self.engine.loop.find_schedulers()
        if self.replica.env.config.bitwise:
            look_for_habits(self.replica.env, self.engine, lambda: False)

    def _asked_to_leave(self, *_: Any) -> None:
        """SIGTERM, which engines send to every process: the lead, which got it too, leaves for all ranks."""
        if os.getpid() != self._home:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _report(self, error: BaseException) -> None:
        self._failed = True
        if isinstance(error, Exception):
            ours = isinstance(error, OutlastError)
            microbatch = -1 if ours else self.replica.env.progress.read()[2]
            code = error.exit_code if isinstance(error, OutlastError) else 5
            final = isinstance(error, LoopUnrepeatable)
            self.replica.pipe.send(RankFailed(microbatch, told(error)[-4000:], what_is_alike(error), code, final))

    def _at_the_script_s_end(self) -> None:
        if os.getpid() == self._home and not self._failed:
            self.replica.see_out()
            self.replica.leave_early()

    def _dropped(self, left: Left) -> None:
        self._watch.over()
        unlike = self.replica.broke() if left == "break" else None
        if unlike is not None:  # an iterator that is dropped cannot raise
            self._report(unlike)
            print(told(unlike), file=sys.stderr, flush=True)
            os._exit(unlike.exit_code)

    def _batches(self, step: int) -> Iterator[Any]:
        return WatchedLoop(self._microbatches(step), self._watch.given, self._watch.returned, lambda left: None)

    def _microbatches(self, step: int) -> Iterator[Any]:
        yield from self.replica.batches(step)
        self._watch.committed(self.engine.meta)
        self._lines.after(step)
        self.replica.enter(Phase.BODY)

    def _backward(self, loss: Tensor) -> None:
        if self.engine.state.stages is not None:
            raise no_schedule()
        self._watch.loss(loss)
        self.replica.backward(loss)
        self._watch.after_backward()

    def _pipeline(self, schedule: Any, inputs: Sequence[Any], keywords: Mapping[str, Any], target: Any) -> None:
        engine = self.engine
        check_schedule(engine.state, schedule, self.replica.env.width)
        call = ScheduleCall(engine.state, engine.sums.quiet, schedule, inputs, keywords, target)
        self.replica.backward(cast(Tensor, call))  # which asks a loss for its backward and its value alone
        self._watch.after_backward()
