"""`OUTLAST=off`: the same loop as plain PyTorch. No protocol, no tree: leaving is as easy as coming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outlast.runtime._data import Samples, position_seed, seed_everything
from outlast.runtime._state import State, digest_of

if TYPE_CHECKING:
    from outlast.runtime._plain_saves import PlainSaves

__all__ = ["PlainStep", "PlainTraining"]


class PlainTraining:
    """Gradient accumulation over the microbatches, then one optimizer step."""

    def __init__(
        self, state: State, samples: Samples, clip_norm: float | None, seed: int, saves: PlainSaves | None = None
    ) -> None:
        self.state, self.samples, self.clip_norm, self.seed, self.saves = state, samples, clip_norm, seed, saves

    def steps(self, until: int) -> Iterator[PlainStep]:
        """Steps 0 … until-1, or from where the newest checkpoint was."""
        start = self.saves.resume() if self.saves is not None else 0
        for number in range(start, until):
            yield PlainStep(self, number)
            if self.saves is not None:
                self.saves.boundary(number + 1, last=number + 1 == until)

    def fingerprint(self) -> str:
        """As of `Training.fingerprint`."""
        return digest_of(self.state)


class PlainStep:
    """One step of the plain loop."""

    def __init__(self, training: PlainTraining, number: int) -> None:
        self._training, self.number = training, number
        self._losses: list[tuple[float, float]] = []
        self._weight = 1.0
        self.grad_norm: float | None = None

    def __iter__(self) -> Iterator[Any]:
        t = self._training
        sizes = t.samples.sizes(self.number)
        for param in t.state.params:
            param.grad = None
        for leaf, size in enumerate(sizes):
            if size:
                batch = t.samples.fetch(self.number, leaf)
                seed_everything(position_seed(t.seed, self.number, leaf, 2))
                self._weight = size / sum(sizes)
                yield batch
        if t.clip_norm is not None:
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(t.state.params, t.clip_norm))
        if t.saves is not None:
            t.saves.wait_copied()
        for part in (*t.state.optimizers, *t.state.schedulers):
            part.step()

    def backward(self, loss: Tensor) -> None:
        """Backward of this microbatch's mean loss, weighted by its share of the batch."""
        (loss * self._weight).backward()  # type: ignore[no-untyped-call]
        self._losses.append((float(loss.detach()), self._weight))

    @property
    def loss(self) -> float:
        """Mean over the batch: microbatches of a short batch count by their samples."""
        return sum(value * weight for value, weight in self._losses) / sum(weight for _, weight in self._losses)
