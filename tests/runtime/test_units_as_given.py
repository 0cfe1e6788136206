"""What the lines before a step's batches find, as who joins is told it: of small parts a copy, of the rest what stands
for it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import outlast
from outlast.runtime.training._as_given import SMALL_BYTES
from outlast.runtime.training.loop_state import Lived, LoopState
from outlast.runtime.training.own_generators import with_generators
from outlast.runtime.training.state import State


class Part:
    """Registered: a tensor, and how often it was asked for."""

    def __init__(self, size: int) -> None:
        self.values, self.asked = torch.zeros(size), 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"values": self.values}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values.copy_(values["values"])


class Loop:
    """A replica with all that a loop may have registered, and its loop's lines."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.own: dict[str, Any] = {
            "torch": torch.Generator(), "numpy": np.random.default_rng(6), "old": np.random.RandomState(7),
            "python": random.Random(8),
        }  # fmt: skip
        self.small, self.large = Part(3), Part(SMALL_BYTES // 4 + 1)
        parts = with_generators({**self.own, "small": self.small, "large": self.large})
        self.state = LoopState(State(self.model, [self.optimizer], [], parts))

    def draw(self) -> list[float]:
        return [
            float(torch.rand((), generator=self.own["torch"])), float(self.own["numpy"].random()),
            float(self.own["old"].rand()), self.own["python"].gauss(1.0, 2.0),
        ]  # fmt: skip

    def after(self) -> None:
        """What the lines after a step's batches do."""
        self.draw()
        self.small.values.add_(1)
        self.large.values.add_(1)
        self.optimizer.param_groups[0]["lr"] *= 0.5
        with torch.no_grad():
            self.model.bias.fill_(3.0)

    def read(self) -> list[Any]:
        """What those before find."""
        rate, bias = self.optimizer.param_groups[0]["lr"], float(self.model.bias.detach())
        return [*self.draw(), rate, bias, *self.small.values.tolist(), float(self.large.values[0])]

    def before(self) -> list[Any]:
        """Those before a step's batches, which change things as well."""
        found = self.read()
        self.small.values.mul_(10)
        self.optimizer.param_groups[0]["lr"] = 7.0
        return found

    def step(self, number: int) -> tuple[list[Any], Lived]:
        """What the lines before its batches found, and the copy that is fed to who joins."""
        self.state.given(number)
        found = self.before()
        self.state.begin(number)
        lived = self.state.keep(number)
        assert lived is not None
        self.state.committed()
        return found, lived


def test_who_joins_finds_what_all_found() -> None:
    member, joiner = Loop(), Loop()
    member.step(4)
    member.after()
    found, lived = member.step(5)
    joiner.state.load_given(lived, member.state.settings)
    assert joiner.before() == found
    joiner.state.load(lived, whole=True)
    assert [joiner.draw(), joiner.small.values.tolist()] == [member.draw(), member.small.values.tolist()]


def test_settings_that_nobody_changed_before_the_batches_are_the_step_s() -> None:
    member, joiner = Loop(), Loop()
    member.state.given(5)
    member.state.begin(5)
    assert b"momentum" not in member.state.given_of(5)
    lived = member.state.keep(5)
    assert lived is not None
    joiner.optimizer.param_groups[0]["lr"] = 0.3
    joiner.state.load_given(lived, member.state.settings)
    assert joiner.optimizer.param_groups[0]["lr"] == 0.1


def test_of_another_step_nothing_is_told_and_nothing_becomes_of_it() -> None:
    member, joiner = Loop(), Loop()
    member.step(4)
    member.after()
    assert member.state.given_of(5) == b""
    lived, want = member.state.keep(5), Loop().read()
    assert lived is not None
    joiner.state.load_given(lived, member.state.settings)
    assert joiner.read() == want


@pytest.mark.parametrize("steps", [1, 5])
def test_a_large_part_is_looked_at_once(steps: int) -> None:
    member = Loop()
    for number in range(steps):
        member.state.given(number)
    assert (member.small.asked, member.large.asked) == (steps, 1)


@pytest.mark.usefixtures("training_here")
def test_what_was_handed_over_is_handed_on_whole() -> None:
    """The view may end before all have it who lack it, and it may be the last one there is who gave it."""
    model = torch.nn.Linear(2, 1)
    training: Any = outlast.join().protect(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(8, 2), global_batch_size=4, microbatches=2,
        state={"own": torch.Generator()}, checkpoint="off",
    )  # fmt: skip
    for step in training.steps(until=2):
        for batch in step:
            step.backward(model(batch).square().mean())
    engine = training.engine
    engine.loop.keep(1)
    told = engine.told(joined=True)
    engine.loop.keep(None)
    engine.heard(told, joined=True)
    assert engine.told(joined=True) == told
