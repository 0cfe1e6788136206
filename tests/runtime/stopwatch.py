"""A loop that a stopwatch stands beside: each replica writes down when it began, when it was given a step,
when it had computed each microbatch, and when it committed the step."""

from __future__ import annotations

import argparse
import json
import os
import select
import time
from pathlib import Path

import torch
from torch import nn

import outlast

STEP_S = 0.03  # of computing, in a fleet that is whole


def wait_s(seconds: float) -> None:
    """Stand still as a step that computes for so long would; without the processor that others need."""
    select.select([], [], [], seconds)


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample number `slow` takes its time, once."""

    def __init__(self, slow: int, mark: Path) -> None:
        self.slow, self.mark = slow, mark

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.slow and not self.mark.exists():
            self.mark.touch()
            wait_s(3.0)
        return torch.full((16,), index / 1e5), torch.ones(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--asleep", type=json.loads, default={}, help="before the body of a step, seconds by number")
    parser.add_argument("--slow-sample", type=int, default=-1)
    parser.add_argument("--fail-before", type=int, default=0, help="so many starts end by a KeyError")
    parser.add_argument("--later-start-s", type=float, default=0.0, help="whoever is not a slot's first takes so long")
    parser.add_argument("--after-s", type=float, default=0.0, help="the script goes on for so long after its loop")
    args = parser.parse_args()
    run = outlast.join()
    for number in range(args.fail_before):
        try:
            (args.out / f"failed-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        raise KeyError("run")
    if not run.name.endswith(".1"):
        wait_s(args.later_start_s)
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = run.protect(
        model, optimizer, Samples(args.slow_sample, args.out / "slow"), global_batch_size=12, microbatches=6,
        shuffle=False,
    )  # fmt: skip
    clock = os.open(args.out / "clock", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    begun = False
    for step in training.steps(until=args.steps):
        if not begun:
            os.write(clock, f"{step.number} {time.monotonic()!r} {run.name} begin\n".encode())
        begun = True
        os.write(clock, f"{step.number} {time.monotonic()!r} {run.name} open\n".encode())
        seconds = args.asleep.get(str(step.number))
        mark = args.out / f"asleep-{step.number}"
        if seconds and not mark.exists():
            mark.touch()
            wait_s(seconds)
        for inputs, targets in step:
            wait_s(STEP_S / 2)
            step.backward(nn.functional.mse_loss(model(inputs), targets))
            os.write(clock, f"{step.number} {time.monotonic()!r} {run.name} work\n".encode())
        os.write(clock, f"{step.number} {time.monotonic()!r} {run.name} commit\n".encode())
    wait_s(args.after_s)


if __name__ == "__main__":
    main()
