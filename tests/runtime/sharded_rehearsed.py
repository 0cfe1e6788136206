"""A small model of several ranks whose optimizer, or loop, may do what a joiner could not repeat: by name."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sharded import Block  # beside this file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import outlast
from outlast.runtime.checks import rehearsal

PLACE = os.environ.get("OUTLAST_PLACE", "0")


class Counting(torch.optim.SGD):
    """Its count is in no state_dict."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / self.count)


class CountingOnOne(Counting):
    """Its count matters on one rank, in rows that no other has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / (self.count if PLACE == "1" else 1))


class Normed(torch.optim.SGD):
    """Each step takes a norm that all ranks add up; it knows the mesh and the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.mesh = self.param_groups[0]["params"][0].device_mesh
        self.ranks = torch.distributed.group.WORLD

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = torch.zeros(1)
        for group in self.param_groups:
            for param in group["params"]:
                total += param.grad.to_local().square().sum()
        torch.distributed.all_reduce(total, group=self.ranks)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.to_local().div_(1.0 + total.sqrt())
        super().step()


class Dying(torch.optim.SGD):
    """A rank of one replica is killed in its second call, which is the first rehearsal, as the other waits for it."""

    calls = 0  # of all copies

    def step(self, closure: Any = None) -> None:
        Dying.calls += 1
        if Dying.calls == 2 and PLACE == "1" and os.environ["OUTLAST_MEMBER"] == "r1.1":
            os.kill(os.getpid(), signal.SIGKILL)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.full_tensor()
        super().step()


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    flat = [param for param in model.parameters() if param.ndim != 2]
    wide = [param for param in model.parameters() if param.ndim == 2]
    return [torch.optim.Muon(wide, lr=0.01), torch.optim.AdamW(flat, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True, amsgrad=True),
    "each": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "muon": muon,
    "normed": lambda model: Normed(model.parameters()),
    "counting": lambda model: Counting(model.parameters()),
    "counting on one": lambda model: CountingOnOne(model.parameters()),
    "dying": lambda model: Dying(model.parameters(), lr=0.1, momentum=0.9),
}


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    return list(zip(torch.randn(64, 24, generator=draw), torch.randint(0, 3, (64,), generator=draw), strict=True))


def built(run: Any, tp: int) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), nn.Linear(24, 3))
    if tp > 1:
        model = nn.Sequential(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 24)), nn.Linear(24, 3))
        parallelize_module(model[0], run.mesh(tp=tp), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model
    for module in (*list(model)[:2], model):
        fully_shard(module, mesh=run.mesh())
    return model


def looked() -> list[bool]:
    """In which steps a rehearsal has kept something to compare: filled as they are made."""
    found: list[bool] = []
    compare = rehearsal.Rehearsal.compare

    def noting(self: Any, step: int) -> None:
        found.append(bool(self._expected))
        compare(self, step)

    rehearsal.Rehearsal.compare = noting  # type: ignore[method-assign]
    return found


class Averages:
    """By hand, of all weights: of what is spread as it is, or what lies here as plain tensors."""

    def __init__(self, model: nn.Module, *, plain: bool) -> None:
        self.held = [(param, self._of(param, plain).clone()) for param in model.parameters()]
        self.plain = plain

    @staticmethod
    def _of(param: Any, plain: bool) -> Any:
        return param.detach().to_local() if plain and hasattr(param, "to_local") else param.detach()

    @torch.no_grad()
    def update(self, _: nn.Module) -> None:
        for param, held in self.held:
            held.lerp_(self._of(param, self.plain), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {str(n): held for n, (_, held) in enumerate(self.held)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for n, (_, held) in enumerate(self.held):
            self._of(held, True).copy_(self._of(state[str(n)], True))


class ModelOfAverages(torch.optim.swa_utils.AveragedModel):
    update = torch.optim.swa_utils.AveragedModel.update_parameters


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "averages": lambda model: Averages(model, plain=False),
    "plain averages": lambda model: Averages(model, plain=True),
    "registered averages": lambda model: Averages(model, plain=False),
    "model of averages": ModelOfAverages,
}


def train(steps: int, name: str, loop: str, tp: int) -> tuple[Any, dict[str, Any]]:
    """(this process's part, what it found)."""
    run = outlast.join()
    rehearsed = looked()
    model = built(run, tp)
    optimizer = OPTIMIZERS[name](model)
    averages = AVERAGES[loop](model) if loop in AVERAGES else None
    extra = {"ema": averages} if loop == "registered averages" else None
    training = run.protect(model, optimizer, data(), global_batch_size=16, microbatches=4, seed=1, state=extra)
    for step in training.steps(until=steps):
        if loop == "writes" or (loop == "writes on one" and PLACE == "1"):
            next(model.parameters()).data.mul_(0.999)
        for inputs, targets in step:
            step.backward(functional.cross_entropy(model(inputs), targets))
        if averages is not None:
            averages.update(model)
    return run, {"fingerprint": training.fingerprint(), "rehearsed": rehearsed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--loop", choices=["plain", "writes", "writes on one", *AVERAGES], default="plain")
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    run, found = train(args.steps, args.optimizer, args.loop, args.tp)
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}-{PLACE}.json")


if __name__ == "__main__":
    main()
