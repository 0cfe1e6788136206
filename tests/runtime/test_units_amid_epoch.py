"""Restarts that come in amid an epoch, or after the last step of a run that was stopped: nothing is done twice."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from outlast.checkpoint import LocalStore, heads
from outlast.errors import LoopUnrepeatable

pytestmark = pytest.mark.usefixtures("training_here")
PER_EPOCH = 4


@pytest.fixture(params=["on", "off"], autouse=True)
def _mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST", request.param)


class Counter:
    """Registered state that the loop changes at the start of each epoch."""

    def __init__(self) -> None:
        self.values, self.loads = torch.zeros(2), 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.loads = state["values"].clone(), self.loads + 1


class Script:
    """A training script, from its first line."""

    def __init__(self, place: Path | None, every: int = 1) -> None:
        torch.manual_seed(4)
        self.model, self.counter = torch.nn.Linear(6, 1), Counter()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        checkpoint = "off" if place is None else outlast.Checkpoint(dir=str(place), every=every)
        self.training: Any = outlast.join().protect(
            self.model, self.optimizer, list(torch.randn(16, 6, generator=torch.Generator().manual_seed(1))),
            global_batch_size=4, microbatches=2, seed=2, state={"counter": self.counter}, checkpoint=checkpoint,
        )  # fmt: skip

    def take(self, step: Any) -> None:
        for batch in step:
            step.backward(self.model(batch).pow(2).mean())

    def halve(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.counter.values += 1

    def epochs(self, opening: Callable[[Script], object]) -> list[int]:
        done = []
        for epoch in self.training.epochs(3):
            opening(self)
            for step in epoch:
                self.take(step)
                done.append(step.number)
        return done

    def until(self, end: int, opening: Callable[[Script], object]) -> None:
        """As `epochs`, ended by a save after so many steps."""
        for step in self.training.steps(end):
            if step.number % PER_EPOCH == 0:
                opening(self)
            self.take(step)

    def steps(self, until: int, stop_at: int = -1) -> list[int]:
        done = []
        for step in self.training.steps(until):
            for batch in step:
                step.backward(self.model(batch).pow(2).mean())
                if step.number == stop_at:
                    self.training.stop("good enough")
            done.append(step.number)
        return done

    def seen(self) -> tuple[str, float, list[float]]:
        return self.training.fingerprint(), self.optimizer.param_groups[0]["lr"], self.counter.values.tolist()


@pytest.mark.parametrize("end", [6, 8])
def test_what_the_loop_does_at_an_epoch_s_start_is_done_once(tmp_path: Path, end: int) -> None:
    """6: resumed amid an epoch. 8: at the start of one, whose code belongs to no checkpoint yet."""
    whole = Script(None)
    whole.epochs(Script.halve)
    Script(tmp_path).until(end, Script.halve)
    again = Script(tmp_path)
    assert again.epochs(Script.halve) == list(range(end, 3 * PER_EPOCH))
    assert again.seen() == whole.seen()
    assert again.seen()[1:] == (0.01 / 8, [3.0, 3.0])


def test_what_the_loop_draws_at_an_epoch_s_start_is_drawn_again(tmp_path: Path) -> None:
    """And behind it, before a step: resumed amid an epoch, and at the start of one."""

    def drawing(script: Script) -> dict[str, float]:
        drawn: dict[str, float] = {}
        for epoch in script.training.epochs(3):
            drawn[f"epoch {epoch.number}"] = random.random()
            for step in epoch:
                drawn[f"step {step.number}"] = float(torch.rand(()))
                script.take(step)
        return drawn

    whole = drawing(Script(None))
    for end in (6, 8):
        Script(tmp_path / str(end)).until(end, lambda script: None)
        again = drawing(Script(tmp_path / str(end)))
        assert again.items() <= whole.items()
        assert set(again) == {f"epoch {n}" for n in range(end // 4, 3)} | {f"step {n}" for n in range(end, 12)}


def test_what_did_not_change_is_not_loaded_again(tmp_path: Path) -> None:
    Script(tmp_path).until(6, lambda script: None)
    again = Script(tmp_path)
    again.epochs(lambda script: None)
    assert again.counter.loads == 1, "by the checkpoint"


def _weights(script: Script) -> None:
    with torch.no_grad():
        script.model.bias.mul_(0.5)


@pytest.mark.parametrize("opening", [_weights, lambda script: script.optimizer.state.clear()])
def test_what_cannot_be_put_back_is_refused(tmp_path: Path, opening: Callable[[Script], object]) -> None:
    Script(tmp_path).until(6, lambda script: None)
    with pytest.raises(LoopUnrepeatable, match="came in at step 6, amid the epoch") as caught:
        Script(tmp_path).epochs(opening)
    assert "after the loop over the epoch before" in caught.value.remedy


def test_a_run_that_was_stopped_stays_so(tmp_path: Path) -> None:
    first = Script(tmp_path, every=1000)
    assert first.steps(12, stop_at=3) == [0, 1, 2, 3]
    assert [head.step for head in heads(LocalStore(str(tmp_path)))[0]] == [4]
    for _ in range(2):
        again = Script(tmp_path, every=1000)
        assert again.steps(12) == []
        assert again.training.stopped == "good enough"
        assert again.seen() == first.seen()


def test_a_stop_is_not_forgotten_between_its_save_and_the_next_commit(tmp_path: Path) -> None:
    """The loop asks after step 3; the save of it is the last thing that happens. The next start takes one step more,
    as the run would have."""
    first = Script(tmp_path)
    for step in first.training.steps(4):
        first.take(step)
        if step.number == 3:
            first.training.stop("good enough")
    assert first.training.stopped == ""
    again, whole = Script(tmp_path), Script(None)
    assert again.steps(12) == [4]
    assert again.training.stopped == "good enough"
    whole.until(5, lambda script: None)
    assert again.training.fingerprint() == whole.training.fingerprint()


@pytest.mark.parametrize("end", [6, 8])
def test_an_evaluation_at_an_epoch_s_start_gives_what_it_gave(tmp_path: Path, end: int) -> None:
    """6: resumed amid an epoch, whose start is gone through again. 8: at the start of one."""

    def look(script: Script) -> None:
        for size in (5, 7):
            numbers = lambda x: {"y": script.model(x).mean()}  # noqa: E731
            seen.append(script.training.evaluate(list(torch.ones(9, 6)), numbers, batch_size=size))

    seen: list[dict[str, float]] = []
    Script(None).epochs(look)
    whole, seen = seen, []
    Script(tmp_path).until(end, look)
    Script(tmp_path).epochs(look)
    before = 4  # of two epochs begun
    assert seen[:before] == whole[:before]
    assert seen[before:] == whole[2 if end == 6 else 4 :]


def test_an_evaluation_that_the_epoch_did_not_begin_with_is_refused(tmp_path: Path) -> None:
    Script(tmp_path).until(6, lambda script: None)
    with pytest.raises(LoopUnrepeatable, match="evaluation 1 of the lines before its first step is not known"):
        Script(tmp_path).epochs(lambda script: script.training.evaluate([torch.ones(6)], lambda x: {"y": x.mean()}))


def test_trainings_that_are_over_leave_nothing_behind(tmp_path: Path) -> None:
    def one() -> weakref.ref[Any]:
        script = Script(None)
        script.steps(2)
        return weakref.ref(script.training)

    one()
    gc.collect()
    open_now = len(os.listdir("/proc/self/fd"))
    ended = [one() for _ in range(6)]
    gc.collect()
    assert {ref() for ref in ended} == {None}
    # Each would have left one or more; what threads of earlier tests open meanwhile is fewer.
    assert len(os.listdir("/proc/self/fd")) < open_now + len(ended)


def test_a_checkpoint_that_is_named_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(tmp_path / "a").steps(12, stop_at=3)
    newest = max(LocalStore(str(tmp_path / "a")).generations())
    monkeypatch.setenv("OUTLAST_RESUME", f"{tmp_path / 'a'}@{newest}")
    on = Script(tmp_path / "b")
    assert on.steps(6) == [4, 5]
    assert on.training.stopped == ""
