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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


def model_of(run: Any, shard: int, tp: int) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), nn.Linear(24, 3))
    mesh = run.mesh(shard=shard, tp=tp)
    cut: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in list(model)[:2]:
        parallelize_module(block, mesh["tp"], cut)  # of a mesh with one dimension this is all of it
    for module in (*list(model)[:2], model) if shard > 1 else ():
        fully_shard(module, mesh=mesh["shard"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rule", type=json.loads, default={})
    args = parser.parse_args()
    run = outlast.join()
    model = model_of(run, args.shard, args.tp)
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
