"""A fleet of one in this process: numerics against a plain loop, and misuse of a step with its remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.errors import ConfigError, StepMisuse
from outlast.runtime.loop._ending import exit_by_code
from outlast.runtime.loop._iterators import how_left

pytestmark = pytest.mark.usefixtures("training_here")


def rows(size: int = 22) -> list[torch.Tensor]:
    return list(torch.randn(size, 6, generator=torch.Generator().manual_seed(1)))


def build(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def protect(dtype: torch.dtype = torch.float32, microbatches: int = 4, **more: Any) -> tuple[Any, nn.Module]:
    model, optimizer = build(dtype)
    given = {"global_batch_size": 8, "microbatches": microbatches, "seed": 2} | more
    return outlast.join().protect(model, optimizer, rows(), **given), model


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch.to(next(model.parameters()).dtype)).float().pow(2).mean()


def train(until: int = 7, **more: Any) -> tuple[list[float], list[float | None], Any, nn.Module]:
    training, model = protect(**more)
    losses, norms = [], []
    for step in training.steps(until=until):
        for batch in step:
            step.backward(loss_of(model, batch))
        losses.append(step.loss)
        norms.append(step.grad_norm)
    return losses, norms, training, model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_fleet_of_one_repeats_itself_and_is_near_the_plain_loop(
    dtype: torch.dtype, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven steps of eight of 22 samples: short batches and three epochs are among them."""
    losses, norms, training, model = train(dtype=dtype, clip_norm=clip_norm)
    again = train(dtype=dtype, clip_norm=clip_norm)
    assert again[0] == losses
    assert again[1] == norms
    assert again[2].fingerprint() == training.fingerprint()
    monkeypatch.setenv("OUTLAST", "off")
    plain_losses, plain_norms, plain, plain_model = train(dtype=dtype, clip_norm=clip_norm)
    assert type(plain).__name__ == "PlainTraining"
    near = {"rtol": 1e-4, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.08, "atol": 0.02}
    torch.testing.assert_close(torch.tensor(plain_losses), torch.tensor(losses), **near)
    if clip_norm is not None:
        torch.testing.assert_close(torch.tensor(plain_norms), torch.tensor(norms), **near)
        assert max(n for n in norms if n is not None) > clip_norm
    for a, b in zip(plain_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.02)


def test_the_plain_loop_takes_its_samples_from_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever: nobody had said which microbatches would be asked for."""
    monkeypatch.setenv("OUTLAST", "off")
    losses, _, without, _ = train()
    assert train(num_workers=2)[0] == losses
    assert train(num_workers=2)[2].fingerprint() == without.fingerprint()


def test_running_statistics_move_once_a_step_and_in_the_plain_loop_with_each_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As reference/loop says: the parameters are the same to the bit with two microbatches."""

    def trained(mode: str) -> dict[str, torch.Tensor]:
        monkeypatch.setenv("OUTLAST", mode)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        data = torch.randn(64, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = outlast.join().protect(
            model, optimizer, data, global_batch_size=16, microbatches=2, checkpoint="off"
        )  # fmt: skip
        for step in training.steps(until=6):
            for batch in step:
                step.backward(model(batch).square().mean())
        return model.state_dict()

    fleet, plain = trained("on"), trained("off")
    same = {name for name, value in fleet.items() if torch.equal(value, plain[name])}
    assert set(fleet) - same == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert (int(fleet["1.num_batches_tracked"]), int(plain["1.num_batches_tracked"])) == (6, 12)


def test_buckets_do_not_change_a_bit() -> None:
    """Without clipping: the norm is a tree over the blocks of all buckets."""
    assert train(bucket_mb=1e-4)[2].fingerprint() == train()[2].fingerprint()


def test_a_batch_shorter_than_its_microbatches() -> None:
    """22 samples in batches of 10: the last has two, for five microbatches."""
    losses, _, training, _ = train(microbatches=5, global_batch_size=10, until=4)
    assert len(losses) == 4
    assert all(loss == loss for loss in losses)
    assert training.engine.samples.sizes(2) == [1, 1, 0, 0, 0]


def test_loss_before_the_commit_and_backward_twice_or_never() -> None:
    training, model = protect()
    step = next(iter(training.steps(until=2)))
    with pytest.raises(StepMisuse, match="not committed"):
        _ = step.loss
    batches = iter(step)
    batch = next(batches)
    step.backward(loss_of(model, batch))
    with pytest.raises(StepMisuse, match="twice") as caught:
        step.backward(loss_of(model, batch))
    assert "add the losses" in caught.value.remedy
    next(batches)
    with pytest.raises(StepMisuse, match="got no backward"):
        next(batches)


def test_break_out_of_a_step_and_steps_twice() -> None:
    training, _ = protect()
    steps = training.steps(until=2)
    for _batch in next(steps):
        break
    with pytest.raises(StepMisuse, match="step 0 was left before its microbatches were done") as caught:
        next(steps)
    assert "outer" in caught.value.remedy
    with pytest.raises(StepMisuse, match="called twice"):
        next(training.steps(until=2))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"microbatches": 0}, "microbatches=0 is not a positive whole number"),
        ({"global_batch_size": True}, "global_batch_size=True"),
        ({"global_batch_size": 40}, "the dataset has 22 samples"),
    ],
)
def test_bad_arguments(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        protect(**given)
    assert caught.value.remedy


def test_an_error_of_ours_gives_the_process_its_exit_code() -> None:
    told: list[type] = []
    hook = exit_by_code(lambda kind, error, trace: told.append(kind))
    with pytest.raises(SystemExit) as caught:
        hook(ConfigError, ConfigError("x"), None)
    assert caught.value.code == 2
    hook(ValueError, ValueError("x"), None)
    assert told == [ConfigError, ValueError]


def test_how_a_loop_was_left_is_read_from_its_instruction() -> None:
    seen: list[str] = []

    def numbers() -> Iterator[int]:
        try:
            yield 1
            yield 2
        except GeneratorExit:
            seen.append(how_left(sys._getframe(1)))
            raise

    def returns() -> int | None:
        for number in numbers():
            return number
        return None

    def through(inner: Iterator[int]) -> Iterator[int]:
        yield from ()
        for number in inner:  # noqa: UP028
            yield number

    for _ in numbers():
        break
    returns()
    for _ in numbers():
        try:
            break
        finally:
            seen.append("finally")
    for action in (lambda: 1 / 0, lambda: sys.exit(0)):
        try:
            for _ in numbers():
                action()
        except (ZeroDivisionError, SystemExit):
            seen.append("caught")
    for _ in through(numbers()):
        break
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the loop is what raises
        for _ in through(numbers()):
            _ = 1 / 0
    assert seen == ["break", "break", "finally", "break", *["error", "caught"] * 2, "break", "error"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"state": {"average": 3}}, r"state\['average'\] is a int, which cannot be saved"),
        ({"scheduler": "cosine"}, "scheduler is a str, which cannot be saved"),
        ({"bucket_mb": 0}, "bucket_mb=0"),
        ({"collate_fn": 3}, "collate_fn=3"),
        ({"row_momentum": 0.9}, "row_momentum given, but the aggregation is the mean"),
        ({"check_reducers": 0.1}, "check_reducers given, but the aggregation is the mean"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_once(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        protect(**given)


def test_what_is_no_model_and_no_optimizer() -> None:
    model, optimizer = build()
    for wrong, told in (((None, optimizer), "the model is a NoneType"), ((model, "adam"), "the optimizer is a str")):
        with pytest.raises(ConfigError, match=told):
            outlast.join().protect(*wrong, rows(), global_batch_size=8, microbatches=4)


def test_a_plain_backward_is_told_what_to_call() -> None:
    training, model = protect()
    steps = training.steps(until=1)
    step = next(steps)
    batches = iter(step)
    loss_of(model, next(batches)).backward()
    with pytest.raises(StepMisuse, match="got no backward") as caught:
        next(batches)
    assert "step.backward(loss)" in caught.value.remedy


def test_a_guard_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no loss_spike='rewnd'") as caught:
        outlast.Guards(loss_spike="rewnd")  # type: ignore[arg-type]
    assert "did you mean 'rewind'?" in caught.value.remedy


def test_one_run_protects_one_training() -> None:
    run = outlast.join()
    model, optimizer = build()
    run.protect(model, optimizer, rows(), global_batch_size=8, microbatches=4)
    with pytest.raises(ConfigError, match="protect\\(\\) was called twice") as caught:
        run.protect(model, optimizer, rows(), global_batch_size=8, microbatches=4)
    assert "into one Module" in caught.value.remedy


def test_a_joiner_is_sent_a_step_s_outcome_before_it_is_applied_here() -> None:
    """The view that admits it waits until it has applied the outcome: it does so beside the members, not after them."""
    training, model = protect()
    sent: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    class Feed:
        broken = False

        def put(self, head: Any, payload: list[torch.Tensor]) -> None:
            sent.append((head.step, model[0].weight.detach().clone(), torch.cat(payload)))

        def close(self) -> None:
            """Nothing is open."""

    for step in training.steps(until=2):
        before = model[0].weight.detach().clone()
        for batch in step:
            training.replica.donor.streams["r9.1"] = Feed()
            step.backward(loss_of(model, batch))
        [(number, weight, outcome)] = sent
        assert number == step.number
        assert torch.equal(weight, before)
        assert not torch.equal(model[0].weight, before)
        assert torch.equal(outcome, torch.cat([flat.view(torch.uint8) for flat in training.engine.out]))
        sent.clear()


def test_a_step_in_which_every_parameter_is_frozen_is_committed_and_changes_nothing() -> None:
    training, model = protect()
    other = torch.zeros((), requires_grad=True)
    for step in training.steps(until=4):
        before = training.fingerprint()
        for param in model.parameters():
            param.requires_grad_(step.number != 2)
        for batch in step:
            step.backward(loss_of(model, batch) + other)
        assert (training.fingerprint() == before) == (step.number == 2)
    assert step.number == 3


def test_the_momentum_of_rows_grows_from_step_to_step() -> None:
    """A gradient that is always the same: after n steps momentum b has (1 - b) + ... + (1 - b^n) of it applied."""
    model = nn.Linear(6, 1, bias=False)
    nn.init.zeros_(model.weight)
    rule = {"aggregation": "trimmed_mean", "f": 1, "rows": 4, "row_momentum": 0.9}
    training = outlast.join().protect(
        model, torch.optim.SGD(model.parameters(), lr=1.0), rows(), global_batch_size=8, microbatches=4, **rule
    )
    for step in training.steps(until=6):
        for _ in step:
            step.backward(model.weight.sum())
    want = -sum(1.0 - 0.9**n for n in range(1, 7))
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 6), want))
