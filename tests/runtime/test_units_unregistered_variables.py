"""What a variable of a loop holds decides whether it is told of: values, not models; registered by nobody."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outlast


class Counter:
    def __init__(self) -> None:
        self.n = 1

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        vars(self).update(values)


class Held:
    def __init__(self) -> None:
        self.value = torch.ones(())

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.value.copy_(values["value"])


@pytest.fixture(autouse=True)
def _here(training_here: None) -> Iterator[None]:
    return


@pytest.fixture(params=["protected", "off"])
def training(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`training(model, **given)`."""
    if request.param == "off":
        monkeypatch.setenv("OUTLAST", "off")

    def made(model: nn.Module, **given: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return outlast.join().protect(
            model, optimizer, list(torch.ones(8, 3)), global_batch_size=4, microbatches=2, **given
        )

    return made


def test_what_is_carried_is_told_of_by_what_it_holds(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A number and an output are; a model, an open file and a function are carried too, and are no state."""
    model, other, n, prev, weigh, log = nn.Linear(3, 1), nn.Linear(3, 1), 0, None, abs, iter(range(9))
    for step in training(model).steps(until=3):
        for batch in step:
            out = model(batch) + 0 * other(batch).detach()
            step.backward((out - (0.0 if prev is None else prev)).mean() * weigh(n) * (1 if log else 2))
            prev = out.detach()
        n = n + 1
        other, weigh, log = nn.Linear(3, 1), (lambda x: x), iter(range(step.number, 9))
    said = capsys.readouterr().err
    assert said.count("is carried from step to step") == 1
    assert "`prev`" in said
    assert "`n` (line" in said or "`n` is" in said
    assert not {"`other`", "`weigh`", "`log`", "`model`"} & {word for word in said.split() if word.startswith("`")}


def test_what_belongs_to_something_registered_is_not(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, counter, held = nn.Linear(3, 1), Counter(), Held()
    rng, center = torch.Generator().manual_seed(3), held.value
    mine = training(model, state={"counter": counter, "rng": rng, "held": held})
    for step in mine.steps(until=3):
        weight = torch.rand((), generator=rng) * counter.n
        for batch in step:
            step.backward((model(batch) - center).mean() * weight)
        counter.n += 1
        center.mul_(0.9).add_(0.1)
    assert capsys.readouterr().err == ""


def test_what_is_not_registered_of_these_is(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, counter, held = nn.Linear(3, 1), Counter(), Held()
    center = held.value
    for step in training(model).steps(until=3):
        for batch in step:
            step.backward((model(batch) - center).mean() * counter.n)
        counter.n += 1
        center.mul_(0.9).add_(0.1)
    said = capsys.readouterr().err
    assert "`center`" in said
    assert "`counter.n`" in said


def test_a_loop_in_another_function_than_the_steps_is_found(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind a bar, which has a loop of its own and trains nothing."""

    def bar(steps: Any) -> Iterator[Any]:
        for item in steps:  # noqa: UP028 - as bars do
            yield item

    model, n = nn.Linear(3, 1), 0
    for step in bar(training(model).steps(until=3)):
        for batch in step:
            step.backward(model(batch).mean() * (1 + n))
        n = n + 1
    assert "`n` is carried" in capsys.readouterr().err


def test_a_source_that_cannot_be_read_says_nothing(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 1)
    loop = "n = 0\nfor step in steps:\n    for b in step:\n        step.backward(f(b) * (1 + n))\n    n = n + 1\n"
    exec(loop, {"steps": training(model).steps(until=3), "f": lambda b: model(b).mean()})
    assert capsys.readouterr().err == ""


def test_nothing_is_kept_alive_for_having_been_looked_at(training: Any) -> None:
    """Up to Python 3.12 a frame that was asked for its variables keeps a copy of all of them."""
    model, n, steps = nn.Linear(3, 1), 0, 0
    batches: list[weakref.ref[Tensor]] = []
    for step in training(model).steps(until=3):
        for batch in step:
            batches.append(weakref.ref(batch))
            step.backward(model(batch).mean() * (1 + n))
        n, steps = n + 1, steps + 1
        gc.collect()
    assert n == 3
    assert [found() for found in batches[:-1]] == [None] * (len(batches) - 1)
