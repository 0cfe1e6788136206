"""The order of samples that a script gives: `protect(sampler=…)`, asked once for each epoch, alike on every replica.

A function of the epoch's number is called; any other object is iterated, after `set_epoch`, with its generator and the
global ones seeded by (seed, epoch). So it may draw (weights, buckets of lengths) and is still the same for whoever
comes later. Does not know steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from outlast.core.position import position_seed
from outlast.errors import ConfigError, LoopUnrepeatable
from outlast.runtime.training.random_state import random_state_kept, seed_everything

__all__ = ["GivenOrder"]


class GivenOrder:
    """Takes the order from a sampler over `size` samples. Raises ConfigError for one that cannot be asked again, or
    gives no numbers."""

    name = "sampler"

    def __init__(self, sampler: Callable[[int], Sequence[int]] | Iterable[int], size: int, seed: int) -> None:
        _check(sampler)
        self._sampler, self._size, self._seed = sampler, size, seed
        self._epoch, self._found = -1, list[int]()
        self.num = len(self._of(0))
        if not self.num:
            raise ConfigError("the sampler gives no index", remedy="at least one global batch of them")

    def indices(self, epoch: int, start: int, count: int) -> list[int]:
        """At `count` places from `start` on, in this epoch."""
        return self._of(epoch)[start : start + count]

    def _of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            found = self._ask(epoch)
            bad = next((i for i in found if not (isinstance(i, int) and 0 <= i < self._size)), None)
            if bad is not None:
                what = f"a {type(bad).__name__}" if not isinstance(bad, int) else f"{bad}, of {self._size} samples"
                raise ConfigError(
                    f"the sampler gives {what}",
                    remedy="one number of a sample after the other; batches of them are made by outlast",
                )
            if self._epoch >= 0 and len(found) != self.num:
                raise LoopUnrepeatable(
                    f"the sampler gives {len(found)} indices in epoch {epoch}, and {self.num} in epoch 0",
                    did="nothing more was trained",
                    remedy="as many in each epoch",
                )
            self._epoch, self._found = epoch, found
        return self._found

    def _ask(self, epoch: int) -> list[int]:
        sampler, seed = self._sampler, position_seed(self._seed, epoch, 0x5A3F)
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            sampler.generator.manual_seed(seed)  # type: ignore[union-attr]
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
        with random_state_kept():
            seed_everything(seed)
            given: Any = sampler if isinstance(sampler, Iterable) else sampler(epoch)
            return [i if isinstance(i, int) else i.item() if hasattr(i, "item") and not _many(i) else i for i in given]


def _many(value: Any) -> bool:
    return bool(getattr(value, "ndim", 0))


def _check(sampler: Any) -> None:
    kind = type(sampler).__name__
    if isinstance(sampler, Iterable):
        if iter(sampler) is sampler:
            raise ConfigError(
                f"the sampler is a {kind}, which can be read once only",
                remedy="a torch Sampler, a list, or a function of the epoch's number: sampler=lambda epoch: […]",
            )
        processes = getattr(sampler, "num_replicas", 1)
        if processes != 1:
            raise ConfigError(
                f"the sampler is a {kind} for {processes} processes, and outlast shares the samples out",
                remedy="leave it out: protect(shuffle=…, seed=…) does the same, whoever is there",
            )
    elif not callable(sampler):
        raise ConfigError(
            f"the sampler is a {kind}", remedy="a torch Sampler, a list, or a function of the epoch's number"
        )
