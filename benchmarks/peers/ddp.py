"""Plain DDP: accumulates its microbatches under no_sync, all-reduces with the last one's backward.

Also what torchrun and a plain restart run: with --checkpoint it saves every --every steps and resumes from there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks._probe import Probe
from benchmarks._workload import MODELS, build, loss_of, microbatch, samples, share


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    probe = Probe(rank)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout_s))
    model, optimizer = build(args.model, args.seed)
    first = load(args.checkpoint, model, optimizer)
    wrapped = DistributedDataParallel(model)
    dataset, mine = samples(args.model), share(rank, world, args.microbatches)
    for step in range(first, args.steps):
        train_step(wrapped, dataset, args, step, mine, probe)
        optimizer.step()
        optimizer.zero_grad()
        probe.commit(step)
        if args.checkpoint and rank == 0 and (step + 1) % args.every == 0:
            save(args.checkpoint, step + 1, model, optimizer)
    dist.barrier()


def train_step(
    model: DistributedDataParallel, dataset: Any, args: argparse.Namespace, step: int, mine: range, probe: Probe
) -> None:
    size = MODELS[args.model].samples
    for number in mine:
        with probe.computing(), contextlib.nullcontext() if number == mine[-1] else model.no_sync():
            data = microbatch(dataset, size, step * args.microbatches + number)
            (loss_of(model, data) / len(mine)).backward()


def parser(what: str | None) -> argparse.ArgumentParser:
    """The options that all workers take."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--model", default="0.15M")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    return parser


def parse() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--checkpoint", type=Path)
    options.add_argument("--every", type=int, default=25)
    return options.parse_args()


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    Path(file.name).replace(path)


def load(path: Path | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if path is None or not path.exists():
        return 0
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


if __name__ == "__main__":
    main()
