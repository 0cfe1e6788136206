"""The guards' parts alone: who made a number that is not finite, collapse at a bounded cost, left-out data."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from outlast.core.policy import Guards
from outlast.runtime.checks._activations import Activations
from outlast.runtime.checks._nonfinite_operation import OperationWatch
from outlast.runtime.checks._state_rotation import Agreement
from outlast.runtime.checks.inspection import bad_samples
from outlast.runtime.training.samples import Samples
from outlast.runtime.training.state import State


class Net(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last_step = last

    def forward(self, x: Tensor) -> Tensor:
        scores = self.first(x).masked_fill(torch.eye(4, dtype=torch.bool), float("-inf")).softmax(-1)
        return self.last_step(scores)


@pytest.mark.parametrize(
    ("last", "operation", "line"),
    [
        (lambda s: torch.log(s * 0.0), "aten.log", True),
        (lambda s: torch.sqrt(s * 0.0), "SqrtBackward0 (backward)", False),
        (lambda s: s * 2.0, "", False),
    ],
)
def test_the_first_operation_is_named_and_a_mask_is_not(
    last: Callable[[Tensor], Tensor], operation: str, line: bool
) -> None:
    torch.manual_seed(0)
    model = Net(last)
    watch = OperationWatch.over(model)
    with watch:
        model(torch.randn(4, 4)).sum().backward()
    assert watch.operation.startswith(operation)
    assert bool(watch.operation) == bool(operation)
    assert watch.where.startswith("test_units_guards.py:") == line
    assert watch.module == ("Net" if operation else "")
    assert not model.first._forward_hooks


def test_memory_that_is_only_made_or_viewed_is_not_named() -> None:
    """Torch fills what is made with NaN here; anywhere else it holds whatever lay there before."""
    torch.use_deterministic_algorithms(True)
    watch = OperationWatch.over(nn.Linear(1, 1))
    with watch:
        made = torch.ones(2).new_empty(3)
        torch.empty_like(torch.ones(3)).reshape(3, 1).t()
    torch.use_deterministic_algorithms(False)
    assert made.isnan().all()
    assert watch.operation == ""
    with watch:
        torch.log(torch.zeros(3)) - torch.log(torch.zeros(3))
    assert watch.operation.startswith("aten.log")


def test_samples_are_named_by_their_values_else_by_rows_else_all() -> None:
    batch = [torch.tensor([[1.0], [float("nan")], [2.0]]), torch.arange(3)]
    assert bad_samples(batch, (), [7, 8, 9]) == ([8], True)
    fine = [torch.ones(3, 1)]
    assert bad_samples(fine, [(4, 6), (5, 6)], [7, 8, 9]) == ([9], False)
    assert bad_samples(fine, [(4, 7)], [7, 8, 9]) == ([7, 8, 9], False)


def test_dead_units_are_found_once_and_looking_stays_below_its_ceiling() -> None:
    """Each look takes one second by this clock, so with a ceiling of a tenth nothing is looked at for ten."""
    ticks = itertools.count()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
    guard = Activations(model, Guards(collapse="warn", collapse_share=0.1), clock=lambda: float(next(ticks)))
    torch.manual_seed(0)
    found = []
    for step in range(400):
        if step == 300:
            with torch.no_grad():
                model[0].bias.fill_(-100.0)
        guard.begin()
        model(torch.randn(64, 8))
        guard.end()
        found += guard.take()
    assert [name for name, _ in found] == ["1"]
    assert "dead" in found[0][1]
    assert 4 < guard.num_looks < 60
    assert guard.spent_s <= 0.1 * next(ticks) + 2 * len(list(model))
    assert not model[1]._forward_hooks


def test_left_out_samples_are_in_no_later_microbatch_and_the_others_stay() -> None:
    samples = Samples(list(torch.zeros(24, 1)), global_batch_size=8, microbatches=4, seed=1)
    before = [samples.indices(step, leaf) for step in range(6) for leaf in range(4)]
    samples.leave_out([5, 6])
    after = [samples.indices(step, leaf) for step in range(6) for leaf in range(4)]
    assert after == [[index for index in rows if index not in (5, 6)] for rows in before]
    assert samples.sizes(0) == [len(rows) for rows in after[:4]]
    assert sum(sum(samples.sizes(step)) for step in range(3)) == 22
    samples.leave_out([])
    assert [samples.indices(step, leaf) for step in range(6) for leaf in range(4)] == before


@pytest.mark.parametrize("num_parts", [1, 3, 16])
def test_every_bit_of_parameters_and_moments_is_in_some_part(num_parts: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    agreement = Agreement(State(model, [optimizer], [], {}), num_parts)
    before = [agreement.fingerprint(step) for step in range(num_parts)]
    assert [part for part, _ in before] == list(range(num_parts))
    moment = optimizer.state[model[0].weight]["exp_avg_sq"]
    for tensor, at in ((model[0].weight.data, 149_999), (model[1].bias.data, 0), (moment, 70_000)):
        old = tensor.view(-1)[at].clone()
        tensor.view(-1)[at] += 1.0
        changed = [step for step in range(num_parts) if agreement.fingerprint(step) != before[step]]
        assert len(changed) == 1
        tensor.view(-1)[at] = old
    assert [agreement.fingerprint(step) for step in range(num_parts)] == before
