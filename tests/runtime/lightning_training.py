"""The digits of the Lightning example, with everything of a Trainer that has a course of its own."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger

from outlast.adapters.lightning import OutlastStrategy
from outlast.examples.lightning_digits import Digits, loaders


class Gates(Callback):  # type: ignore[misc]
    """Waits while a test holds the gate before a step."""

    def __init__(self, gates: Path | None) -> None:
        self.gates = gates

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.gates is not None and (self.gates / str(trainer.global_step)).exists():
            with (self.gates / str(trainer.global_step)).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)


class Seen(Callback):  # type: ignore[misc]
    """The number of each step and epoch as Lightning counts them, and the metrics of each epoch."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.epochs: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append([batch.number, trainer.global_step, trainer.current_epoch, batch_idx])

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.epochs[trainer.current_epoch] = float(trainer.callback_metrics["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    torch.manual_seed(0)
    strategy, seen = OutlastStrategy(), Seen()
    best = ModelCheckpoint(told.out / "best", monitor="held_out_loss", save_top_k=2)
    early = EarlyStopping("held_out_loss", patience=2, min_delta=0.2)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=told.steps // 5, accumulate_grad_batches=4,
        gradient_clip_val=1.0, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        precision=told.precision,
        callbacks=[best, early, Timer(duration="00:08:00:00"), Gates(told.gates), seen],
        logger=CSVLogger(told.out, name="", version="curve"),
    )  # fmt: skip
    module = Digits()
    trainer.fit(module, *loaders(400))
    for number, global_step, epoch, place in seen.steps:
        assert (number, divmod(number, 5)) == (global_step, (epoch, place)), seen.steps
    found = {
        "fingerprint": strategy.training.fingerprint(), "steps": trainer.global_step, "epochs": trainer.current_epoch,
        "best": float(best.best_model_score), "kept": sorted(Path(path).name for path in best.best_k_models),
        "rate": trainer.optimizers[0].param_groups[0]["lr"], "accuracy": seen.epochs[max(seen.epochs)],
        "waited": early.wait_count, "metrics": {k: float(v) for k, v in sorted(trainer.callback_metrics.items())},
    }  # fmt: skip
    trainer.save_checkpoint(told.out / "final.ckpt")
    part = told.out / f"{strategy.run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found | {"first": seen.steps[0][0]}))
    part.rename(told.out / f"{strategy.run.name}.json")


if __name__ == "__main__":
    main()
