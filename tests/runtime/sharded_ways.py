"""FSDP2 as people use it, all at once: mixed precision, checkpointed activations, frozen and tied weights, BatchNorm,
parameters that stay whole after the forward pass, a model that was made on the meta device."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import outlast


class Block(nn.Module):
    """A residual block whose activations are computed twice."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = checkpoint(self._added, x, use_reentrant=False)
        return x + added

    def _added(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return found


class Model(nn.Module):
    """A table tied with the output, and two blocks between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList([Block(24, 53), Block(24, 40)])
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def train(steps: int) -> tuple[Any, dict[str, Any]]:
    """Run to the end: (this process's part, what it found)."""
    run = outlast.join()
    with torch.device("meta"):
        model = Model()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    first, second = model.blocks
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    fully_shard(first.down, mesh=run.mesh(), mp_policy=half)
    fully_shard(second, mesh=run.mesh(), reshard_after_forward=False)
    fully_shard(model, mesh=run.mesh())
    model.to_empty(device="cpu")
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, 0.01 * (number + 1))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    with torch.no_grad():
        model.table.weight.add_(_spread(model.table.weight))
    second.up.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    draw = torch.Generator().manual_seed(7)
    data = list(zip(*torch.randint(0, 37, (2, 64), generator=draw), strict=True))
    training = run.protect(model, optimizer, data, global_batch_size=32, microbatches=8, seed=1, clip_norm=1.0)
    losses: dict[int, float] = {}
    for step in training.steps(until=steps):
        for tokens, targets in step:
            step.backward(functional.cross_entropy(model(tokens).float(), targets))
        losses[step.number] = step.loss
    buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    return run, json.loads(json.dumps({"fingerprint": training.fingerprint(), "losses": losses, "buffers": buffers}))


def _spread(param: Any) -> Any:
    """Unlike values in each row, whoever holds it."""
    from torch.distributed.tensor import distribute_tensor

    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(3))
    return distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run, found = train(args.steps)
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}-{os.environ.get('OUTLAST_PLACE', '0')}.json")


if __name__ == "__main__":
    main()
