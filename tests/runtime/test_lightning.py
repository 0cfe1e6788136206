"""Lightning's Trainer: killed in the middle or gone on with, its training ends with the bits of an undisturbed one."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.errors import ConfigError

# Looked for, not imported: collecting tests must not wait for it.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="Lightning is not there: make trainers-env installs it"
)
SCRIPT = Path(__file__).with_name("lightning_training.py")
STEPS = 60
LONG = pytest.mark.soak, pytest.mark.timeout(600)
OF_PLACE = {"first"}  # what a replica saw of the run


def alone(out: Path, *more: str, code: int = 0, **environ: str) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), *more, "--steps", str(STEPS), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environ})
    assert done.returncode == code, done.stderr
    found = [dict(json.loads(path.read_text())) for path in out.glob("*.json")]
    return found[0] if found else {}


@functools.cache
def undisturbed() -> dict[str, Any]:
    """What the training gives when nothing happens."""
    with tempfile.TemporaryDirectory() as out:
        return alone(Path(out))


def course(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in OF_PLACE}


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("struck", "more", "replicas"),
    [
        ("r0.1", ("--precision", "bf16-mixed"), 2),
        pytest.param("r0.1", (), 2, marks=LONG),
        pytest.param("r1.1", (), 3, marks=LONG),
    ],
)
def test_a_lightning_module_outlasts_its_replicas(
    fleet: Callable[..., Any], tmp_path: Path, struck: str, more: tuple[str, ...], replicas: int
) -> None:
    """The writer or the other is killed at an epoch's end; who joins amid the next has its means, best and waits."""
    want = alone(tmp_path / "alone", *more)
    run = fleet(script=(SCRIPT, *more), replicas=replicas, steps=STEPS, gates=(4, 7, 8), max_restarts=1)
    successor = run.replace(struck, 7, 8, replicas=replicas)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {*(f"r{slot}.1" for slot in range(replicas)), successor} - {struck}, run.logs()
    for name, found in results.items():
        assert course(found) == course(want), f"{name}\n{run.logs()}"
    assert results[successor]["first"] > 4
    assert want["steps"] < STEPS  # early stopping ended it
    assert {path.name for path in (run.out / "best").iterdir()} == set(want["kept"])
    mine, theirs = (torch.load(out / "final.ckpt", weights_only=False) for out in (run.out, tmp_path / "alone"))
    assert all(torch.equal(mine["state_dict"][key], value) for key, value in theirs["state_dict"].items())


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("stopped_after", [13, 15])
def test_a_lightning_module_goes_on_where_it_was(tmp_path: Path, stopped_after: int) -> None:
    """Amid an epoch, and between two of them."""
    want = undisturbed()
    keep = {"OUTLAST_CHECKPOINT_DIR": str(tmp_path / "ck")}
    assert alone(tmp_path / "again", **keep, OUTLAST_UNTIL=str(stopped_after)) == {}
    found = alone(tmp_path / "again", **keep)
    assert course(found) == course(want)
    assert found["first"] == stopped_after


@pytest.mark.campaign
def test_what_this_loop_does_not_do_is_refused(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from outlast.adapters.lightning import OutlastStrategy
    from outlast.examples.lightning_digits import Digits

    class Manual(Digits):
        automatic_optimization = False

    class Clips(Digits):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            """As users do."""

    def told(module: Any, **given: Any) -> str:
        trainer = lightning.Trainer(
            strategy=OutlastStrategy(), accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, max_epochs=given.pop("max_epochs", 1),
            default_root_dir=str(tmp_path), **given,
        )  # fmt: skip
        with pytest.raises(ConfigError) as error:
            trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(8, 64), batch_size=2))
        return str(error.value)

    assert "outlast's own loop" in told(Manual())
    assert "Trainer(gradient_clip_val=…)" in told(Clips())
    assert "by value" in told(Digits(), gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert "overfit_batches" in told(Digits(), overfit_batches=2)
    assert "no end" in told(Digits(), max_epochs=-1)
    assert "accumulate_grad_batches=N" in told(Digits(), callbacks=[GradientAccumulationScheduler({0: 2})])


def trained(tmp_path: Path, module: Any, loader: Any = None, **given: Any) -> Any:
    import lightning

    from outlast.adapters.lightning import OutlastStrategy

    trainer = lightning.Trainer(
        strategy=OutlastStrategy(), accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
        **{"max_epochs": 2, **given},
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2) if loader is None else loader)
    return trainer


def line(**hooks: Any) -> Any:
    """A module of one layer, with these hooks."""
    import lightning

    class Line(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return type("Hooked", (Line,), hooks)()


def test_a_part_of_the_batches_is_taken_once(tmp_path: Path) -> None:
    trainer = trained(tmp_path, line(), limit_train_batches=0.5)
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)
    with pytest.raises(ConfigError, match="leaves no step"):
        trained(tmp_path, line(), limit_train_batches=0.1)


def test_a_hook_before_the_transfer_gets_batches(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def before(_: Any, batch: Any, __: int) -> Any:
        seen.append(tuple(batch.shape))
        return batch * 2

    assert trained(tmp_path, line(on_before_batch_transfer=before)).global_step == 8
    assert seen == [(2, 2)] * (8 + 2)  # the first microbatch is computed twice more


def test_what_would_have_failed_with_another_cause_is_told(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.ones(8, 2))

    def counts(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=1 / module.trainer.estimated_stepping_batches)

    stream = torch.utils.data.DataLoader(Stream(), batch_size=2)
    with pytest.raises(ConfigError, match="estimated_stepping_batches"):
        trained(tmp_path, line(configure_optimizers=counts))
    with pytest.raises(ConfigError, match="returned -1"):
        trained(tmp_path, line(on_train_batch_start=lambda *_: -1))
    with pytest.raises(ConfigError, match="a stream"):
        trained(tmp_path, line(), stream)
    assert trained(tmp_path, line(), stream, max_epochs=None, max_steps=3).global_step == 3
    with pytest.raises(ConfigError, match="StochasticWeightAveraging"):
        trained(tmp_path, line(), callbacks=[StochasticWeightAveraging(0.1)])
    for given in ({"worker_init_fn": print}, {"generator": torch.Generator()}):
        with pytest.raises(ConfigError, match=next(iter(given))):
            trained(tmp_path, line(), torch.utils.data.DataLoader(torch.ones(8, 2), **given))  # type: ignore[arg-type]


def test_states_of_callbacks_may_hold_tensors_anywhere(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    class Keeps(Callback):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            return {"kept": [torch.ones(3)], "by": {"name": (torch.zeros(2), 1)}}

    assert trained(tmp_path, line(), callbacks=[Keeps()]).global_step == 8
