"""A small model whose modules are cut over ranks by tensor parallelism, by rows as well where there are more ranks."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from sharded import data, pass_gate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import outlast


class Block(nn.Module):
    """A norm that all ranks hold, and a bias that they hold after a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 332), nn.Linear(332, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.dropout(torch.relu(self.up(self.norm(x))), 0.1, self.training))
        return x + hidden


class SequenceBlock(Block):
    """With dropout of what the ranks have cut by columns, and of what they have cut by the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.dropout(torch.relu(self.up(self.norm(x))), 0.1, self.training))
        return x + self.drop(hidden)


class Sequences(nn.Module):
    """Reads a sample's numbers as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(1, 24), nn.LayerNorm(24), nn.Linear(24, 3)
        self.blocks = nn.Sequential(SequenceBlock(), SequenceBlock())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.blocks(self.embed(x.unsqueeze(-1))))).mean(1)
        return found


def sequences_of(mesh: Any, forgotten: bool) -> tuple[nn.Module, list[nn.Module]]:
    """Between the products each rank has its part of the sequence: norms and dropout work on that; `forgotten`: and
    nobody adds up the gradients of the blocks' norms."""
    whole, part = Replicate(), Shard(1)
    model = Sequences()
    outside: dict[str, Any] = {
        "embed": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=part),
        "norm": SequenceParallel(use_local_output=True),
        "head": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole, use_local_output=True),
    }
    inside: dict[str, Any] = {
        "norm": SequenceParallel(use_local_output=True), "up": ColwiseParallel(input_layouts=part),
        "down": RowwiseParallel(output_layouts=part), "drop": SequenceParallel(use_local_output=True),
    }  # fmt: skip
    if forgotten:
        del inside["norm"]
    parallelize_module(model, mesh, outside)
    for block in model.blocks:
        parallelize_module(block, mesh, inside)
    return model, list(model.blocks)


def model_of(run: Any, shard: int, tp: int, sequence: bool, forgotten: bool) -> nn.Module:
    torch.manual_seed(3)
    mesh = run.mesh(shard=shard, tp=tp)
    if sequence:
        model, blocks = sequences_of(mesh["tp"], forgotten)
    else:
        model = nn.Sequential(Block(), Block(), nn.Linear(24, 3))
        blocks = list(model)[:2]
        for block in blocks:  # of a mesh with one dimension "tp" is all of it
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (*blocks, model) if shard > 1 else ():
        fully_shard(module, mesh=mesh["shard"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--forgotten", action="store_true")
    parser.add_argument("--rule", type=json.loads, default={})
    args = parser.parse_args()
    run = outlast.join()
    model = model_of(run, args.shard, args.tp, args.sequence, args.forgotten)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    training = run.protect(
        model, optimizer, data(), seed=11, bucket_mb=0.02, clip_norm=0.5,
        **({"global_batch_size": 32, "microbatches": 8} | args.rule),
    )  # fmt: skip
    losses: dict[int, float] = {}
    norms: dict[int, float | None] = {}
    for step in training.steps(until=args.steps):
        pass_gate(args.gates, step.number)
        for inputs, targets in step:
            step.backward(functional.cross_entropy(model(inputs), targets))
        losses[step.number], norms[step.number] = step.loss, step.grad_norm

    def measure(batch: Any) -> dict[str, Any]:
        return {"loss": functional.cross_entropy(model(batch[0]), batch[1])}

    evaluated = training.evaluate(data()[:20], measure, batch_size=6)
    found = {"fingerprint": training.fingerprint(), "losses": losses, "norms": norms, "evaluated": evaluated}
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}-{os.environ.get('OUTLAST_PLACE', '0')}.json")


if __name__ == "__main__":
    main()
