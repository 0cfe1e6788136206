"""An average of the weights that nobody was told of is found, whoever wrote it; what is none is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from outlast.errors import LoopUnrepeatable
from outlast.runtime.checks.unseen_averages import UnseenAverages
from outlast.runtime.training.loop_state import LoopState
from outlast.runtime.training.state import State

After = Callable[[int], None]


class Here:
    """A small training whose weights somebody watches."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, optimizer: Any = torch.optim.AdamW, lr: float = 1e-3
    ) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 24))
        self.optimizer = optimizer(self.model.parameters(), lr=lr)
        self.state = State(self.model, [self.optimizer], [], {})
        self.watch: UnseenAverages | None = None

    def found(self, after: After, steps: int = 12) -> int | None:
        """After which step an average was named; None: never."""
        self.watch = watch = UnseenAverages(self.state, lambda: True, lambda: True, lambda: 0)
        try:
            for step in range(steps):
                x = torch.randn(16, 8)
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                try:
                    watch.applied()
                except LoopUnrepeatable:
                    return step
                with torch.no_grad():
                    after(step)
            return None
        finally:
            watch.over()

    @property
    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]


def in_place(here: Here, decay: float = 0.9, since: int = 0) -> After:
    held = [param.clone() for param in here.params]

    def after(step: int) -> None:
        for mine, param in zip(held, here.params, strict=True):
            if step >= since:
                mine.mul_(decay).add_(param, alpha=1 - decay)

    return after


def anew(here: Here) -> After:
    held = {"all": [param.clone() for param in here.params]}

    def after(step: int) -> None:
        held["all"] = [0.95 * mine + 0.05 * param for mine, param in zip(held["all"], here.params, strict=True)]

    return after


def equally(here: Here, since: int = 0) -> After:
    held: list[Tensor] = []

    def after(step: int) -> None:
        if step == since:
            held.extend(param.clone() for param in here.params)
        for mine, param in zip(held, here.params, strict=False):
            mine += (param - mine) / (step - since + 1)

    return after


def second_model(here: Here) -> After:
    second = copy.deepcopy(here.model)

    def after(step: int) -> None:
        for mine, param in zip(second.parameters(), here.model.parameters(), strict=True):
            mine.data.lerp_(param.data, 0.01)

    return after


def in_another_type(here: Here) -> After:
    held = [param.double() for param in here.params]

    def after(step: int) -> None:
        for mine, param in zip(held, here.params, strict=True):
            mine.lerp_(param.double(), 0.001)

    return after


def made_late(here: Here) -> After:
    held: list[AveragedModel] = []

    def after(step: int) -> None:
        if step == 5:
            held.append(AveragedModel(here.model))
        if held:
            held[0].update_parameters(here.model)

    return after


@pytest.mark.parametrize(
    ("make", "latest"),
    [
        (in_place, 2),
        (lambda here: in_place(here, 0.999), 2),
        (lambda here: in_place(here, 0.9999), 11),
        (lambda here: in_place(here, since=5), 7),  # begins in step 5: it is known to have moved after step 6
        (anew, 2),
        (equally, 4),
        (lambda here: equally(here, since=5), 8),
        (second_model, 2),
        (in_another_type, 2),
        (made_late, 6),
    ],
)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_average_is_named(make: Callable[[Here], After], latest: int, optimizer: Any) -> None:
    here = Here(optimizer=optimizer, lr=1e-3 if optimizer is torch.optim.AdamW else 0.1)
    step = here.found(make(here))
    assert step is not None
    assert step <= latest


def copies(here: Here) -> After:
    """Of now, of the step before and of two steps before, in place and anew; of some steps only."""
    last = [[param.clone() for param in here.params] for _ in range(3)]
    best = [param.clone() for param in here.params]

    def after(step: int) -> None:
        for mine, param in zip(last[2], here.params, strict=True):
            mine.copy_(param)
        last[:] = [last[2], last[0], last[1]]
        if step % 3 == 0:
            for mine, param in zip(best, here.params, strict=True):
                mine.copy_(param)
        last[1] = [param.clone() for param in last[1]]

    return after


def sums(here: Here) -> After:
    """How far the weights have come, their sum, a random walk, and halves of them."""
    held = [[torch.zeros_like(param) for param in here.params] for _ in range(4)]
    start = [param.clone() for param in here.params]

    def after(step: int) -> None:
        for far, total, walk, half, param, was in zip(*held, here.params, start, strict=True):
            far.copy_((param - was).abs())
            total.add_(param)
            walk.add_(torch.randn_like(walk), alpha=1e-3)
            half.copy_(param / 2)

    return after


def another(here: Here) -> After:
    """A second model with its own optimizer."""
    second = copy.deepcopy(here.model)
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-3)

    def after(step: int) -> None:
        with torch.enable_grad():
            second(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return after


@pytest.mark.parametrize("make", [copies, sums, another])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_what_is_no_average_is_left_alone(make: Callable[[Here], After], optimizer: Any) -> None:
    here = Here(optimizer=optimizer)
    assert here.found(make(here), steps=20) is None


def test_copies_of_weights_on_a_straight_line_are_no_averages() -> None:
    """A loss that is linear in them: each is half-way between two others."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    slope = torch.randn(40, 40)
    watch = UnseenAverages(
        State(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [], {}), lambda: True, lambda: True, lambda: 0
    )
    held = [model.weight.detach().clone() for _ in range(3)]
    with torch.no_grad():
        for step in range(12):
            model.weight.sub_(slope, alpha=0.1)
            watch.applied()
            if step % 2 == 0:
                held[0].copy_(held[1])
                held[1].copy_(held[2])
                held[2].copy_(model.weight)
    watch.over()


class Registered:
    """An average that gives what it holds in a form of its own."""

    def __init__(self, held: list[Tensor]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Tensor]:
        return {"flat": torch.cat([mine.flatten() for mine in self.held])}

    def load_state_dict(self, values: dict[str, Tensor]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("flat", [False, True])
def test_a_registered_one_is_left_alone(flat: bool) -> None:
    here = Here()
    second = copy.deepcopy(here.model)
    held = [param.data for param in second.parameters()]
    here.state.extra["ema"] = Registered(held) if flat else second

    def after(step: int) -> None:
        for mine, param in zip(held, here.params, strict=True):
            mine.lerp_(param, 0.05)

    assert here.found(after) is None


def test_the_copy_that_each_step_begins_with_is_no_average_either() -> None:
    """Of what is registered and small, for who joins: it moves as the average itself."""
    here = Here()
    here.state.extra["ema"] = second = copy.deepcopy(here.model)
    loop = LoopState(here.state)

    def after(step: int) -> None:
        for mine, param in zip(second.parameters(), here.params, strict=True):
            mine.lerp_(param, 0.05)
        loop.given(step + 1)

    assert here.found(after) is None


def test_a_data_set_of_small_rows_hides_nothing() -> None:
    """Of fewer elements than tell something, and more of them than are looked at."""
    here = Here()
    here.model.append(nn.Linear(24, 4))
    here.optimizer.add_param_group({"params": list(here.model[4].parameters())})
    here.state = State(here.model, [here.optimizer], [], {})
    rows = [torch.zeros(4) for _ in range(5000)]
    assert here.found(in_place(here)) is not None
    assert len(rows) == 5000


def test_a_look_leaves_no_tensors_behind() -> None:
    """They would be looked at the next time, and be more each time."""
    import gc

    here = Here()
    before = sum(type(held) is Tensor for held in gc.get_objects())
    here.found(lambda step: None, steps=1)
    assert here.watch is not None
    assert sum(type(held) is Tensor for held in gc.get_objects()) < before + 30  # the optimizer's


def test_what_it_looks_at_it_does_not_keep() -> None:
    import gc
    import weakref

    here = Here()
    held = [param.clone() for param in here.params]
    known = weakref.ref(held[0])
    here.found(lambda step: None, steps=3)
    held.clear()
    gc.collect()
    assert known() is None


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
