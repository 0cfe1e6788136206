"""The training that campaigns put faults into: small, with what makes bits fragile. Run by `outlast run -m`.

Several buckets of several blocks, dropout, clipping, module buffers, a scheduler, optimizer state that appears late.
It waits at gates (locked files) while the campaign holds them, and writes what it ended with.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import outlast

__all__ = ["main"]

_LATE = 5  # the step from which on the late parameter takes part


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(300, 128) * 0.1)
        self.up = nn.Linear(128, 640)
        self.norm = nn.BatchNorm1d(640)
        self.down = nn.Linear(640, 128)
        self.late = nn.Parameter(torch.ones(128))

    def forward(self, tokens: Tensor, late: bool) -> Tensor:
        hidden = functional.dropout(torch.relu(self.norm(self.up(self.table[tokens]))), 0.1)
        hidden = self.down(hidden)
        return functional.linear(hidden * self.late if late else hidden, self.table)


def _data(microbatches: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, 300, (14 * microbatches + 3, 2), generator=torch.Generator().manual_seed(7))
    return [(row[0], row[1]) for row in tokens]


def _pass_gate(gates: Path, step: int) -> None:
    if (gates / str(step)).exists():
        outlast.pause(600.0)
        with (gates / str(step)).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--audit", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(3)
    model = _Model().to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    training = run.protect(
        model,
        optimizer,
        _data(args.microbatches),
        global_batch_size=4 * args.microbatches,
        microbatches=args.microbatches,
        seed=11,
        scheduler=scheduler,
        clip_norm=0.5,
        bucket_mb=0.3,
        audit=args.audit,
    )
    losses: list[tuple[int, float]] = []
    for step in training.steps(until=args.steps):
        _pass_gate(args.folder / "gates", step.number)
        for tokens, targets in step:
            logits = model(tokens, late=step.number >= _LATE).float()
            step.backward(functional.cross_entropy(logits, targets))
        losses.append((step.number, step.loss))
    part = args.folder / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps({"fingerprint": training.fingerprint(), "losses": losses}))
    part.rename(args.folder / f"{run.name}.json")


if __name__ == "__main__":
    main()
