"""Weights to begin with: from an import, an export, another run's model; alone, with OUTLAST=off, in fleets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoints
from torch import nn

import outlast
from outlast.checkpoint import LocalStore, heads
from outlast.cli import main
from outlast.errors import CheckpointError, ConfigError

here = pytest.mark.usefixtures("training_here")
ROWS = list(torch.randn(16, 6, generator=torch.Generator().manual_seed(1)))


class Net(nn.Module):
    """With a tied parameter, a buffer that is kept in files and one that is not."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 6, bias=False)
        self.again = nn.Linear(width, 6, bias=False)
        self.again.weight = self.head.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.head(self.body(batch)) + self.again(self.body(batch))


def train(model: nn.Module, until: int, **checkpoint: Any) -> str:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = outlast.join().protect(
        model, optimizer, ROWS, global_batch_size=8, microbatches=2, checkpoint=outlast.Checkpoint(**checkpoint)
    )
    for step in training.steps(until=until):
        for batch in step:
            step.backward(model(batch).pow(2).mean())
    found = training.fingerprint()
    getattr(training, "_at_exit", lambda: None)()
    return found


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of three steps, and its last weights."""
    model = Net(1)
    train(model, 3, dir=str(tmp_path / "run"), every=3)
    return tmp_path, values(model)


def placed(folder: Path, kind: str) -> str:
    """The weights of the run, in the way they travel."""
    run, files, imported = folder / "run", folder / "files", folder / "imported"
    if kind == "run":
        return f"{run}@0"
    whole = [] if kind == "whole export" else ["--names", "model.*"]
    assert main(["ckpt", "export", str(run), str(files), *whole]) == 0
    if kind != "import":
        return str(files) if kind != "file" else str(files / "model.safetensors")
    assert main(["ckpt", "import", str(files), str(imported)]) == 0
    return str(imported)


@here
@pytest.mark.parametrize("kind", ["run", "export", "whole export", "file", "import"])
@pytest.mark.parametrize("off", [False, True])
def test_a_run_begins_with_weights_by_name(
    source: tuple[Path, dict[str, torch.Tensor]], kind: str, off: bool,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder, wanted = source
    if off:
        monkeypatch.setenv("OUTLAST", "off")
    expected = Net(5)
    expected.load_state_dict(wanted)
    one_more = train(expected, 2)
    capfd.readouterr()
    assert train(Net(5), 2, init_from=placed(folder, kind)) == one_more
    told = capfd.readouterr().err
    assert "begins at step 0 with 9 tensors of " in told or off


@here
@pytest.mark.parametrize("layout", ["weights", "with an optimizer", "below one key"])
def test_weights_in_a_checkpoint_of_torch_s_begin_a_run_once_they_are_imported(
    source: tuple[Path, dict[str, torch.Tensor]], layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wanted = source
    theirs, imported = str(folder / "dcp"), str(folder / "imported")
    state: dict[str, Any] = wanted
    if layout != "weights":
        optimizer = {"state": {"0": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-2, "params": [0]}]}
        state = {"model": wanted, "optim": optimizer, "step": 7}
    torch_checkpoints.save({"app": state} if layout == "below one key" else state, checkpoint_id=theirs, no_dist=True)
    with pytest.raises(CheckpointError, match=rf"DCP\n.*\n.*outlast ckpt import {theirs} NEW, then --init-from NEW"):
        train(Net(5), 2, init_from=theirs)
    assert main(["ckpt", "import", theirs, imported]) == 0
    expected = Net(5)
    expected.load_state_dict(wanted)
    one_more = train(expected, 2)
    assert train(Net(5), 2, init_from=imported) == one_more
    # The same once more as files of safetensors, which carry the tree.
    assert main(["ckpt", "export", imported, str(folder / "files")]) == 0
    capsys.readouterr()
    assert train(Net(5), 2, init_from=str(folder / "files")) == one_more
    assert "begins at step 0 with 9 tensors of " in capsys.readouterr().err


@here
def test_names_that_do_not_fit_are_listed_and_nothing_is_loaded(source: tuple[Path, dict[str, torch.Tensor]]) -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__(6)
            self.more = nn.Linear(2, 2)
            del self.body[1]

    place = placed(source[0], "import")
    model = Other()
    before = values(model)
    with pytest.raises(CheckpointError) as caught:
        train(model, 1, init_from=place)
    text = str(caught.value)
    assert "missing there: more.weight" in text
    assert "not wanted by the model: body.1.running_var" in text
    assert "--no-init-strict" in text
    assert "scratch" not in text, "what files do not keep is not missing in them"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    train(Other(), 1, init_from=place, init_strict=False)


@here
@pytest.mark.parametrize("strict", [True, False])
def test_shapes_that_differ_and_nothing_in_common_are_refused(
    source: tuple[Path, dict[str, torch.Tensor]], strict: bool
) -> None:
    place = placed(source[0], "import")
    with pytest.raises(CheckpointError, match=r"head.weight: torch.float32\[6, 8\] there, torch.float32\[6, 9\]"):
        train(Net(1, width=9), 1, init_from=place, init_strict=strict)
    with pytest.raises(CheckpointError, match="do not fit"):
        train(nn.Sequential(nn.Linear(6, 6)), 1, init_from=place, init_strict=strict)


@here
def test_values_are_converted_and_a_difference_between_tied_names_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import safetensors.torch

    wanted = {f"net.{name}": tensor.clone() for name, tensor in Net(3).state_dict().items()}
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({k: v.bfloat16() if v.is_floating_point() else v for k, v in wanted.items()}, str(file))
    train(Net(1), 1, init_from=str(file))
    told = capfd.readouterr().err
    assert "'net.' taken off their names" in told
    assert "converted from bfloat16" in told
    safetensors.torch.save_file({**wanted, "net.again.weight": wanted["net.again.weight"] + 1}, str(file))
    with pytest.raises(CheckpointError, match=r"head.weight and again.weight are one tensor in the model"):
        train(Net(1), 1, init_from=str(file))


@here
@pytest.mark.parametrize("off", [False, True])
def test_weights_alone_are_not_resumed_and_the_way_to_begin_with_them_is_told(
    source: tuple[Path, dict[str, torch.Tensor]], off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = placed(source[0], "import")
    if off:
        monkeypatch.setenv("OUTLAST", "off")
    with pytest.raises(CheckpointError, match=rf"weights only.*\n.*\n.*--init-from {place}@0"):
        train(Net(1), 1, dir=place)
    monkeypatch.setenv("OUTLAST_RESUME", place)
    with pytest.raises(CheckpointError, match="weights only"):
        train(Net(1), 1, dir=str(source[0] / "new"))


@here
def test_weights_may_lie_where_the_run_saves_and_what_it_saved_counts_from_then_on(
    source: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    place = placed(source[0], "import")
    expected = Net(5)
    expected.load_state_dict(source[1])
    straight = train(expected, 4)
    train(Net(5), 2, dir=place, init_from=place)
    assert [head.step for head in heads(LocalStore(place))[0]] == [2, 0]
    assert train(Net(7), 4, dir=place, init_from=place) == straight


SCRIPT = """
import torch, outlast
torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
rows = list(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
training = outlast.join().protect(
    model, torch.optim.SGD(model.parameters(), lr=0.1), rows, global_batch_size=8, microbatches=4,
    checkpoint=CHECKPOINT)
for step in training.steps(until=3):
    for batch in step:
        step.backward(model(batch).pow(2).mean())
print("sum", model.weight.double().sum().item(), flush=True)
"""


def launched(folder: Path, checkpoint: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT.replace("CHECKPOINT", checkpoint))
    command = [
        sys.executable,
        "-m",
        "outlast",
        "run",
        *options,
        "--run-dir",
        str(folder / f"r{len(os.listdir(folder))}"),
    ]
    return subprocess.run([*command, str(folder / "train.py")], capture_output=True, text=True, timeout=120, cwd=folder)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    import safetensors.torch

    torch.manual_seed(9)
    safetensors.torch.save_file(torch.nn.Linear(4, 2).state_dict(), str(tmp_path / "w.safetensors"))
    assert main(["ckpt", "import", str(tmp_path / "w.safetensors"), str(tmp_path / "w")]) == 0
    return tmp_path / "w"


@pytest.mark.process
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_fleet_begins_with_weights_and_one_that_cannot_ends_at_once(weights: Path, replicas: int) -> None:
    folder, fleet = weights.parent, ("--replicas", str(replicas))
    done = launched(folder, "'auto'", *fleet, "--init-from", str(weights))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("begins at step 0 with 2 tensors") == 1
    # Known to the script alone, so that the replicas themselves must say it.
    refused = launched(folder, f"outlast.Checkpoint(dir={str(weights)!r})", *fleet)
    assert refused.returncode == 7
    assert "holds weights only" in refused.stdout + refused.stderr
    assert "training could not begin" in refused.stderr
    assert "restart" not in refused.stdout


@pytest.mark.process
def test_the_launcher_says_it_before_anything_is_started(weights: Path) -> None:
    for options in (["--checkpoint-dir", str(weights)], ["--checkpoint-dir", "new", "--resume", f"{weights}@0"]):
        ended = launched(weights.parent, "'auto'", *options)
        assert (ended.returncode, ended.stdout) == (7, "")
        assert f"--init-from {weights}@0" in ended.stderr
        assert "Traceback" not in ended.stderr
    both = launched(weights.parent, "'auto'", "--checkpoint-dir", "new", "--resume", str(weights), "--init-from", "x")
    assert both.returncode == 2
    gone = launched(weights.parent, "'auto'", "--init-from", "nowhere")
    assert (gone.returncode, "there is no nowhere" in gone.stderr) == (2, True)


def test_a_setting_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="init_from"):
        outlast.Checkpoint(init_from=3)  # type: ignore[arg-type]
