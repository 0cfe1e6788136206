"""A small training whose dataset has samples that cannot be read, with gates."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from pathlib import Path

import torch
from torch import nn

import outlast

BAD = (3, 26, 41, 77)


class Damaged:
    """Numbers with noise; four of them cannot be read."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(3)
        if index in BAD:
            raise ValueError(f"sample {index} is cut short")
        return torch.cat([torch.tensor([index / 96]), noise])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = run.protect(
        model, optimizer, Damaged(), global_batch_size=8, microbatches=4, seed=1, num_workers=1, bad_samples=len(BAD)
    )
    for step in training.steps(until=told.steps):
        if told.gates is not None and (told.gates / str(step.number)).exists():
            with (told.gates / str(step.number)).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        for batch in step:
            step.backward(model(batch).square().mean())
    part = told.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps({"fingerprint": training.fingerprint()}))
    part.rename(told.out / f"{run.name}.json")


if __name__ == "__main__":
    main()
