"""What a generation says of its run, and what a run that goes on with other settings is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, MultiStepLR, SequentialLR

import outlast
from outlast.checkpoint import Head, LocalStore, heads
from outlast.checkpoint.head_facts import MAX_EXTRA, SECTIONS, checked, sections
from outlast.cli import main
from outlast.config import RunConfig
from outlast.runtime.settings.head_settings import recorded, without_secrets
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.training.began_with import BeganWith

SETTINGS = SaveSettings(
    target="s3://key:secret@bucket/a?X-Amz-Signature=abc", every=3, keep_last=2, keep_every=0, drain_to="",
    num_slots=2, min_s=1.0,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("training_here")


def train(place: Path, until: int, *, momentum: float = 0.0, warmup: int = 0, **more: Any) -> int:
    """How many steps it made. `warmup`: steps of a scheduler, if there is one."""
    torch.manual_seed(4)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    if warmup:
        more["scheduler"] = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=warmup)
    training = outlast.join().protect(
        model, optimizer, torch.randn(20, 6), global_batch_size=8, microbatches=4,
        seed=2, checkpoint=outlast.Checkpoint(dir=str(place), every=2, keep_last=9), **more,
    )  # fmt: skip
    numbers = []
    for step in training.steps(until=until):
        for batch in step:
            step.backward(model(batch).square().mean())
        numbers.append(step.number)
    return len(numbers)


def newest(place: Path) -> Head:
    return heads(LocalStore(str(place)))[0][0]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_without_a_launcher_a_generation_says_its_settings(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTLAST", mode)
    monkeypatch.setenv("OUTLAST_CHECKPOINT_MIN_S", "3")
    train(tmp_path, 4)
    said = sections(newest(tmp_path).extra)
    assert tuple(said) == SECTIONS
    assert (said["config"]["checkpoint_min_s"], set(said["config"])) == (3.0, set(RunConfig.__struct_fields__))
    assert [said["facts"][key] for key in ("seed", "microbatches", "global_batch_size")] == ["2", "4", "8"]
    assert (said["checkpoint"]["target"], said["checkpoint"]["every"]) == (str(tmp_path), 2)
    assert main(["ckpt", "show", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["settings"], shown["extra"]) == (said, {})
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "config: checkpoint_min_s = 3.0 (the others are the defaults)" in text
    assert "seed = 2" in text


def test_a_place_s_secrets_and_endless_values_are_left_out() -> None:
    config = RunConfig(lease_s=float("inf"), resume="https://token@host/b@7", checkpoint_drain_to="az://c@account/x")
    extra = recorded(config, SETTINGS, {"seed": "1", "audit_params": "x" * 5000, "checkpoints": "elsewhere"})
    checked(extra, file="head")
    said, text = sections(extra), json.dumps(extra)
    assert not any(secret in text for secret in ("secret", "abc", "token"))
    assert said["checkpoint"]["target"] == "s3://key:…@bucket/a?…"
    assert (said["config"]["resume"], said["config"]["checkpoint_drain_to"]) == (
        "https://…@host/b@7",
        "az://c@account/x",
    )
    assert said["config"]["lease_s"] == "inf"
    assert len(str(said["facts"].pop("audit_params"))) < 1100
    assert said["facts"] == {"seed": "1"}
    assert without_secrets("/a/b:c@d?e#f") == "/a/b:c@d?e#f"


def test_whatever_the_settings_are_a_head_can_hold_them() -> None:
    texts = {field: "\x01" * 5000 for field, value in vars_of(RunConfig()).items() if isinstance(value, str)}
    extra = recorded(RunConfig(**texts), SETTINGS, {str(n): "\x01" * 5000 for n in range(60)})
    assert sum(map(len, extra.values())) < MAX_EXTRA
    checked(extra, file="head")


def vars_of(config: RunConfig) -> dict[str, Any]:
    return {field: getattr(config, field) for field in config.__struct_fields__}


@pytest.mark.parametrize("mode", ["on", "off"])
def test_going_on_with_other_settings_is_told(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTLAST", mode)
    train(tmp_path, 2)
    assert "bits may differ" not in capfd.readouterr().err
    assert train(tmp_path, 4, drop_last=True) == 2
    assert "bits may differ from the run that saved this: drop_last: False when it was saved, True now" in (
        capfd.readouterr().err
    )
    first, last = (f"{tmp_path}@{n}" for n in (0, max(LocalStore(str(tmp_path)).generations())))
    assert main(["ckpt", "diff", first, last, "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["settings"] == {"facts.drop_last": ["False", "True"]}
    assert main(["ckpt", "diff", first, last]) == 1
    assert "setting facts.drop_last: False and True" in capfd.readouterr().out


@pytest.mark.parametrize("mode", ["on", "off"])
def test_settings_that_the_script_has_otherwise_are_told_as_often_as_it_goes_on(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A changed learning rate was passed over without a word: the checkpoint's holds, also the next time."""
    monkeypatch.setenv("OUTLAST", mode)
    train(tmp_path, 2, momentum=0.5, warmup=3)
    train(tmp_path, 4, momentum=0.5, warmup=3)
    assert "outlast:" not in capfd.readouterr().err
    for until in (6, 8):
        train(tmp_path, until, momentum=0.9, warmup=5)
        (told,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("outlast:")]
        assert told == (
            "outlast: the checkpoint's settings hold, not the script's, until the loop sets others: momentum was 0.5 "
            "when the run began, is 0.9 in the script; total_iters of LinearLR was 3 when the run began, is 5 in the "
            "script"
        )


def test_one_group_of_parameters_is_told_by_its_number() -> None:
    def began(*rates: float) -> BeganWith:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
        return BeganWith([torch.optim.SGD(groups)], [])

    assert began(0.1, 0.1).unlike(began(0.1, 0.1).state_dict()) == []
    assert began(0.1, 0.2).unlike(began(0.1, 0.1).state_dict()) == [
        "lr of group 1 was 0.1 when the run began, is 0.2 in the script"
    ]


def test_a_schedule_is_told_by_its_milestones_and_its_parts_and_a_rate_also_where_a_schedule_has_come() -> None:
    def began(rate: float, *milestones: int, until: int = 4) -> BeganWith:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
        if not milestones:
            return BeganWith([optimizer], [])
        parts = [ConstantLR(optimizer, factor=0.5), MultiStepLR(optimizer, list(milestones))]
        return BeganWith([optimizer], [SequentialLR(optimizer, parts, milestones=[until])])

    assert began(0.1, 5, 10).unlike(began(0.1, 5, 10).state_dict()) == []
    assert began(0.1, 5, 9, until=3).unlike(began(0.1, 5, 10).state_dict()) == [
        "milestones of SequentialLR was [4] when the run began, is [3] in the script",
        "milestones of part 1 of SequentialLR was [5, 10] when the run began, is [5, 9] in the script",
    ]
    assert began(0.2, 5, 10).unlike(began(0.1).state_dict()) == ["lr was 0.1 when the run began, is 0.2 in the script"]


def test_the_size_of_buckets_decides_bits_where_norms_are_taken() -> None:
    """Why it is one of the facts."""

    def norms(bucket_mb: float) -> list[float | None]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(90, 90) for _ in range(4)))
        training = outlast.join().protect(
            model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 90), global_batch_size=16,
            microbatches=4, clip_norm=1e-3, bucket_mb=bucket_mb,
        )  # fmt: skip
        found: list[float | None] = []
        for step in training.steps(until=6):
            for batch in step:
                step.backward(model(batch).square().mean())
            meta = training.replica.engine.meta
            found.append(meta.norm if meta is not None else None)
        assert training.replica.facts["bucket_mb"] == f"{bucket_mb:g}"
        return found

    assert len({tuple(norms(size)) for size in (4.0, 0.01, 0.05)}) > 1, "if this ever fails, it need not be a fact"
