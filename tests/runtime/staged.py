"""A small model as a pipeline over the ranks of each replica, by torch's schedules."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sharded import pass_gate
from sharded_rehearsed import CountingOnOne
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

import outlast

SCHEDULES: dict[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Layers(nn.Module):
    """Four layers by name, of which any may be missing; a constant that all stages have."""

    def __init__(self, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(24, 24), norm(24), nn.Tanh()) for i in range(4)})
        self.dropout = dropout
        self.head: nn.Module | None = nn.Linear(24, 3)
        self.register_buffer("scale", torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + functional.dropout(layer(x), self.dropout, self.training) * self.scale
        return x if self.head is None else self.head(x)


def part_of(model: Layers, stage: int, stages: int) -> Layers:
    """What one stage has of it, under the same names."""
    for name in list(model.layers):
        if int(name) * stages // 4 != stage:
            del model.layers[name]
    if stage < stages - 1:
        model.head = None
    return model


def data(bad: int = -1) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    inputs = torch.randn(80, 24, generator=draw)
    if bad >= 0:
        inputs[bad] = float("nan")
    return list(zip(inputs, torch.randint(0, 3, (80,), generator=draw), strict=True))


def train(
    steps: int, stages: int, kind: str = "gpipe", gates: Path | None = None, bad: int = -1, dropout: float = 0.0,
    wrong: str = "", **how: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """(this process's part, what it found)."""
    run = outlast.join()
    mesh = run.mesh(pipeline=stages)
    place = mesh.get_local_rank("pipeline")
    torch.manual_seed(3)
    norm = nn.BatchNorm1d if wrong == "statistics" else nn.LayerNorm
    model: nn.Module = part_of(Layers(dropout, norm), place, stages)
    if wrong == "names":
        model = nn.Sequential(*model.layers.values(), *([model.head] if model.head is not None else []))
    stage = PipelineStage(model, place, stages, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = SCHEDULES[kind](stage, 4, loss_fn=functional.cross_entropy)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if wrong == "counting":
        optimizer = CountingOnOne(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    training = run.protect(
        model, optimizer, data(bad), scheduler=scheduler, seed=11, bucket_mb=0.004,
        **({"global_batch_size": 32, "microbatches": 4, "drop_last": True} | how),
    )  # fmt: skip
    losses: dict[int, float] = {}
    norms: dict[int, float | None] = {}
    for step in training.steps(until=steps):
        pass_gate(gates, step.number)
        if wrong == "frozen" and step.number == 2 and place == 0:
            next(model.parameters()).requires_grad_(False)
        for inputs, targets in step:
            if wrong == "backward":
                step.backward(functional.cross_entropy(model(inputs), targets))
            step.pipeline(schedule, inputs, target=targets)
        losses[step.number], norms[step.number] = step.loss, step.grad_norm
    found = {"fingerprint": training.fingerprint(), "losses": losses, "norms": norms}
    return run, json.loads(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--kind", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--bad", type=int, default=-1, help="this sample is no number")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--wrong", default="", help="done with the model, or in the loop")
    parser.add_argument("--how", type=json.loads, default={"clip_norm": 0.5})
    args = parser.parse_args()
    run, found = train(args.steps, args.stages, args.kind, args.gates, args.bad, args.dropout, args.wrong, **args.how)
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}-{os.environ.get('OUTLAST_PLACE', '0')}.json")


if __name__ == "__main__":
    main()
