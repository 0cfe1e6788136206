"""The run as its user thinks of it: epochs, places, an end that all take, metrics and what follows a step."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outlast
from outlast.core.protocol import Header, ViewId
from outlast.errors import ConfigError, StepMisuse
from outlast.runtime.host.launcher_words import add_hint
from outlast.runtime.loop.run import Run
from outlast.runtime.training.metrics import Metrics, reduced

SAMPLES, BATCH = 22, 8
PER_EPOCH = 3  # the last one short


@pytest.fixture(params=["protected", "plain"])
def training(request: pytest.FixtureRequest, training_here: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small training, alone; also as the plain loop that it becomes with OUTLAST=off."""
    if request.param == "plain":
        monkeypatch.setenv("OUTLAST", "off")
    return protect()


def protect(**more: Any) -> Any:
    torch.manual_seed(4)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    rows = list(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)))
    given: dict[str, Any] = {"global_batch_size": BATCH, "microbatches": 4, "seed": 2} | more
    made = outlast.join().protect(model, optimizer, rows, **given)
    made.loss_of = lambda batch: model(batch).pow(2).mean()
    made.model = model
    return made


def take(training: Any, step: Any) -> None:
    for batch in step:
        step.backward(training.loss_of(batch))


def test_epochs_give_each_step_once_and_end_where_steps_would(training: Any) -> None:
    seen: list[tuple[int, int, int]] = []
    ends: list[int] = []
    for epoch in training.epochs(3):
        assert len(epoch) == PER_EPOCH
        for step in epoch:
            take(training, step)
            seen.append((epoch.number, step.epoch, step.number))
        ends.append(epoch.number)
        assert list(epoch) == []  # it is over
    assert seen == [(n // PER_EPOCH, n // PER_EPOCH, n) for n in range(9)]
    assert ends == [0, 1, 2]
    assert training.steps_per_epoch == PER_EPOCH


@pytest.mark.usefixtures("training_here")
def test_epochs_and_steps_are_the_same_training() -> None:
    by_steps, by_epochs = protect(), protect()
    for step in by_steps.steps(until=6):
        take(by_steps, step)
    for epoch in by_epochs.epochs(2):
        for step in epoch:
            take(by_epochs, step)
    assert by_epochs.fingerprint() == by_steps.fingerprint()


def test_an_epoch_that_is_left_early_is_told_how_to_end(training: Any) -> None:
    epochs = training.epochs(2)
    for step in next(epochs):
        take(training, step)
        break
    with pytest.raises(StepMisuse, match="left epoch 0 after 1 of its 3 steps") as caught:
        next(epochs)
    assert "training.stop()" in caught.value.remedy


def test_a_break_out_of_both_loops_is_seen_at_once(training: Any) -> None:
    """The variable `epoch` still stands there: it must not keep the steps alive."""
    over: list[str] = []
    watch = training.watch if hasattr(training, "watch") else training._watch
    was = watch.over
    watch.over = lambda: (over.append("over"), was())
    for epoch in training.epochs(2):
        for step in epoch:
            take(training, step)
            break
        break
    assert over == ["over"]
    assert epoch.number == 0


@pytest.mark.parametrize("inside", [False, True])
def test_stop_ends_the_loop_after_a_whole_step(training: Any, inside: bool) -> None:
    done = []
    for step in training.steps(until=9):
        for batch in step:
            step.backward(training.loss_of(batch))
            if inside and step.number == 4:
                training.stop("good enough")
        if not inside and step.number == 3:
            training.stop("good enough")
        done.append(step.number)
    assert done == [0, 1, 2, 3, 4]
    assert training.stopped == "good enough"


def test_stop_ends_epochs_too(training: Any) -> None:
    done = []
    for epoch in training.epochs(3):
        for step in epoch:
            take(training, step)
            done.append(step.number)
            if step.number == 3:
                training.stop()
    assert done == [0, 1, 2, 3, 4]


def test_a_metric_is_averaged_by_samples_over_the_whole_batch(training: Any) -> None:
    sizes = {0: [2, 2, 2, 2], 2: [2, 2, 1, 1]}
    for step in training.steps(until=3):
        for number, batch in enumerate(step):
            step.backward(training.loss_of(batch))
            step.metric("place", number)
            step.metric("tokens", torch.tensor(float(number)), weight=number)
        if step.number in sizes:
            weights = sizes[step.number]
            want = sum(n * w for n, w in enumerate(weights)) / sum(weights)
            assert step.metrics == {"place": want, "tokens": 14 / 6}


def test_a_metric_that_is_none_is_told(training: Any) -> None:
    step = next(iter(training.steps(until=1)))
    batches = iter(step)
    step.backward(training.loss_of(next(batches)))
    step.metric("accuracy", 0.5)
    for wrong, told in (((("accuracy"), 1.0), "called twice"), (("f1", torch.zeros(3)), r"shape \(3,\)"),
                        (("f1", "good"), "is a str"), (("", 1.0), "name is ''"), (("f1", 1.0, -1), "weight"),
                        (("f1", 1.0, math.inf), "weight")):  # fmt: skip
        with pytest.raises(StepMisuse, match=told):
            step.metric(*wrong)
    with pytest.raises(StepMisuse, match="not committed"):
        _ = step.metrics


@pytest.mark.usefixtures("training_here")
def test_a_metric_outside_of_the_batches_is_told() -> None:
    training = protect()
    for step in training.steps(until=1):
        take(training, step)
        with pytest.raises(StepMisuse, match="outside of the loop over the step's batches"):
            step.metric("late", 1.0)


def test_a_metric_has_the_same_bits_whoever_computed_what() -> None:
    """Numbers whose sum depends on the order: 1e16 and ones."""
    values = [1e16, 1.0, -1e16, 1.0, 1.0, 1e-3, 7.0]

    def header(name: str, leaves: list[int]) -> Header:
        kept = Metrics()
        for leaf in leaves:
            kept.put(leaf, "x", values[leaf], 1 + leaf % 2)
        return Header(member=name, step=0, view=ViewId(1, 1), heard=0, metrics=kept.told(leaves))

    shares = [[[0, 1, 2, 3, 4, 5, 6]], [[0, 1, 2], [3, 4, 5, 6]], [[6, 0], [5], [1, 2], [4, 3]]]
    found = {reduced([header(f"r{i}.1", part) for i, part in enumerate(parts)], 7) for parts in shares}
    assert len(found) == 1


def test_a_metric_of_some_microbatches_counts_where_it_was_given() -> None:
    kept = Metrics()
    kept.put(2, "rare", 5.0, 3)
    kept.put(1, "none", 5.0, 0)
    kept.put(3, "again", 1.0, 1)
    kept.begin(3)  # computed once more
    kept.put(3, "again", 2.0, 1)
    [none, again, rare] = sorted(
        reduced([Header(member="r0.1", step=0, view=ViewId(1, 1), heard=0, metrics=kept.told(range(4)))], 4),
        key=lambda row: row[0] != "none",
    )
    assert (again, rare) == (("again", 2.0), ("rare", 5.0))
    assert none[0] == "none"
    assert math.isnan(none[1])


def test_what_follows_a_step_is_called_with_each(training: Any) -> None:
    calls: list[torch.Tensor] = []
    training.after_step(lambda: calls.append(training.model.weight.detach().clone()))
    for step in training.steps(until=3):
        before = len(calls)
        take(training, step)
        assert len(calls) == before + 1
        assert torch.equal(calls[-1], training.model.weight)
    with pytest.raises(StepMisuse, match="when the loop had begun"):
        training.after_step(lambda: None)


@pytest.mark.usefixtures("training_here")
def test_an_average_that_nobody_registered_is_refused_by_name() -> None:
    torch.manual_seed(0)
    average = AveragedModel(nn.Linear(6, 1), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    unregistered, registered = protect(), protect(state={"average": average})
    follows: list[Any] = [
        lambda training: lambda: average.update_parameters(training.model),
        lambda training: functools.partial(average.update_parameters, training.model),
    ]
    for follow in follows:
        with pytest.raises(ConfigError, match="AveragedModel that is not registered") as caught:
            unregistered.after_step(follow(unregistered))
        assert "protect(..., state={" in caught.value.remedy
        registered.after_step(follow(registered))
    with pytest.raises(ConfigError, match="cannot be called"):
        unregistered.after_step(3)


def test_where_this_process_is(training: Any) -> None:
    run = outlast.join()
    assert (run.rank, run.size) == (0, 1)
    assert run.host
    assert run.device.type in ("cpu", "cuda")


@pytest.mark.parametrize("what", ["is_writer", "rank", "size"])
def test_a_fleet_s_places_are_not_known_before_its_first_step(what: str) -> None:
    """Each would have been told that it writes: as many logs, and runs of W&B, as replicas."""
    config = SimpleNamespace(replicas=2, spares=0)
    env: Any = SimpleNamespace(me="r1.1", place=0, coordinator=("127.0.0.1", 1), config=config, progress=None)
    with pytest.raises(StepMisuse, match=f"run.{what} is not known before the first step") as caught:
        getattr(Run(env), what)
    assert "read it in the loop or after it" in caught.value.remedy


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("RANK"), True),
        (KeyError("LOCAL_RANK"), True),
        (ValueError("Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, "
                    "but not set"), True),
        (ValueError("Default process group has not been initialized, please make sure to call init_process_group."),
         True),
        (KeyError("rank"), False),
        (RuntimeError("out of memory"), False),
    ],
)  # fmt: skip
def test_who_asks_for_another_launcher_s_variables_is_told_what_there_is(error: Exception, told: bool) -> None:
    add_hint(error)
    add_hint(error)
    assert [("run.device" in note) for note in getattr(error, "__notes__", [])] == [True] * told


class Keeper:
    """A trainer with an average of its own."""

    def __init__(self, average: Any, model: nn.Module) -> None:
        self.average, self.model = average, model

    def update(self) -> None:
        self.average.update_parameters(self.model)


@pytest.mark.usefixtures("training_here")
def test_an_average_is_found_behind_a_trainer_and_known_by_its_parts() -> None:
    average = AveragedModel(nn.Linear(6, 1), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    without, with_it = protect(), protect(state={"average": average})
    keeper, inner = Keeper(average, without.model), average.module
    for follow in (keeper.update, lambda: keeper.average.update_parameters(keeper.model)):
        with pytest.raises(ConfigError, match="uses average, a AveragedModel that is not registered"):
            without.after_step(follow)
    keeper.model = with_it.model
    with_it.after_step(keeper.update)
    with_it.after_step(lambda: inner.weight.detach().clamp_(-1, 1))


def test_a_metric_outside_of_the_inner_loop_is_refused(training: Any) -> None:
    step = next(iter(training.steps(until=1)))
    with pytest.raises(StepMisuse, match="outside of the loop over the step's batches"):
        step.metric("early", 1.0)
    take(training, step)
    with pytest.raises(StepMisuse, match="outside of the loop over the step's batches"):
        step.metric("late", 1.0)


def test_an_evaluation_at_an_epoch_s_start_is_like_any_other(training: Any) -> None:
    data, numbers = [torch.zeros(6)], lambda batch: {"n": 1.0}
    for epoch in training.epochs(2):
        assert training.evaluate(data, numbers) == {"n": 1.0}
        for step in epoch:
            assert training.evaluate(data, numbers) == {"n": 1.0}
            take(training, step)
        assert training.evaluate(data, numbers) == {"n": 1.0}
    assert training.evaluate(data, numbers) == {"n": 1.0}


def test_an_evaluation_outside_of_the_loop_leaves_buffers_as_they_were(training: Any) -> None:
    count = torch.zeros(1)
    training.model.register_buffer("count", count)
    assert training.evaluate([torch.zeros(6)], lambda batch: {"n": count.add_(1)}) == {"n": 1.0}
    assert count.item() == 0.0
