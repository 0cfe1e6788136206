"""Blocks of steps of one model, timed: by two replicas of outlast, or by two ranks of plain DDP over Gloo.

The two take turns: whoever measures opens a gate for each block. A block's time, the device's work included, is
written when it is over. `--rank`: this is that rank of DDP.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import let_threads_copy, pass_gate, write  # beside this file

import outlast
from outlast.examples.data import HelpText
from outlast.examples.models import GPT, next_byte_loss

MICROBATCHES, RANKS = 4, 2


def build(told: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, from one seed, and its AdamW."""
    torch.manual_seed(3)
    model = GPT(width=told.width, depth=6, heads=6, dropout=0.0).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, windows: Tensor, device: torch.device) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16):
        return next_byte_loss(model, windows.to(device))


class Blocks:
    """Times this process's blocks; `begins(step)` is called before each step."""

    def __init__(self, told: argparse.Namespace, name: str) -> None:
        self._told, self._name, self._began_s = told, name, 0.0

    def begins(self, step: int) -> None:
        if step % self._told.block:
            return
        if self._told.device == "cuda":
            torch.cuda.synchronize()
        if step:
            took = {"seconds": time.monotonic() - self._began_s}
            write(self._told.blocks / f"{self._name}-{step // self._told.block}.json", took)
        pass_gate(self._told.gates, step)
        self._began_s = time.monotonic()


def with_outlast(told: argparse.Namespace) -> None:
    if told.thread_copies:
        let_threads_copy()
    run = outlast.join()
    device = run.device if told.device == "cuda" else torch.device(told.device)
    model, optimizer = build(told, device)
    blocks = Blocks(told, run.name)
    training = run.protect(
        model, optimizer, HelpText(), global_batch_size=MICROBATCHES * told.samples, microbatches=MICROBATCHES, seed=11
    )
    for step in training.steps(until=told.steps):
        blocks.begins(step.number)
        for windows in step:
            step.backward(loss_of(model, windows, device))
    write(told.out / f"{run.name}.json", {"fingerprint": training.fingerprint()})


def with_ddp(told: argparse.Namespace) -> None:
    store = f"file://{told.out.absolute() / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=told.rank, world_size=RANKS)
    device = torch.device(told.device)
    model, optimizer = build(told, device)
    ddp = DistributedDataParallel(model)
    blocks = Blocks(told, f"d{told.rank}")
    windows = batches(told)
    for number in range(told.steps):
        blocks.begins(number)
        for left in range(MICROBATCHES // RANKS, 0, -1):
            with ddp.no_sync() if left > 1 else contextlib.nullcontext():
                (loss_of(ddp, next(windows), device) / (MICROBATCHES // RANKS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def batches(told: argparse.Namespace) -> Iterator[Tensor]:
    """This rank's microbatches, in an order drawn at random."""
    data: Any = HelpText()
    draw = torch.Generator().manual_seed(told.rank)
    while True:
        yield torch.stack([data[int(i)] for i in torch.randint(len(data), (told.samples,), generator=draw)])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("steps", "block", "width", "samples"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--thread-copies", action="store_true")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--device", required=True)
    for name in ("gates", "blocks", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    told = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    if told.device == "cpu":
        torch.set_num_threads(1)  # four processes take turns
    (with_outlast if told.rank < 0 else with_ddp)(told)


if __name__ == "__main__":
    main()
