"""Numbers of fewer bits: a loss scale that grows and backs off as torch's own, masters in float32, kernels compiled."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.errors import ConfigError, GuardStop, StepMisuse
from outlast.runtime.training._scaling import Scaling

pytestmark = pytest.mark.usefixtures("training_here")
ROWS = list(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))
BOTH = pytest.mark.parametrize("mode", ["on", "off"])


def scaler(**given: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**20, "growth_interval": 3} | given)


class Case:
    """A model whose gradients are made in float16: they overflow under a large scale."""

    def __init__(self, *, halves: bool = True, **how: Any) -> None:
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        self.dtype = torch.float16 if halves else torch.bfloat16
        given = {"global_batch_size": 8, "microbatches": 4, "seed": 2, "scheduler": self.schedule} | how
        self.training: Any = outlast.join().protect(self.model, self.optimizer, ROWS, **given)
        self.seen: list[tuple[float, float | None]] = []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            return self.model(batch).float().pow(2).mean()

    def train(self, until: int = 12, its: Any = None) -> list[float]:
        scales = []
        for step in self.training.steps(until=until):
            for batch in step:
                step.backward(self.loss(batch))
            scales.append(its.get_scale() if its is not None else 1.0)
            self.seen.append((step.loss, step.grad_norm))
        return scales


@BOTH
def test_the_scale_goes_the_way_of_torch_s_own(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a plain loop with torch's step and update: the same scales, and nearly the same model."""
    monkeypatch.setenv("OUTLAST", mode)
    mine = scaler()
    case = Case(scaler=mine)
    scales = case.train(its=mine)
    theirs, plain = scaler(), Case(guards="off")
    order = plain.training.engine.samples if mode == "on" else plain.training.samples
    found = []
    for number in range(12):
        plain.optimizer.zero_grad()
        for leaf in range(4):
            theirs.scale(plain.loss(order.fetch(number, leaf))).backward()
        for param in plain.model.parameters():
            param.grad /= 4
        before = theirs.get_scale()
        theirs.step(plain.optimizer)
        theirs.update()
        if theirs.get_scale() >= before:
            plain.schedule.step()
        found.append(theirs.get_scale())
    assert scales == found
    assert min(scales) < 2.0**20, "it never backed off"
    assert any(later > earlier for earlier, later in itertools.pairwise(scales)), "it never grew"
    for a, b in zip(case.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@BOTH
def test_a_step_that_overflowed_changes_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST", mode)
    case = Case(scaler=scaler(init_scale=2.0**40), clip_norm=1.0)
    before = copy.deepcopy(case.model.state_dict())
    rate = case.optimizer.param_groups[0]["lr"]
    case.train(until=2)
    assert all(torch.equal(before[n], p) for n, p in case.model.named_parameters())
    assert not case.optimizer.state
    assert case.optimizer.param_groups[0]["lr"] == rate
    assert all(torch.equal(before[n], b) for n, b in case.model.named_buffers())


def test_a_scale_that_is_a_power_of_two_leaves_no_trace_in_float32() -> None:
    """Nothing under- or overflows there, so scaling is exact, however often the scale changes."""
    found = []
    for how in ({}, {"scaler": scaler(growth_interval=2)}, {"scaler": scaler(enabled=False)}):
        case = Case(halves=False, **how)
        case.loss = lambda batch, case=case: case.model(batch).pow(2).mean()
        case.train()
        found.append((case.seen, case.training.fingerprint()))
    assert found[1:] == found[:1] * 2


@BOTH
def test_a_scale_goes_on_where_it_was(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST", mode)
    mine = scaler()
    whole = Case(scaler=mine)
    scales = whole.train(until=12, its=mine)
    keep = outlast.Checkpoint(dir=str(tmp_path), every=100)
    Case(scaler=scaler(), checkpoint=keep).train(until=7)
    mine = scaler()
    again = Case(scaler=mine, checkpoint=keep)
    assert again.train(until=12, its=mine) == scales[7:]
    assert again.training.fingerprint() == whole.training.fingerprint()


@pytest.mark.parametrize("grown", [2.0, 1.7])
def test_numbers_of_a_scale_are_those_of_torch(grown: float) -> None:
    mine = scaler(growth_factor=grown, backoff_factor=0.3)
    theirs = scaler(growth_factor=grown, backoff_factor=0.3)
    theirs.scale(torch.ones(()))
    scaling = Scaling(mine)
    parameter = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for bad in [False] * 7 + [True, False, True, True] + [False] * 400:
        parameter.grad = torch.tensor(float("inf") if bad else 1.0)
        theirs.step(optimizer)
        theirs.update()
        scaling.applied(bad)
        assert mine.get_scale() == theirs.get_scale()


def test_what_cannot_be_had_with_a_scale_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the scaler is a float"):
        Case(scaler=65536.0)
    with pytest.raises(ConfigError, match="cannot be had with a gradient scaler"):
        Case(scaler=scaler(), aggregation="median", rows=4, f=1)
    mine = scaler()
    case = Case(scaler=mine)
    mine.scale(torch.ones(()))
    told = ""
    for step in case.training.steps(until=1):
        for batch in step:
            if not told:
                with pytest.raises(StepMisuse, match="multiplied by a GradScaler") as caught:
                    step.backward(mine.scale(case.loss(batch)))
                told = caught.value.remedy
            step.backward(case.loss(batch))
        with pytest.raises(StepMisuse, match="unscale_ used"):
            mine.step(case.optimizer)
    assert "protect(scaler=scaler)" in told


def test_a_gradient_that_is_not_finite_for_its_own_reasons_is_the_guards_matter() -> None:
    """The scale backs off until it cannot be its fault, and no further."""
    mine = scaler(init_scale=64.0)
    case = Case(scaler=mine, halves=False, guards=outlast.Guards(nonfinite="stop"))
    case.loss = lambda batch: (case.model(batch).sum() * 0.0).sqrt() + 1.0
    with pytest.raises(GuardStop, match="norm"):
        case.train(until=200, its=mine)
    assert mine.get_scale() == 1.0
    assert len(case.seen) == 6
