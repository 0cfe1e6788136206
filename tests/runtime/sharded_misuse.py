"""What is done by habit to a sharded model, in a process of its own: prints, as JSON, what each was told."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import outlast
from outlast.errors import OutlastError
from outlast.tensors import is_shard


def build(run: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    fully_shard(model, mesh=run.mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(
    habit: Callable[[nn.Module, torch.optim.Optimizer, Tensor], object], after: bool = False, **how: Any
) -> dict[str, Any]:
    """Two steps with a habit after each backward, or after each step."""
    run = outlast.join()
    model, optimizer = build(run)
    data = list(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    try:
        training = run.protect(model, optimizer, data, global_batch_size=4, microbatches=2, seed=1, **how)
        losses = []
        for step in training.steps(until=2):
            for batch in step:
                step.backward(model(batch).square().mean())
                if not after:
                    habit(model, optimizer, batch)
            if after:
                habit(model, optimizer, data[0])
            losses.append(step.loss)
    except OutlastError as error:
        return {"error": type(error).__name__, "text": str(error)}
    grads = [param.grad is None for param in model.parameters()]
    return {"losses": losses, "fingerprint": training.fingerprint(), "over": all(grads)}


def plainly(habit: Callable[[nn.Module, torch.optim.Optimizer, Tensor], object], after: bool = False) -> dict[str, Any]:
    """As `train`, in the plain loop."""
    os.environ["OUTLAST"] = "off"
    try:
        return train(habit, after)
    finally:
        del os.environ["OUTLAST"]


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """No habit."""


def clips(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.step()


def zeroes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()


def own_backward(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Of a loss that is not protected: its gradient goes nowhere."""
    model(batch).abs().sum().backward()


def evaluated() -> dict[str, Any]:
    """A forward before `protect`, and evaluations: what the state and the loop find after them."""
    run = outlast.join()
    model, optimizer = build(run)
    data = list(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    looks(model, optimizer, data[0])
    training = run.protect(model, optimizer, data, global_batch_size=4, microbatches=2, seed=1)
    state, losses, shards = training.engine.state, [], [list(training.engine.state.names)]
    for step in training.steps(until=2):
        for batch in step:
            step.backward(model(batch).square().mean())
        before = state.fingerprint()
        training.evaluate(data, lambda batch: {"loss": model(batch).square().mean()})
        shards.append([name for name, param in model.named_parameters() if is_shard(param)])
        looks(model, optimizer, data[0])
        assert not any(is_shard(param) for param in model.parameters())
        assert state.fingerprint() == before
        assert all(is_shard(tensor) for tensor in state.tensors().values())
        losses.append(step.loss)
    looks(model, optimizer, data[0])
    return {"losses": losses, "fingerprint": training.fingerprint(), "shards": shards}


def looks(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """A forward that no backward follows, in the middle of a step or after it: FSDP keeps the root's whole weights."""
    with torch.no_grad():
        model(batch)


def main() -> None:
    found = {
        "plain": train(nothing),
        "clips": train(clips),
        "clips after the step": train(clips, after=True),
        "off": plainly(nothing),
        "off, own backward": plainly(own_backward),
        "off, zeroes": plainly(zeroes),
        "off, clips": plainly(clips),
        "off, clips after the step": plainly(clips, after=True),
        "steps": train(steps),
        "zeroes": train(zeroes),
        "own backward": train(own_backward),
        "looks": train(looks),
        "looks after the step": train(looks, after=True),
        "evaluates": evaluated(),
        "audit": train(nothing, audit=0.5),
        "audit auto": train(nothing, audit="auto"),
        "audit_params": train(nothing, audit_params=["0.weight"]),
        "checks": train(nothing, checks="abft"),
    }
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
