"""A script with variables that live from step to step: `carrying.py KIND --steps N --out DIR`.

`logs`: they are for what it prints alone. `steers`: a count weighs the loss. `draws`: a generator of its own does.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import outlast

MODEL = torch.nn.Linear(4, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.05)


def logs(steps: Any) -> None:
    n, average, best, begun = 0, 0.0, float("inf"), time.monotonic()
    for step in steps:
        for group in OPTIMIZER.param_groups:
            group["lr"] = 0.05 / (1 + step.number)
        for batch in step:
            step.backward(MODEL(batch).square().mean())
        n = n + 1
        average = 0.9 * average + 0.1 * step.loss
        took, begun = time.monotonic() - begun, time.monotonic()
        best = min(best, step.loss)
        print(f"{n} {average} {best} {took}")


def steers(steps: Any) -> None:
    n = 0
    for step in steps:
        n = n + 1
        for batch in step:
            step.backward(MODEL(batch).square().mean() * (1 + 0.1 * n))


def draws(steps: Any) -> None:
    rng = torch.Generator().manual_seed(1)
    for step in steps:
        weight = torch.rand((), generator=rng)
        for batch in step:
            step.backward(MODEL(batch).square().mean() * weight)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["logs", "steers", "draws"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run = outlast.join()
    data = list(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    torch.nn.init.ones_(MODEL.weight)
    torch.nn.init.zeros_(MODEL.bias)
    training = run.protect(MODEL, OPTIMIZER, data, global_batch_size=16, microbatches=4)
    {"logs": logs, "steers": steers, "draws": draws}[args.kind](training.steps(until=args.steps))
    (args.out / f"{run.name}.done").touch()


if __name__ == "__main__":
    main()
