"""One step, as the loop sees it: an iterable of batches, then its loss. What it does is handed in by `session.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from outlast.errors import StepMisuse
from outlast.runtime.training.step_checks import Meta

__all__ = ["Step"]


class Step:
    """One step. Iterate it for its batches; after that it is committed and `loss` is known."""

    def __init__(
        self, number: int, *, batches: Callable[[int], Iterator[Any]], backward: Callable[[Tensor], None],
        newest: Callable[[], Meta | None],
    ) -> None:  # fmt: skip
        self.number, self._batches, self._backward, self._newest = number, batches, backward, newest

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.number)

    def backward(self, loss: Tensor) -> None:
        """Backward of this microbatch's mean loss; its gradient goes into the step's tree."""
        self._backward(loss)

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
