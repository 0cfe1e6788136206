"""The training that strikes from outside interrupt: some twenty seconds of small steps. Run by `outlast run -m`.

It appends every step that it commits to a file of its own, and writes what it ended with.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import outlast
from outlast.prove._commit_log import StepWriter

__all__ = ["main"]

_TOKENS, _WIDTH = 256, 96


class _Model(nn.Module):
    """Several buckets, dropout, a batch norm's buffers, a table of which each microbatch uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(_TOKENS, _WIDTH) * 0.1)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.norm = nn.BatchNorm1d(4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = functional.dropout(torch.relu(self.norm(self.up(self.table[tokens]))), 0.1)
        return functional.linear(self.down(hidden), self.table)


def _data() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, _TOKENS, (4096, 2), generator=torch.Generator().manual_seed(7))
    return [(row[0], row[1]) for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--until", type=int, help="do only the first so many of them")
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each step")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--batch", type=int, default=32, help="samples a microbatch")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(3)
    model = _Model().to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    training = run.protect(
        model,
        optimizer,
        _data(),
        global_batch_size=args.batch * args.microbatches,
        microbatches=args.microbatches,
        seed=11,
        scheduler=scheduler,
        clip_norm=0.5,
        bucket_mb=0.2,
    )
    pause = threading.Event()
    log = StepWriter(args.folder / "commits", run.name)
    for step in training.steps(until=args.until or args.steps):
        for tokens, targets in step:
            step.backward(functional.cross_entropy(model(tokens).float(), targets))
        log.committed(step.number, step.loss)
        pause.wait(args.pause_s)
    end = args.folder / "ends" / f"{run.name}.{os.getpid()}"
    part = args.folder / f"{end.name}.part"
    part.write_text(json.dumps({"fingerprint": training.fingerprint()}))
    part.rename(end.with_suffix(".json"))


if __name__ == "__main__":
    main()
