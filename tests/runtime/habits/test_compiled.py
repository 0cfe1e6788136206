"""A model that is compiled anew in the middle of training, as evaluation, another size of batch or a joiner has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outlast
from outlast.errors import StepMisuse


@pytest.fixture(autouse=True)
def _here(training_here: None) -> None:
    torch._dynamo.reset()


def train(compiled: bool, inside: Callable[[nn.Module], object] = lambda model: None) -> str:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    used: Any = torch.compile(model, backend="aot_eager") if compiled else model
    data = list(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)))
    training = outlast.join().protect(model, optimizer, data, global_batch_size=8, microbatches=4)
    for step in training.steps(until=4):
        for batch in step:
            step.backward(used(batch).pow(2).mean())
            inside(model)
        model.eval()
        with torch.no_grad():
            used(torch.ones(3, 6))
        model.train()
    return str(training.fingerprint())


@pytest.mark.parametrize("plain", [False, True], ids=["protected", "off"])
def test_it_may_be_compiled_between_backwards(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a step ended with `the loop used .grad of a protected parameter`, which it had not."""
    if plain:
        monkeypatch.setenv("OUTLAST", "off")
    assert train(compiled=True) == train(compiled=False)


def test_what_a_compiled_function_calls_uncompiled_is_still_told() -> None:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def look(model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    clip = torch.compile(look, backend="eager")
    with pytest.raises(StepMisuse, match="clip_grad_norm_ used"):
        train(compiled=True, inside=clip)
