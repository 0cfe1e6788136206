"""What people do in a loop by habit, which would do nothing or too much here: each is told what to write instead.

Looks at what the loop left behind whenever it comes back; owns no part of the step. Used by the protected loop and the
plain one alike.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outlast.errors import StepMisuse
from outlast.runtime.exchange.shard_sums import ShardSums
from outlast.runtime.loop._hidden_gradients import hide, show_none
from outlast.runtime.training.losses import LossCheck
from outlast.runtime.training.samples import Samples
from outlast.runtime.training.state import State
from outlast.runtime.training.step_checks import Meta
from outlast.runtime.training.witness import Witness

__all__ = ["LoopWatch", "steps_again"]


class LoopWatch:
    """`given` before the loop's body runs, `returned` when it comes back, `after_backward` and `committed` in between,
    `over` when no more of it comes. `loss` looks at what a backward is given. `shards`: what FSDP reduces with, if that
    is outlast's."""

    def __init__(
        self, state: State, microbatches: int, witness: Witness | None = None, shards: ShardSums | None = None
    ) -> None:
        self._state, self._witness, self._shards = state, witness, shards
        if shards is not None:  # a backward of the loop's own, too, finds no tell-tale to add to
            shards.before_reducing = lambda: show_none(state.params)
        self._hidden: dict[int, Tensor] = {}
        self._counts: list[Any] = []
        self.loss = LossCheck(microbatches)

    def given(self) -> None:
        """The body is about to run."""
        self._counts = [_count(scheduler) for scheduler in self._state.schedulers]

    def returned(self) -> None:
        """Raises StepMisuse for a scheduler that the body has stepped."""
        for scheduler, count in zip(self._state.schedulers, self._counts, strict=False):
            if _count(scheduler) != count:
                raise StepMisuse(
                    f"the loop called step() of its {type(scheduler).__name__}, which outlast steps as well",
                    did="nothing more was trained",
                    remedy="leave scheduler.step() out: what is given as scheduler= is stepped once with every step",
                )

    def after_backward(self) -> None:
        """No gradient is there to be clipped or stepped with."""
        hide(self._state.params, self._hidden, shards=self._shards is not None)

    def committed(self, meta: Meta | None = None) -> None:
        """The step is applied, and what follows the loop over its batches is about to run. `meta`: the step's."""
        if self._witness is not None and meta is not None:
            self._witness.committed(meta.step, meta.loss)
        self.after_backward()
        self.given()

    def over(self) -> None:
        """The parameters belong to the script alone."""
        show_none(self._state.params)
        if self._witness is not None:
            self._witness.over()


def _count(scheduler: Any) -> Any:
    """How often it was stepped, as far as it says so; of a chain, each link."""
    links = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "_step_count", None), getattr(scheduler, "last_epoch", None), [_count(s) for s in links]


def steps_again(samples: Samples) -> StepMisuse:
    """The script called `steps()` once more."""
    how = "one loop for all: steps(until=…), where step.epoch is the pass over the stream"
    if samples.known_length:
        how = (
            "one loop for all epochs: `for epoch in training.epochs(n): for step in epoch:`, or "
            f"steps(until=n * {samples.steps_per_epoch}): {samples.steps_per_epoch} steps see each sample once"
        )
    return StepMisuse("steps() was called twice", did="nothing more was trained", remedy=how)
