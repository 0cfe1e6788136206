"""The training that `tests/device/run` tries on a device: a table, norms, dropout and bfloat16 under AdamW.

Each replica that reaches the end writes what it has. `--bad N`: sample N holds a NaN. `--rule`: more arguments of
`protect`, as JSON. `--thread-copies`: a thread of the host copies the outcome, never the device itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import outlast

WORDS, LENGTH, SAMPLES = 50, 12, 96


class Model(nn.Module):
    """Guess a class of a few words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, 32), nn.BatchNorm1d(96)
        self.up, self.down, self.head = nn.Linear(32, 96), nn.Linear(96, 32), nn.Linear(32, 5)

    def forward(self, words: Tensor, factor: Tensor) -> Tensor:
        x = self.table(words).mean(1) * factor
        x = x + functional.dropout(self.down(torch.relu(self.norm(self.up(x)))), 0.1, self.training)
        found: Tensor = self.head(x)
        return found


def data(bad: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(words, a factor of one, class)."""
    draw = torch.Generator().manual_seed(5)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=draw)
    factors, classes = torch.ones(SAMPLES, 1), torch.randint(0, 5, (SAMPLES,), generator=draw)
    if bad >= 0:
        factors[bad] = float("nan")
    return list(zip(words, factors, classes, strict=True))


def pass_gate(gates: Path | None, step: int) -> None:
    """Wait while whoever tries this holds the gate before the step; a file says that this process has come to it."""
    import fcntl

    if gates is not None and (gates / str(step)).exists():
        (gates / f"{step}.{os.getpid()}").touch()
        with (gates / str(step)).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)


def let_threads_copy() -> None:
    """The device reads nothing in others' memory, as where pages cannot be locked."""
    from outlast.runtime.training._straight_copies import CudaPageLocks

    CudaPageLocks.lock = lambda *_: False  # type: ignore[method-assign]


def write(path: Path, found: dict[str, Any]) -> None:
    """All of it, or nothing yet."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(path)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW of this kind: plain, or with the option of this name."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **({} if kind == "plain" else {kind: True}))


def scaler_of(device: torch.device) -> torch.amp.GradScaler:
    """Far too large at first, and soon again."""
    return torch.amp.GradScaler(device.type, init_scale=2.0**24, growth_interval=5, growth_factor=16.0)


def train(told: argparse.Namespace, device: torch.device, run: Any) -> dict[str, Any]:
    """Run to the end; what this process found."""
    torch.manual_seed(3)
    model = Model().to(device)
    optimizer = optimizer_of(told.optimizer, model)
    if told.compiled:
        model.compile()  # in place: names are those of the plain model
    scaler = scaler_of(device) if told.fp16 else None
    training = run.protect(
        model, optimizer, data(told.bad), global_batch_size=24, microbatches=4, seed=11, clip_norm=told.clip,
        bucket_mb=0.01, guards=told.guards, scaler=scaler, checks=told.checks or None, **json.loads(told.rule),
    )  # fmt: skip
    losses: dict[int, float] = {}
    overflows = 0
    for step in training.steps(until=told.steps):
        pass_gate(told.gates, step.number)
        for batch in step:
            words, factor, classes = (part.to(device) for part in batch)
            with torch.autocast(device.type, torch.float16 if told.fp16 else torch.bfloat16):
                found = model(words, factor)
            step.backward(functional.cross_entropy(found.float(), classes))
        losses[step.number] = step.loss
        overflows += step.grad_norm is not None and not math.isfinite(step.grad_norm)
    staging = training.engine.staging
    straight = staging.straight if staging is not None else None
    shown: dict[str, Any] = {"losses": {k: str(v) for k, v in losses.items()}, "overflows": overflows}
    shown |= {"buckets": len(training.engine.layout.buckets), "straight": straight.num_taken if straight else 0}
    return shown | {"fingerprint": training.fingerprint(), "scale": scaler.get_scale() if scaler else 1.0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--bad", type=int, default=-1)
    parser.add_argument("--guards", default="default")
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--thread-copies", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--optimizer", default="plain")
    parser.add_argument("--checks", default="")
    parser.add_argument("--rule", default="{}")
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    if told.thread_copies:
        let_threads_copy()
    run = outlast.join()
    device = run.device if told.device == "cuda" else torch.device(told.device)
    write(told.out / f"{run.name}.json", train(told, device, run))


if __name__ == "__main__":
    main()
