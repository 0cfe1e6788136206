"""The training that faults are put into: small, and with everything that makes bits fragile.

Several buckets of several blocks, BatchNorm, dropout, clipping, a scheduler, two parameter groups, a tied parameter,
one that is never used and one that is first used late, so that its optimizer state appears in the middle of the run.
Each replica that reaches the end writes what it has; `train` without a launcher is a fleet of one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import outlast

LATE = 5  # the step from which on the late parameter takes part
MEMORY_S = 30.0


class Model(nn.Module):
    """Token embedding tied with the output, a block with BatchNorm and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(300, 128) * 0.1)
        self.up = nn.Linear(128, 640)
        self.norm = nn.BatchNorm1d(640)
        self.down = nn.Linear(640, 128)
        self.unused = nn.Parameter(torch.ones(7))
        self.late = nn.Parameter(torch.ones(128))

    def forward(self, tokens: Tensor, late: bool) -> Tensor:
        hidden = functional.dropout(torch.relu(self.norm(self.up(self.table[tokens]))), 0.1)
        hidden = self.down(hidden)
        return functional.linear(hidden * self.late if late else hidden, self.table)


def data(microbatches: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tokens; the last batch of an epoch is short, and its microbatches are of two sizes."""
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 300, (22 * microbatches + 3, 2), generator=draw)
    return [(row[0], row[1]) for row in tokens]


def pass_gate(gates: Path | None, step: int) -> None:
    """Wait while the test holds the gate before this step."""
    if gates is not None and (gates / str(step)).exists():
        with (gates / str(step)).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)


def saves_ready(training: Any) -> bool:
    """Wait for what saves need and what is made beside the first steps: memory, and the coordinator's word of the
    place. Whether there was anything to wait for: the first step is made without."""
    saves = training.replica.saves
    if saves is None or saves._prepared is None:
        return saves is None
    concurrent.futures.wait([saves._prepared], MEMORY_S)
    saves._await(lambda: saves._base is not None, lambda: False, MEMORY_S)
    return True


def train(
    steps: int,
    microbatches: int,
    dtype: torch.dtype,
    workers: int = 0,
    gates: Path | None = None,
    rule: dict[str, Any] | None = None,
    checkpoint: Any = "auto",
) -> tuple[Any, dict[str, Any]]:
    """Run to the end: (this process's part, what it found)."""
    run = outlast.join()
    torch.manual_seed(3)
    model = Model().to(dtype)
    slow = [model.table, model.unused]
    fast = [p for p in model.parameters() if all(p is not q for q in slow)]
    optimizer = torch.optim.AdamW([{"params": slow, "lr": 1e-3}, {"params": fast, "lr": 1e-2}])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    training = run.protect(
        model, optimizer, data(microbatches), global_batch_size=4 * microbatches, microbatches=microbatches, seed=11,
        scheduler=scheduler, clip_norm=0.5, bucket_mb=0.3, num_workers=workers, checkpoint=checkpoint,
        **(rule or {}),
    )  # fmt: skip
    burden = torch.ones(400, 400) if run.name.startswith(os.environ.get("SLOW_REPLICA", "?")) else None
    losses: dict[int, float] = {}
    norms: dict[int, float | None] = {}
    ready = gates is None
    for step in training.steps(until=steps):
        ready = ready or saves_ready(training)  # who waits at gates for the save of a step has to be able to make it
        pass_gate(gates, step.number)
        for tokens, targets in step:
            for _ in range(10 if burden is not None else 0):
                torch.mm(burden, burden)  # type: ignore[arg-type]
            logits = model(tokens, late=step.number >= LATE).float()
            step.backward(functional.cross_entropy(logits, targets))
        losses[step.number], norms[step.number] = step.loss, step.grad_norm
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found = {
        "fingerprint": training.fingerprint(), "model": sha.hexdigest(), "rates": scheduler.get_last_lr(),
        "losses": losses, "norms": norms, "steps": steps,
    }  # fmt: skip
    assert all(math.isfinite(loss) for loss in losses.values())
    return run, json.loads(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--checkpoint", type=json.loads, help="arguments of outlast.Checkpoint")
    parser.add_argument("--rule", type=json.loads, help="arguments of protect")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    keep = outlast.Checkpoint(**args.checkpoint) if args.checkpoint else "auto"
    dtype = getattr(torch, args.dtype)
    run, found = train(args.steps, args.microbatches, dtype, args.workers, args.gates, args.rule, keep)
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}.json")


if __name__ == "__main__":
    main()
