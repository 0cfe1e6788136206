"""Saving and resuming without a launcher: a fleet of one and the plain loop, in this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.checkpoint import LocalStore, heads, verify
from outlast.checkpoint.fs import Disk
from outlast.errors import CheckpointError, ConfigError, EnvironmentFault
from outlast.runtime.loop._ending import told
from outlast.runtime.saving import unsaved as _unsaved

pytestmark = pytest.mark.usefixtures("training_here")
LIMIT_S = 3.0  # of a disk that dies: until then it is well, and a busy machine keeps to it


class Average:
    """What a loop might register: a running mean of the weights, changed after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]
        self.count = 0

    def update(self, model: nn.Module) -> None:
        self.count += 1
        for mean, p in zip(self.values, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.count = [v.clone() for v in state["values"]], state["count"]


class Stopped(Exception):
    """The loop dies, as far as checkpoints can tell."""


def train(
    until: int, checkpoint: Any, *, die_at: int = -1, leave_at: int = -1, **more: Any
) -> tuple[dict[int, float], str, Average]:
    """Losses by step, and what is there in the end."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=50)
    average = Average(model)
    rows = list(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)))
    training = outlast.join().protect(
        model, optimizer, rows, global_batch_size=8, microbatches=4, seed=2, clip_norm=0.5, scheduler=scheduler,
        state={"average": average}, checkpoint=checkpoint, **more,
    )  # fmt: skip
    losses = {}
    for step in training.steps(until=until):
        if step.number == 1:
            await_memory(training)
        for batch in step:
            step.backward(model(batch).pow(2).mean())
        losses[step.number] = step.loss
        average.update(model)
        if step.number == die_at:
            archive_of(training).close()  # a dead process writes no more
            training._open = None
            raise Stopped
        if step.number == leave_at:
            break
    found = training.fingerprint()
    for end in ("_at_the_script_s_end", "_at_exit"):
        getattr(training, end, lambda: None)()
    return losses, found, average


def await_memory(training: Any) -> None:
    """For saves: it is made beside the first steps, and who ends before that has saved none of them."""
    if not hasattr(training, "saves") and training.replica.saves is not None:
        training.replica.saves._prepared.result(60)


def archive_of(training: Any) -> Any:
    saves = getattr(training, "saves", None)
    return saves._archive if saves is not None else training.replica.saves.archive


def keep(path: Path, every: int = 2, **more: Any) -> outlast.Checkpoint:
    return outlast.Checkpoint(dir=str(path), every=every, **more)


def steps_in(path: Path) -> list[int]:
    return sorted(head.step for head in heads(LocalStore(str(path)))[0])


def test_a_gradient_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    def scaled(until: int, init: float) -> torch.amp.GradScaler:
        model = torch.nn.Linear(6, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=init)
        training = outlast.join().protect(
            model, torch.optim.SGD(model.parameters(), lr=0.1), list(torch.ones(8, 6)), global_batch_size=4,
            microbatches=2, seed=0, state={"scaler": scaler}, checkpoint=keep(tmp_path, every=1),
        )  # fmt: skip
        for step in training.steps(until=until):
            for batch in step:
                loss = model(batch).square().mean()
                scaler.scale(loss.detach())  # as a loop does that scales before backward
                step.backward(loss)
            scaler.update(scaler.get_scale() * 2)
        return scaler

    assert scaled(3, init=8.0).get_scale() == 64.0
    assert scaled(5, init=1.0).get_scale() == 256.0


@pytest.mark.parametrize("mode", ["on", "off"])
def test_stop_and_resume_is_never_stopping(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after step 4 with saves of 2 and 4: the rest has the losses, weights and averages of the whole."""
    monkeypatch.setenv("OUTLAST", mode)
    losses, found, average = train(9, "off")
    with pytest.raises(Stopped):
        train(9, keep(tmp_path), die_at=4)
    again, found_again, average_again = train(9, keep(tmp_path))
    assert min(again) in (2, 4)
    assert again == {step: losses[step] for step in again}
    assert found_again == found
    assert average_again.count == average.count
    assert all(map(torch.equal, average_again.values, average.values))
    assert steps_in(tmp_path)[-1] == 9, "a clean end saves"
    assert train(9, keep(tmp_path))[:2] == ({}, found), "nothing is left to do"
    assert all(verify(LocalStore(str(tmp_path)), g).problems == [] for g in LocalStore(str(tmp_path)).generations())


@pytest.mark.parametrize("mode", ["on", "off"])
def test_that_nothing_is_left_to_train_is_said_once_before_the_script_finds_no_step(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTLAST", mode)
    train(2, keep(tmp_path))
    train(3, keep(tmp_path))
    assert "nothing is left" not in capsys.readouterr().err
    for until in (3, 2):
        assert train(until, keep(tmp_path))[0] == {}
        told = f"outlast: the checkpoint is at step 3 and until is {until}: nothing is left to train; raise until, or"
        assert capsys.readouterr().err.count(told) == 1


def test_a_break_saves_and_the_loop_goes_on_from_there(tmp_path: Path) -> None:
    losses, found, _ = train(7, "off")
    first, _, _ = train(7, keep(tmp_path, every=1000), leave_at=2)
    assert steps_in(tmp_path) == [3]
    second, found_again, _ = train(7, keep(tmp_path, every=1000))
    assert first | second == losses
    assert found_again == found


def test_the_environment_says_where_and_whether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_CHECKPOINT_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("OUTLAST_CHECKPOINT_EVERY", "3")
    losses, found, _ = train(4, "auto")
    assert steps_in(tmp_path / "a")[-1] == 4
    monkeypatch.setenv("OUTLAST_RESUME", "never")
    assert train(4, "auto")[:2] == (losses, found)
    monkeypatch.setenv("OUTLAST_CHECKPOINT_DIR", str(tmp_path / "b"))
    newest = max(LocalStore(str(tmp_path / "a")).generations())
    monkeypatch.setenv("OUTLAST_RESUME", f"{tmp_path / 'a'}@{newest}")
    assert list(train(5, "auto")[0]) == [4]
    monkeypatch.setenv("OUTLAST_RESUME", str(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        train(4, "auto")


def test_a_generation_that_does_not_serve_is_told_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(4, keep(tmp_path, every=2))
    os.mkfifo(tmp_path / "manifests" / "g0000000009.json")
    assert list(train(5, keep(tmp_path))[0]) == [4]
    said = "outlast: checkpoints: passed over generation 9 (disk, g0000000009.json): is no regular file\n"
    assert said in capfd.readouterr().err


def test_a_place_that_cannot_be_written_is_told_at_the_script_s_line(tmp_path: Path) -> None:
    """A thread of ours tries it; where the standard library's futures raise its error again is no line of a script."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be written") as caught:
        train(4, keep(tmp_path / "file" / "c"))
    assert f"at: {__file__}, line " in told(caught.value)


def test_a_place_that_cannot_be_listed_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a store that does not answer."""

    def away(store: LocalStore) -> list[int]:
        raise OSError("error sending request")

    monkeypatch.setattr(LocalStore, "generations", away)
    with pytest.raises(EnvironmentFault, match="cannot be listed: error sending request") as caught:
        train(4, keep(tmp_path))
    assert "Traceback" not in told(caught.value)


def test_the_longest_run_keeps_so_many(tmp_path: Path) -> None:
    train(12, keep(tmp_path, every=1, keep_last=2))
    assert len(steps_in(tmp_path)) == 2
    assert steps_in(tmp_path)[-1] == 12


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    train(3, keep(tmp_path))
    torch.manual_seed(4)
    model = nn.Linear(6, 1)
    training = outlast.join().protect(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 6), global_batch_size=16, microbatches=4,
        seed=2, clip_norm=0.5, checkpoint=keep(tmp_path),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="global_batch_size: 8 there, 16 here"):
        next(training.steps(until=5))


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_target_that_cannot_be_written_is_told_before_training_and_one_that_is_lost_stops_none(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTLAST", mode)
    file = tmp_path / "file"
    file.write_text("no directory")
    with pytest.raises(EnvironmentFault, match="Not a directory"):
        train(6, keep(file / "below"))
    losses, found, _ = train(6, "off")
    monkeypatch.setattr(LocalStore, "create", lambda *_: os.open(file / "x", os.O_RDONLY))
    assert train(6, keep(tmp_path / "c"))[:2] == (losses, found)
    told = capfd.readouterr().err
    assert "the save of step" in told
    assert "step 6 is in no checkpoint" in told
    _unsaved.forget()


@pytest.mark.parametrize(
    ("given", "reason"),
    [("often", "neither 'auto' nor 'off'"), (3, "checkpoint is a int")],
)
def test_what_is_no_setting(given: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        train(3, given)
    assert caught.value.remedy


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        outlast.Checkpoint(dir="x", every=0)
    with pytest.raises(ConfigError, match="num_slots=4") as caught:
        outlast.Checkpoint(dir="x", num_slots=4)
    assert "num_slots=3" in caught.value.remedy


def test_state_that_cannot_be_kept_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    model = nn.Linear(6, 1)

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Never called."""

    training = outlast.join().protect(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 6), global_batch_size=8, microbatches=4,
        state={"odd": Odd()}, checkpoint=keep(tmp_path),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"a builtins.object at 'extra.odd.thing'"):
        next(training.steps(until=5))


def test_resuming_without_a_place_to_save_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_RESUME", str(tmp_path))
    with pytest.raises(ConfigError, match="keeps no checkpoints"):
        train(3, "auto")


def test_what_guards_remember_is_in_the_save(tmp_path: Path) -> None:
    guards = outlast.Guards(certify_every=2, loss_spike="rewind", warmup=2)
    losses, found, _ = train(9, "off", guards=guards)
    with pytest.raises(Stopped):
        train(9, keep(tmp_path), die_at=5, guards=guards)
    again, found_again, _ = train(9, keep(tmp_path), guards=guards)
    assert again == {step: losses[step] for step in again}
    assert found_again == found


def test_the_plain_loop_s_checkpoints_are_everybody_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST", "off")
    train(4, keep(tmp_path))
    monkeypatch.setenv("OUTLAST", "on")
    assert list(train(6, keep(tmp_path))[0]) == [4, 5]
    monkeypatch.setenv("OUTLAST", "off")
    assert list(train(7, keep(tmp_path))[0]) == [6]


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_disk_that_never_answers_stops_no_training(
    tmp_path: Path, mode: str, call: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Resumed on a disk that has died: its saves are said to have failed, and the end waits no longer than told."""
    monkeypatch.setenv("OUTLAST", mode)
    losses, found, _ = train(6, "off")
    train(3, keep(tmp_path, every=1))
    kept, back = steps_in(tmp_path), threading.Event()
    monkeypatch.setattr(Disk, call, lambda *_: back.wait(60))
    again, found_again, _ = train(6, keep(tmp_path, every=1, timeout_s=LIMIT_S))
    assert again == {step: losses[step] for step in (3, 4, 5)}
    assert found_again == found
    assert steps_in(tmp_path) == kept
    err = capfd.readouterr().err
    assert "failed, training goes on" in err
    assert f"has not returned for {LIMIT_S:g} s" in err
    back.set()


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("call", ["names", "pread"])
def test_a_disk_that_never_answers_a_read_ends_the_start_with_a_word(
    tmp_path: Path, mode: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST", mode)
    train(2, keep(tmp_path, every=1))
    back = threading.Event()
    monkeypatch.setattr(Disk, call, lambda *_, **__: back.wait(60))
    # A busy machine may take as long over a call that is well: the word is the same.
    with pytest.raises((CheckpointError, EnvironmentFault), match=r"has not returned for 1 s"):
        train(4, keep(tmp_path, every=1, timeout_s=1.0))
    back.set()


@pytest.mark.parametrize("saved", ["on", "off"])
def test_the_plain_loop_and_the_protected_one_resume_each_other_and_say_that_sums_differ(
    tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTLAST", saved)
    train(4, keep(tmp_path))
    monkeypatch.setenv("OUTLAST", "off" if saved == "on" else "on")
    capfd.readouterr()
    losses, _, average = train(6, keep(tmp_path))
    assert (sorted(losses), average.count) == ([4, 5], 6)
    assert "bits may differ from the run that saved this: loop: " in capfd.readouterr().err
