"""An evaluation: batches of a dataset in fixed order, numbers of each, and their means. Whoever computes which.

Batch number i holds the same samples, and is computed under the same random numbers, on any replica; means are trees
over the batch's number. So the result has the same bits however the batches were shared out. The model is in `eval`
mode meanwhile, without gradients; modes, module buffers and random state are afterwards as before. It does not know
who else computes (`member/shared_evaluation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from outlast.core.position import position_seed
from outlast.errors import ConfigError, StepMisuse
from outlast.runtime.training.metrics import mean_of, number_of
from outlast.runtime.training.random_state import random_state_kept, seed_everything
from outlast.runtime.training.samples import Samples
from outlast.runtime.training.state import State
from outlast.tensors import reshard

__all__ = ["Evaluation", "Rows", "evaluation_inside", "evaluation_of"]

Rows = tuple[tuple[str, float, float], ...]
"""(name, value, weight) of one batch."""


class Evaluation:
    """Evaluates batches, and adds up what they give in their order. `fn(batch)` gives a mapping of names to values, or
    to (value, weight)."""

    def __init__(
        self,
        dataset: Any,
        fn: Callable[[Any], Any],
        *,
        batch_size: Any,
        collate: Callable[[list[Any]], Any],
        model: torch.nn.Module,
        seed: int,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ConfigError(
                f"evaluate: {type(dataset).__name__} does not give samples by number, so replicas cannot share it",
                remedy="a dataset with __len__ and __getitem__; of a loader, loader.dataset; of a stream, list(stream)",
            )
        if not len(dataset):
            raise ConfigError("evaluate: the dataset is empty", remedy="give at least one sample")
        if not callable(fn):
            raise ConfigError(f"evaluate: {fn!r} cannot be called", remedy="a function of one batch")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ConfigError(f"evaluate: batch_size={batch_size!r} is no count", remedy="1 or more samples")
        self._dataset, self._fn, self._size, self._collate = dataset, fn, batch_size, collate
        self._model, self._seed = model, seed
        self.num_batches = -(-len(dataset) // batch_size)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Around everything that is computed here."""
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with random_state_kept(), torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            reshard(self._model)

    def compute(self, number: int) -> Rows:
        """One batch. Raises StepMisuse if the function's answer is no mapping of numbers."""
        seed_everything(position_seed(self._seed, 0, number, 4))
        indices = range(number * self._size, min((number + 1) * self._size, len(self._dataset)))
        told = self._fn(self._collate([self._dataset[index] for index in indices]))
        if not isinstance(told, Mapping) or not all(isinstance(name, str) for name in told):
            raise StepMisuse(
                f"evaluate: the function gave a {type(told).__name__} for a batch, no mapping of names to numbers",
                remedy='return {"loss": loss, "accuracy": (accuracy, num_tokens)}; the weight is the number of samples '
                "where none is given",
            )
        return tuple(sorted(_row(name, value, len(indices)) for name, value in told.items()))

    def result(self, known: Mapping[int, Rows]) -> dict[str, float]:
        """The means, of all batches."""
        table = {(number, name): (value, weight) for number, rows in known.items() for name, value, weight in rows}
        names = sorted({name for _, name in table})
        return {name: mean_of([table.get((i, name)) for i in range(self.num_batches)]) for name in names}

    def here(self) -> dict[str, float]:
        """All of it in this process."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            with self.quiet():
                return self.result({number: self.compute(number) for number in range(self.num_batches)})
        finally:
            with torch.no_grad():
                for buffer, was in buffers:
                    buffer.copy_(was)


def evaluation_inside() -> StepMisuse:
    """The error for an evaluation that is asked for where not all replicas are."""
    return StepMisuse(
        "training.evaluate(…) was called inside the loop over a step's batches",
        remedy="call it before or after `for batch in step`",
    )


def evaluation_of(
    state: State, samples: Samples, dataset: Any, fn: Any, batch_size: Any, collate_fn: Any
) -> Evaluation:
    """As the loop asked for it; what it left out is as in training. Raises ConfigError in a pipeline."""
    if state.stages is not None:
        raise ConfigError(
            "training.evaluate(…) cannot be had with a pipeline yet",
            remedy="outlast ckpt export, and evaluate in a process that has the whole model",
        )
    size = max(1, samples.batch // samples.num_leaves) if batch_size is None else batch_size
    return Evaluation(
        dataset, fn, batch_size=size, collate=collate_fn or samples.collate, model=state.model, seed=samples.seed
    )


def _row(name: str, given: Any, samples: int) -> tuple[str, float, float]:
    value, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, samples)
    return name, number_of(f"metric {name!r}", value), number_of(f"the weight of {name!r}", weight)
