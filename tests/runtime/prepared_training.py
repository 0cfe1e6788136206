"""A model that Accelerate or Fabric has prepared, in outlast's loop: mixed precision is theirs, the step outlast's."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outlast
from outlast.adapters.prepared import backward, protect_prepared


def prepared(library: str, model: nn.Module, optimizer: Any, scheduler: Any) -> tuple[Any, Any, Any]:
    """As the library's own pages say."""
    if library == "accelerate":
        from accelerate import Accelerator

        made: tuple[Any, Any, Any] = Accelerator(mixed_precision="bf16", cpu=True).prepare(model, optimizer, scheduler)
        return made
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    return *fabric.setup(model, optimizer), scheduler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, told.steps)
    model, optimizer, scheduler = prepared(told.library, model, optimizer, scheduler)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(90, 8, generator=draw)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4, shuffle=True)
    training = protect_prepared(
        run, model, optimizer, loader, microbatches=4, scheduler=scheduler, clip_norm=1.0
    )  # fmt: skip
    losses = {}
    for step in training.steps(until=told.steps):
        if told.gates is not None and (told.gates / str(step.number)).exists():
            with (told.gates / str(step.number)).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        for images, labels in step:
            backward(step, nn.functional.cross_entropy(model(images), labels))
        losses[step.number] = step.loss
    found = {
        "fingerprint": training.fingerprint(), "rate": optimizer.param_groups[0]["lr"],
        "buffers": [float(b.double().sum()) for b in model.buffers()], "last": losses[told.steps - 1],
    }  # fmt: skip
    part = told.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(told.out / f"{run.name}.json")


if __name__ == "__main__":
    main()
