"""A gradient that comes in several parts would be lost in part: it is refused, with the remedy."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import outlast
from outlast.errors import StepMisuse


class Twice(torch.nn.Module):
    """One layer used in two checkpointed segments."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def train(reentrant: bool) -> float:
    torch.manual_seed(0)
    model = Twice(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = outlast.join().protect(model, optimizer, torch.randn(16, 4), global_batch_size=8, microbatches=2)
    for step in training.steps(until=2):
        for x in step:
            step.backward(model(x).square().mean())
    return step.loss


def test_reentrant_checkpointing_is_refused_and_the_other_works() -> None:
    with pytest.raises(StepMisuse, match="several parts") as refused:
        train(reentrant=True)
    assert "use_reentrant=False" in str(refused.value)
    assert train(reentrant=False) > 0
