"""A small model under FSDP2 with everything that makes bits fragile, trained by replicas of any number of ranks."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

import outlast


class Block(nn.Module):
    """Rows that two and four ranks cannot share evenly, and some that eight cannot at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(24, 333), nn.LayerNorm(333), nn.Linear(333, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.dropout(torch.relu(self.norm(self.up(x))), 0.1, self.training))
        return x + hidden


def data() -> list[tuple[Tensor, Tensor]]:
    """The last batch of an epoch is short, and its microbatches are of two sizes."""
    draw = torch.Generator().manual_seed(7)
    return list(zip(torch.randn(83, 24, generator=draw), torch.randint(0, 3, (83,), generator=draw), strict=True))


class Drawn(IterableDataset[tuple[Tensor, Tensor]]):
    """The same as a stream, in an order that random numbers make anew in each pass."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(random.sample(data(), 83))


class Damaged(Dataset[tuple[Tensor, Tensor]]):
    """The same, of which three cannot be read."""

    BAD = (5, 30, 71)

    def __init__(self) -> None:
        self._whole = data()

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.BAD:
            raise ValueError(f"sample {index} is cut short")
        return self._whole[index]


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "list": lambda: {"dataset": data()},
    "stream": lambda: {"dataset": Drawn(), "drop_last": True},
    "damaged": lambda: {"dataset": Damaged(), "bad_samples": 3},
}


def pass_gate(gates: Path | None, step: int) -> None:
    """Wait while the test holds the gate before this step."""
    if gates is not None and (gates / str(step)).exists():
        with (gates / str(step)).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)


def train(
    steps: int,
    shard: bool = True,
    gates: Path | None = None,
    leave: int = -1,
    prints: int = -1,
    evaluate: bool = False,
    source: str = "list",
    **how: Any,
) -> tuple[Any, dict[str, Any]]:
    """Run to the end, or leave the loop after step `leave`, with a fingerprint after step `prints`: (this process's
    part, what it found)."""
    run = outlast.join()
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), nn.Linear(24, 3))
    if shard:
        mesh = run.mesh()
        for module in (*list(model)[:2], model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    training = run.protect(
        model, optimizer, seed=11, scheduler=scheduler, bucket_mb=0.02,
        **({"global_batch_size": 32, "microbatches": 8, "clip_norm": 0.5} | SOURCES[source]() | how),
    )  # fmt: skip
    losses: dict[int, float] = {}
    norms: dict[int, float | None] = {}
    correct: dict[int, float] = {}
    evaluated: dict[str, Any] = {}

    def measure(batch: Any) -> dict[str, Any]:
        return {"loss": functional.cross_entropy(model(batch[0]), batch[1])}

    for step in training.steps(until=steps):
        pass_gate(gates, step.number)
        if evaluate and step.number % 2:
            evaluated[f"before {step.number}"] = training.evaluate(data(), measure, batch_size=6)
        for inputs, targets in step:
            outputs = model(inputs)
            step.metric("correct", (outputs.argmax(1) == targets).float().mean())
            step.backward(functional.cross_entropy(outputs, targets))
        correct[step.number] = step.metrics["correct"]
        losses[step.number], norms[step.number] = step.loss, step.grad_norm
        if evaluate:
            evaluated[f"after {step.number}"] = training.evaluate(data()[:32], measure, batch_size=6)
        if step.number == prints:
            training.fingerprint()
        if step.number == leave:
            break
    if evaluate:
        evaluated["by each"] = training.evaluate(data()[:20], measure)
    found = {
        "fingerprint": training.fingerprint(), "losses": losses, "norms": norms, "correct": correct, "steps": steps,
        "evaluated": evaluated,
    }  # fmt: skip
    return run, json.loads(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--whole", action="store_true", help="shard nothing")
    parser.add_argument("--unclipped", action="store_true")
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--source", choices=SOURCES, default="list")
    parser.add_argument("--leave", type=int, default=-1, help="break after this step")
    parser.add_argument("--prints", type=int, default=-1, help="take a fingerprint after this step")
    parser.add_argument("--only", help="this rank of each replica does")
    parser.add_argument("--guards", type=json.loads, default={})
    parser.add_argument("--rule", type=json.loads, default={})
    args = parser.parse_args()
    how: dict[str, Any] = {"clip_norm": None} if args.unclipped else {}
    how |= {"guards": outlast.Guards(**args.guards)} if args.guards else {}
    how |= {"global_batch_size": 48, "microbatches": 12, **args.rule} if args.rule else {}
    mine = args.only in (None, os.environ.get("OUTLAST_PLACE", "0"))
    leave, prints = (args.leave, args.prints) if mine else (-1, -1)
    run, found = train(args.steps, not args.whole, args.gates, leave, prints, args.evaluate, args.source, **how)
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}-{os.environ.get('OUTLAST_PLACE', '0')}.json")


if __name__ == "__main__":
    main()
