"""The same MLP, data and microbatches for every system under test. torch only: peers' environments have no outlast.

A step is G microbatches of B random samples each; a replica computes its range of them, one backward each.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MODELS", "Shape", "build", "loss_of", "microbatch", "samples", "share"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """An MLP `inputs → width → … → width → outputs` and the samples in one of its microbatches."""

    inputs: int
    width: int
    num_hidden: int
    outputs: int
    samples: int


MODELS = {
    "none": Shape(inputs=1, width=1, num_hidden=1, outputs=2, samples=1),
    "0.15M": Shape(inputs=64, width=256, num_hidden=3, outputs=10, samples=16),
    "3.2M": Shape(inputs=256, width=980, num_hidden=4, outputs=64, samples=32),
    "10M": Shape(inputs=256, width=1760, num_hidden=4, outputs=64, samples=32),
}
"""By number of parameters: next to none, 0.15 million, 3.2 million, 10 million (the tests hold them to it)."""


def build(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its AdamW, initialised from `seed`."""
    torch.manual_seed(seed)
    shape = MODELS[name]
    widths = [shape.inputs, *([shape.width] * shape.num_hidden)]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(shape.width, shape.outputs))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def samples(name: str, num: int = 4096) -> TensorDataset:
    """A map-style dataset of (inputs of float32, int64 label), the same in every process."""
    shape = MODELS[name]
    source = torch.Generator().manual_seed(0)
    images = torch.randn(num, shape.inputs, generator=source)
    return TensorDataset(images, torch.randint(shape.outputs, (num,), generator=source))


def microbatch(dataset: TensorDataset, size: int, number: int) -> list[Tensor]:
    """Samples `number * size …`, wrapped around, collated as torch's DataLoader does."""
    items = [dataset[(number * size + i) % len(dataset)] for i in range(size)]
    collated: list[Tensor] = default_collate(items)
    return collated


def loss_of(model: nn.Module, data: Sequence[Tensor]) -> Tensor:
    images, labels = data
    return nn.functional.cross_entropy(model(images), labels)


def share(rank: int, world: int, microbatches: int) -> range:
    """A replica's contiguous range of a step's microbatches; sizes differ by at most one."""
    return range(rank * microbatches // world, (rank + 1) * microbatches // world)
