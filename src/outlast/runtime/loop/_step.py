"""One step, as the loop sees it: an iterable of batches, then its loss. What it does is handed in by `session.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from outlast.errors import StepMisuse
from outlast.runtime.training.step_checks import Meta

__all__ = ["Step"]


class Step:
    """One step. Iterate it for its batches; after that it is committed and `loss` is known."""

    def __init__(
        self,
        number: int,
        *,
        batches: Callable[[int], Iterator[Any]],
        backward: Callable[[Tensor], None],
        pipeline: Callable[..., None],
        newest: Callable[[], Meta | None],
        metric: Callable[[str, Any, Any], None],
        epoch_of: Callable[[int], int],
    ) -> None:
        self.number, self._batches, self._backward, self._newest = number, batches, backward, newest
        self._pipeline = pipeline
        self._metric, self._epoch_of = metric, epoch_of

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.number)

    def backward(self, loss: Tensor) -> None:
        """Backward of this microbatch's mean loss; its gradient goes into the step's tree."""
        self._backward(loss)

    def pipeline(self, schedule: Any, *inputs: Any, target: Any = None, **keywords: Any) -> None:
        """Forward and backward of this microbatch by all stages of a pipeline (`run.mesh(pipeline=…)`), called on every
        rank of the replica with the same batch.

        `schedule`: torch's `ScheduleGPipe` or `Schedule1F1B`, which cuts the batch into microbatches of its own and is
        given `inputs` on the first rank, `target` on the last one and `keywords` on every one. The mean of its losses
        is the microbatch's loss, on all ranks. Raises StepMisuse for another schedule, in a replica that is no
        pipeline, and where a parameter of the stage is left without a gradient.
        """
        self._pipeline(schedule, inputs, keywords, target)

    def metric(self, name: str, value: Any, weight: float | Tensor | None = None) -> None:
        """Give a number of this microbatch, such as its accuracy, to be averaged over the global batch.

        `weight`: what it counts for, in samples if not given. Raises StepMisuse for what is not one number, outside of
        the loop over batches, and for a name that this microbatch has already.
        """
        self._metric(name, value, weight)

    @property
    def epoch(self) -> int:
        """The epoch that the step belongs to, counted from 0; of a stream, the pass over it."""
        return self._epoch_of(self.number)

    @property
    def metrics(self) -> Mapping[str, float]:
        """What `metric` was given, averaged over the global batch: the same on every replica, whoever computed it."""
        return MappingProxyType(dict(self._meta.metrics))

    @property
    def loss(self) -> float:
        """Mean loss over the global batch, the same on every replica. StepMisuse before the commit."""
        return self._meta.loss

    @property
    def grad_norm(self) -> float | None:
        """Global norm before clipping; None with neither `clip_norm` nor guards."""
        return self._meta.norm

    @property
    def _meta(self) -> Meta:
        meta = self._newest()
        if meta is None or meta.step != self.number:
            raise StepMisuse(f"step {self.number} is not committed", remedy="read it after the inner loop")
        return meta
