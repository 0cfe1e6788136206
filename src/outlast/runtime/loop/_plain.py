"""`OUTLAST=off`: the same loop as plain PyTorch. No protocol, no tree: leaving is as easy as coming.

What a fleet of one looks for in its first steps is looked for here as well (`checks/plain_checks.py`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from outlast.core.position import position_seed
from outlast.errors import StepMisuse
from outlast.runtime.checks.plain_checks import PlainChecks
from outlast.runtime.checks.unregistered_variables import UnregisteredVariables
from outlast.runtime.exchange.shard_sums import OwnSums
from outlast.runtime.host.environment import Environment
from outlast.runtime.loop._ending import changed_since, left_open
from outlast.runtime.loop._epochs import Epoch, Epochs, begun_amid
from outlast.runtime.loop._iterators import Left, WatchedLoop, at_the_script_s_end, put_off, values_of
from outlast.runtime.loop._loop_watch import LoopWatch, steps_again
from outlast.runtime.loop._mid_epoch import kept
from outlast.runtime.loop._own_lines import OwnLines
from outlast.runtime.loop._plain_saves import PlainSaves
from outlast.runtime.saving.resume import begin_at_zero
from outlast.runtime.settings.save_settings import TIMEOUT_S, SaveSettings
from outlast.runtime.training.arguments import positive
from outlast.runtime.training.evaluation import evaluation_inside, evaluation_of
from outlast.runtime.training.followers import check_follower
from outlast.runtime.training.loop_state import LoopState
from outlast.runtime.training.losses import missing_backward, second_backward
from outlast.runtime.training.metrics import Metrics, mean_of, metric_outside
from outlast.runtime.training.opening import KEY, Opening
from outlast.runtime.training.pipelined import ScheduleCall, check_schedule
from outlast.runtime.training.random_state import seed_everything
from outlast.runtime.training.samples import Samples, skipped
from outlast.runtime.training.state import State, digest_of
from outlast.tensors import is_shard, whole

__all__ = ["PlainStep", "PlainTraining", "plain_training"]


class PlainTraining:
    """Gradient accumulation over the microbatches, then one optimizer step. `name`: of the process; `bitwise`: as in
    the configuration; `reads_norm`: whether steps tell a norm though nothing is clipped."""

    certified = None
    """Nothing is audited."""

    def __init__(
        self,
        state: State,
        samples: Samples,
        clip_norm: float | None,
        seed: int,
        saves: PlainSaves | None = None,
        begin: Callable[[], object] = lambda: None,
        *,
        name: str,
        bitwise: bool,
        reads_norm: bool,
    ) -> None:
        self.state, self.samples, self.clip_norm, self.seed, self.saves = state, samples, clip_norm, seed, saves
        self.lines = OwnLines(seed)
        self.stopped = self.stop_wanted = ""
        self.opening = state.extra[KEY] = Opening(samples.steps_per_epoch if samples.known_length else 0)
        self.followers: list[Callable[[], object]] = []
        self.begin, self.loop = begin, LoopState(state)
        self.asked = 0  # how often the loop has asked whether it writes
        self.checks = PlainChecks(self.loop, samples, name, bitwise=bitwise, asked=lambda: self.asked)
        self.with_norms = reads_norm or clip_norm is not None or state.scaling.active
        self.variables = UnregisteredVariables(state, lambda: True)
        shards = OwnSums() if any(map(is_shard, state.params)) else None
        self.watch = LoopWatch(state, samples.num_leaves, shards=shards)
        if shards is not None:
            shards.attach(state.model)
        self.grads: list[Tensor | None] = [None for _ in state.params]  # while the loop's body runs
        self.inside = self._started = False  # `inside`: the loop over a step's batches
        self._epochs: Callable[[], Epochs | None] = lambda: None
        self._open: PlainStep | None = None  # the step that the loop has been given and did not come back from
        self._committed: list[tuple[int, int]] = []

    def steps(self, until: int) -> Iterator[PlainStep]:
        """Steps 0 … until-1, or from where the newest checkpoint was."""
        return WatchedLoop(self._steps(until), self.watch.given, self.watch.returned, self._dropped)

    def _steps(self, until: int) -> Iterator[PlainStep]:
        if self._started:
            raise steps_again(self.samples)
        self._started = True
        positive("until", until)
        forget = at_the_script_s_end(self._save_what_is_left)
        try:
            self.checks.start()
            start = self.saves.resume(until) if self.saves is not None else None
            if self.saves is not None and self.saves.stopped:
                self.stopped, until = self.saves.stopped, min(until, start or 0)
            if self.saves is not None:
                self.stop_wanted = self.stop_wanted or self.saves.asked
            if start is None:
                start = 0
                self.begin()
            self.samples.expect(lambda number: list(range(len(self.samples.sizes(number)))), start)
            for number in range(start, until):
                self._open = step = PlainStep(self, number)
                self.variables.given()
                self.lines.before(number)
                yield step
                self._open = None
                if not step.done:
                    raise left_open(number, "")
                last = number + 1 == until or bool(self.stopped)
                if self.saves is not None:
                    self.saves.boundary(number + 1, last=last, stopped=self.stopped, asked=self.stop_wanted)
                if last:
                    break
            self.watch.over()
        finally:
            self._let_go(forget)

    def _let_go(self, forget: Callable[[], object], _is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        """The loop will not be continued: nothing keeps this training, unless something is left to save."""
        if _is_over():  # a script's variable kept the loop to the interpreter's end, where modules are empty already
            return
        self.checks.over()
        if self.saves is None or self._open is None:
            forget()
        else:
            put_off(self._save_what_is_left, forget)

    def epochs(self, num: int) -> Iterator[Epoch]:
        """Does what `Training.epochs` does."""
        size = self.steps_per_epoch
        steps = self.steps(positive("epochs", num) * size)
        loop = Epochs(steps, size, lambda number: kept(self.loop, self.lines, number, size))
        self._epochs = weakref.ref(loop)
        return loop

    @property
    def steps_per_epoch(self) -> int:
        """Does what `Training.steps_per_epoch` does."""
        return self.samples.steps_per_epoch

    def stop(self, reason: str = "the loop asked for it") -> None:
        """Does what `Training.stop` does."""
        self.stop_wanted = reason or "the loop asked for it"

    def evaluate(
        self,
        dataset: Any,
        fn: Callable[[Any], Any],
        *,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Does what `Training.evaluate` does."""
        wanted = evaluation_of(self.state, self.samples, dataset, fn, batch_size, collate_fn)
        if self.inside:
            raise evaluation_inside()
        known, loop = begun_amid(self._epochs, self.opening), self._epochs()
        if known is not None:
            return known
        found = wanted.here()
        if loop is not None and loop.opening is not None:
            self.opening.add(loop.opening, found)
        return found

    def after_step(self, function: Callable[[], object]) -> None:
        """Does what `Training.after_step` does."""
        check_follower(function, self.state, self._started)
        self.followers.append(function)

    def writes(self) -> bool:
        """Whoever is alone does."""
        self.asked += 1
        return True

    def committed(self) -> None:
        """The step is applied; the loop's code that follows it is next."""
        self.watch.committed()
        if self.saves is not None:
            self._committed = values_of(self.state.params)

    def _dropped(self, left: Left) -> None:
        self.watch.over()
        if left == "break":
            self._save_what_is_left()

    def _save_what_is_left(self) -> None:
        """The loop was left early, and what it leaves is as the last step left it."""
        step, self._open = self._open, None
        if self.saves is None or step is None or not step.done:
            return
        if self._committed == values_of(self.state.params):
            self.saves.boundary(step.number + 1, last=True, stopped=self.stopped)
            return
        print(changed_since(step.number), file=sys.stderr, flush=True)
        self.saves.end(step.number + 1)

    def fingerprint(self) -> str:
        """Does what `Training.fingerprint` does."""
        return digest_of(self.state)


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad if grad is None or is_shard(grad) else grad.to_dense()


def _added(total: Tensor | None, grad: Tensor | None, weight: float) -> Tensor | None:
    """The sum of gradients with one more."""
    if grad is None:
        return total
    with torch.no_grad():
        if weight != 1.0:
            grad.mul_(weight)
        return grad if total is None else total.add_(grad)


class PlainStep:
    """One step of the plain loop."""

    def __init__(self, training: PlainTraining, number: int) -> None:
        self._training, self.number = training, number
        self._losses: dict[int, tuple[float, float]] = {}
        self._means: dict[str, float] = {}
        self._leaf, self._size, self._rows = 0, 0, Metrics()
        self._weight = 1.0
        self._backwards = 0
        self.grad_norm: float | None = None
        self.done = False

    def __iter__(self) -> Iterator[Any]:
        watch = self._training.watch
        return WatchedLoop(self._batches(), watch.given, watch.returned, lambda left: None)

    def _batches(self) -> Iterator[Any]:
        t = self._training
        sizes = t.samples.sizes(self.number)
        t.grads = [None for _ in t.state.params]
        buffers = [buffer.clone() for buffer in t.state.buffers.values() if t.state.scaling.active]
        t.checks.begun(self.number)
        for leaf, size in enumerate(sizes):
            if size:
                self._weight, self._backwards = size / sum(sizes) if len({*sizes}) > 1 else 1.0, 0
                self._leaf, self._size = leaf, size
                yield from self._given(self._prepared(leaf))
                if not self._backwards:
                    raise missing_backward(self.number, leaf)
        if self.number == 0:
            for batch in t.checks.again(lambda: self._prepared(0)):
                yield from self._given(batch)
        t.checks.computed()
        self._show_mean()
        self._apply(buffers)
        t.committed()
        t.lines.after(self.number)

    def _given(self, batch: Any) -> Iterator[Any]:
        self._training.inside = True
        yield batch
        self._training.inside = False

    def _prepared(self, leaf: int) -> Any:
        t = self._training
        batch = t.samples.fetch(self.number, leaf)
        seed_everything(position_seed(t.seed, self.number, leaf, 2))
        return batch

    def _apply(self, buffers: list[Tensor]) -> None:
        """From the whole gradient to the end of the step. `buffers`: as they were before it, under a scaler."""
        t = self._training
        overflow = t.state.scaling.unscale(t.state.params)
        if t.clip_norm is not None:
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(t.state.params, t.clip_norm))
        elif t.with_norms:
            self.grad_norm = float(whole(get_total_norm([p.grad for p in t.state.params if p.grad is not None])))
        if t.saves is not None:
            t.saves.wait_copied()
        if not overflow:
            t.checks.replay()
            for optimizer in t.state.optimizers:
                optimizer.step()
            t.checks.compare(self.number)
            for scheduler in t.state.schedulers:
                scheduler.step()
        for buffer, was in zip(t.state.buffers.values(), buffers if overflow else (), strict=overflow):
            buffer.copy_(was)
        t.state.scaling.applied(overflow)
        for follow in t.followers:
            follow()
        self._means = dict(self._rows.means(t.samples.num_leaves))
        t.stopped = t.stop_wanted
        t.samples.applied(self.number, t.samples.place_of(self.number))
        bad = t.samples.bad.told(range(t.samples.num_leaves))
        t.samples.bad.applied(bad)
        if bad:
            print(
                f"outlast: step {self.number}: {skipped(self.number, bad, t.samples.bad).text}: skipped from here on",
                file=sys.stderr,
            )
        self.done = True
        t.checks.applied(overflow=overflow)

    def _show_mean(self) -> None:
        """The gradient of the step where the optimizer looks for it."""
        sizes = self._training.samples.sizes(self.number)
        for param, grad in zip(self._training.state.params, self._training.grads, strict=True):
            param.grad = grad if grad is None or len({*sizes}) > 1 else grad.mul_(1.0 / len(sizes))

    def backward(self, loss: Tensor) -> None:
        """Backward of this microbatch's mean loss, weighted by its share of the batch."""
        self._training.watch.loss(loss)
        self._into_the_step(loss)

    def pipeline(self, schedule: Any, *inputs: Any, target: Any = None, **keywords: Any) -> None:
        """Does what `Step.pipeline` does, with one stage."""
        state = self._training.state
        check_schedule(state, schedule, 1)
        call: Any = ScheduleCall(state, contextlib.nullcontext, schedule, inputs, keywords, target)
        self._into_the_step(call)

    def _into_the_step(self, loss: Tensor) -> None:
        t = self._training
        if t.checks.active:
            t.checks.backward(loss)
            t.watch.after_backward()
            return
        if self._backwards:
            raise second_backward()
        self._backwards = 1
        for param in t.state.params:
            param.grad = None
        if isinstance(loss, Tensor):
            with t.checks.parts():
                t.state.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
        else:  # whose gradients come in parts
            loss.backward()
        t.grads = [
            _added(total, _dense(p.grad), self._weight) for total, p in zip(t.grads, t.state.params, strict=True)
        ]  # the loss itself is not weighted: hooks of the script see each microbatch's own gradient, as in a fleet
        t.watch.after_backward()
        self._losses[self._leaf] = float(loss.detach()), float(self._size)

    @property
    def epoch(self) -> int:
        """Does what `Step.epoch` does."""
        return self._training.samples.epoch_of(self.number)

    def metric(self, name: str, value: Any, weight: Any = None) -> None:
        """Does what `Step.metric` does."""
        if self._training.checks.active:
            return
        if not self._training.inside:
            raise metric_outside(name)
        self._rows.put(self._leaf, name, value, self._size if weight is None else weight)

    @property
    def metrics(self) -> dict[str, float]:
        """Does what `Step.metrics` does."""
        self._check_done()
        return self._means

    @property
    def loss(self) -> float:
        """Mean over the batch: microbatches of a short batch count by their samples."""
        self._check_done()
        return mean_of([self._losses.get(leaf) for leaf in range(self._training.samples.num_leaves)])

    def _check_done(self) -> None:
        if not self.done:
            raise StepMisuse(f"step {self.number} is not committed", remedy="read it after the inner loop")


def plain_training(
    env: Environment,
    parts: State,
    samples: Samples,
    clip_norm: float | None,
    seed: int,
    keep: SaveSettings | None,
    facts: dict[str, str],
    *,
    reads_norm: bool,
) -> PlainTraining:
    """The plain loop with its checkpoints, if it keeps any. Raises what `PlainSaves` does."""
    facts = facts | {"loop": "plain: OUTLAST=off sums in another order"}
    saves = PlainSaves(env, parts, keep, facts) if keep is not None else None
    begin = functools.partial(begin_at_zero, env.config, parts.model, keep.timeout_s if keep else TIMEOUT_S)
    samples.watch(env.config.outside_s)
    return PlainTraining(
        parts, samples, clip_norm, seed, saves, begin,
        name=env.me, bitwise=env.config.bitwise, reads_norm=reads_norm,
    )  # fmt: skip
