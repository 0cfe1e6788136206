"""FSDP2 with what loops do beside: float16 under a scaler that overflows, an average of the weights, learning rates set
by hand, a weight that is drawn before each step and added up after it, two optimizers, and an end that the loop decides
on."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from sharded import Block, data, pass_gate  # beside this file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import outlast

STOP = 24


class Average:
    """An exponential average of the parameters, sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = {name: param.detach().clone() for name, param in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, param in self._model.named_parameters():
            self.values[name].lerp_(param.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.values[name].copy_(value)


class Tally:
    """What the loop adds up."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.total = values["total"]


def train(steps: int, gates: Path | None = None) -> tuple[Any, dict[str, Any]]:
    """Run until the loop stops it: (this process's part, what it found)."""
    run = outlast.join()
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), nn.Linear(24, 3))
    for module in (*list(model)[:2], model):
        fully_shard(module, mesh=run.mesh())
    body = torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()], lr=1e-2)
    head = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3, growth_factor=8.0)
    average, tally, own = Average(model), Tally(), torch.Generator()
    training = run.protect(
        model, [body, head], data(), global_batch_size=32, microbatches=8, seed=11, clip_norm=0.5, bucket_mb=0.02,
        scaler=scaler, state={"average": average, "tally": tally, "own": own},
    )  # fmt: skip
    training.after_step(average.update)
    losses: dict[int, float] = {}
    overflows = 0
    for step in training.steps(until=steps):
        pass_gate(gates, step.number)
        for group in head.param_groups:
            group["lr"] = 0.1 / (1 + step.number)
        weight = 0.5 + float(torch.rand((), generator=own))
        for inputs, targets in step:
            with torch.autocast("cpu", torch.float16):
                loss = functional.cross_entropy(model(inputs), targets)
            step.backward(loss * weight)
        tally.total += weight + float(torch.rand((), generator=own))
        losses[step.number] = step.loss
        overflows += step.grad_norm is not None and not step.grad_norm < float("inf")
        if step.number == STOP:
            training.stop("it has learned enough")
    averaged = {name: value.full_tensor().double().sum().item() for name, value in average.values.items()}
    found = {
        "fingerprint": training.fingerprint(), "losses": losses, "average": averaged, "scale": scaler.get_scale(),
        "overflows": overflows, "stopped": training.stopped, "tally": tally.total,
    }  # fmt: skip
    return run, json.loads(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gates", type=Path)
    args = parser.parse_args()
    run, found = train(args.steps, args.gates)
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}-{os.environ.get('OUTLAST_PLACE', '0')}.json")


if __name__ == "__main__":
    main()
