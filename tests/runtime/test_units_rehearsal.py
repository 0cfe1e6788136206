"""An optimizer that keeps something to itself is found where memory has no room for a copy, too; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outlast.errors import EnvironmentFault, LoopUnrepeatable
from outlast.runtime.checks import rehearsal
from outlast.runtime.checks._laid_aside import LaidAside, shared, tensors_in
from outlast.runtime.training.state import State


class Counting(torch.optim.SGD):
    """Its count is in no state_dict, and it leaves no gradient behind."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] / self.count)
                param.grad.zero_()
                param.grad = None


class Listing(torch.optim.SGD):
    """Its state is a list of tensors; all of it is where it belongs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                held = self.state[param].setdefault("seen", [torch.zeros_like(param), 0])
                held[0].add_(param.grad)
                held[1] += 1
                param.sub_(held[0], alpha=group["lr"] / held[1])


def adam(params: Any) -> torch.optim.Optimizer:
    """Settings of one group are tensors."""
    rows = list(params)
    groups = [{"params": rows[:1], "lr": torch.tensor(0.01)}, {"params": rows[1:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02, amsgrad=True)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": adam,
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "listing": lambda params: Listing(params, lr=0.1),
}


def trained(make: Make, folder: Path | None, steps: int = 4) -> tuple[list[Tensor], list[bool]]:
    """Parameters and state after some steps, and in which of them somebody rehearsed; None: nobody does."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3, dtype=torch.float32))
    optimizer = make(model.parameters())
    looks = rehearsal.Rehearsal(State(model, [optimizer], [], {}), lambda: True, folder)
    looked = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(9, 6)).square().mean().backward()
        if folder is not None:
            looks.replay()
            looked.append(bool(looks._expected))
        optimizer.step()
        if folder is not None:
            looks.compare(step + 1)
            if not looks.applied():
                folder = None
    held = [list(row.values()) for row in optimizer.state.values()]
    return [tensor.detach().clone() for tensor in tensors_in([list(model.parameters()), held])], looked


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has no room for a copy."""
    monkeypatch.setattr(rehearsal, "_SHARE", 0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_room_for_a_copy_it_is_rehearsed_in_place_and_changes_nothing(
    name: str, tmp_path: Path, no_room: None
) -> None:
    plain, _ = trained(OPTIMIZERS[name], None)
    looked_at, looked = trained(OPTIMIZERS[name], tmp_path)
    assert looked == [False, True, True]
    assert len(plain) == len(looked_at)
    assert all(torch.equal(a, b) for a, b in zip(plain, looked_at, strict=True))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("room", [True, False])
def test_what_an_optimizer_counts_for_itself_is_named_with_a_copy_and_without(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not room:
        monkeypatch.setattr(rehearsal, "_SHARE", 0.0)
    with pytest.raises(
        LoopUnrepeatable, match=r"0\.weight after step 2 is another one where the optimizer begins with"
    ):
        trained(Counting, tmp_path)


def test_where_neither_memory_nor_a_disk_has_room_it_is_left_out(no_room: None) -> None:
    """A file in /dev/shm would be memory."""
    plain, _ = trained(adam, None)
    left_out, looked = trained(adam, Path("/dev/shm"))
    assert not any(looked)
    assert all(torch.equal(a, b) for a, b in zip(plain, left_out, strict=True))


def test_what_is_laid_aside_comes_back_byte_for_byte(tmp_path: Path) -> None:
    rows = [
        torch.randn(3, 5).t(),
        torch.tensor(float("nan")),
        torch.randn(4).to(torch.bfloat16),
        torch.empty(0),
        torch.arange(3) > 1,
    ]
    before = [row.clone() for row in rows]
    with LaidAside(rows, 0.0, tmp_path):
        for row in rows:
            row.zero_()
    raw = [(row.contiguous().reshape(-1).view(torch.uint8), was) for row, was in zip(rows, before, strict=True)]
    assert all(torch.equal(now, was.contiguous().reshape(-1).view(torch.uint8)) for now, was in raw)


def test_containers_are_ones_own_and_tensors_are_not() -> None:
    value = {"a": [torch.ones(2), 3], "b": (torch.zeros(1), {"c": "d"})}
    taken = shared(value)
    assert [id(tensor) for tensor in tensors_in(taken)] == [id(tensor) for tensor in tensors_in(value)]
    taken["a"][1] = 4
    taken["b"][1]["c"] = "e"
    assert value["a"][1] == 3
    assert value["b"][1] == {"c": "d"}


def test_what_cannot_be_read_again_is_told_with_what_to_do(tmp_path: Path) -> None:
    rows = [torch.randn(5)]
    aside = LaidAside(rows, 0.0, tmp_path)
    assert aside._file is not None
    aside._file.truncate(8)
    with pytest.raises(EnvironmentFault, match="cannot be read again: it ends too early"), aside:
        rows[0].zero_()
