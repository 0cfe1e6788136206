"""A training of plain torch and FSDP2 whose gradients are summed up as a run's are: the bits must not see the width."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from outlast.runtime.exchange.shard_sums import ShardSums
from outlast.tensors import like, local

LEAVES = 8


class Block(nn.Module):
    """Shapes that two and four ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 37), nn.LayerNorm(37), nn.Linear(37, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return x + moved


def model_of() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))


def train(width: int, place: int, store: Path | None) -> str:
    """Train as rank `place` of `width`; without `store` as one plain process. SHA-256 of the parameters."""
    torch.set_num_threads(1)
    model, sums = model_of(), ShardSums()
    if store is not None:
        there = dist.FileStore(str(store), width)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=there, rank=place, world_size=width)
        mesh = init_device_mesh("cpu", (width,))
        for module in (*list(model)[:2], model):  # type: ignore[call-overload]
            fully_shard(module, mesh=mesh)
        sums.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(4):
        _gradients(model, sums, step, width, place)
        optimizer.step()
    if store is not None and width > 1:
        dist.barrier()
    sha = hashlib.sha256()
    for param in model.parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        sha.update(whole.detach().numpy().tobytes())
    return sha.hexdigest()


def _gradients(model: nn.Module, sums: ShardSums, step: int, width: int, place: int) -> None:
    """The mean over all microbatches, in the tree's order: microbatch i has weight i + 1."""
    params = list(model.parameters())
    stack: list[tuple[int, list[Tensor]]] = []
    for param in params:
        param.grad = None
    for turn in range(LEAVES // width):
        leaf = turn * width + place
        draw = torch.Generator().manual_seed(1000 * step + leaf)
        weight = (leaf + 1) / 36
        sums.begin(weight)
        model(torch.randn(3, 6, generator=draw)).square().mean().backward()
        size, grads = 1, [local(_grad(param)).clone() * (weight if width == 1 else 1.0) for param in params]
        for param in params:
            param.grad = None
        while stack and stack[-1][0] == size:
            grads = [left + right for left, right in zip(stack.pop()[1], grads, strict=True)]
            size *= 2
        stack.append((size, grads))
    for param, grad in zip(params, stack[0][1], strict=True):
        param.grad = like(grad, param)


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


if __name__ == "__main__":
    width, place, *store = sys.argv[1:]
    print(train(int(width), int(place), Path(store[0]) if store else None))
