"""The streaming example's data and model, with gates, and what of the stream each step was computed from."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import torch

import outlast
from outlast.examples.models import GPT, next_byte_loss
from outlast.examples.stream_gpt import BATCH, loader

WINDOWS = 120  # of the text: a pass has seven steps, so training goes over several


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(0)
    model = GPT(width=32, depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = run.protect(
        model, optimizer, loader(WINDOWS), global_batch_size=4 * BATCH, microbatches=4, clip_norm=1.0
    )  # fmt: skip
    losses: dict[int, float] = {}
    passes: dict[int, int] = {}
    seen: dict[str, list[Any]] = {}
    for step in training.steps(until=told.steps):
        if told.gates is not None and (told.gates / str(step.number)).exists():
            with (told.gates / str(step.number)).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        batches = seen.setdefault(str(step.number), [])
        for batch in step:
            batches.append(batch.sum().item())
            step.backward(next_byte_loss(model, batch))
        losses[step.number], passes[step.number] = step.loss, step.epoch
    found = {"fingerprint": training.fingerprint(), "losses": losses, "passes": passes, "seen": seen}
    part = told.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(told.out / f"{run.name}.json")


if __name__ == "__main__":
    main()
