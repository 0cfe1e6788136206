"""The training that guards are tried on: a small network with BatchNorm on data that may be bad in named samples.

`--bad WHAT@INDEX`: a sample whose values make WHAT not finite: `value` (it holds a NaN itself), `log` (the model takes
the logarithm of zero), `backward` (the square root of zero: its loss is finite, its gradient is not), `huge` (a spike).
Each replica that reaches the end writes what it has.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outlast

NUM_SAMPLES, WIDTH = 96, 12


class Roots(nn.Module):
    """Square roots of what was found: the derivative at zero is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 64)
        self.norm = nn.BatchNorm1d(64)
        self.roots = Roots()
        self.last = nn.Linear(64, 2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x))) + 1.0
        hidden = self.roots((hidden * scale[:, :1]).abs()) * scale[:, 1:2]
        return self.last(hidden) + torch.log(scale[:, 2:3])


def data(bad: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(inputs, three factors, target). The factors are one in a good sample."""
    draw = torch.Generator().manual_seed(5)
    rows = [
        (torch.randn(WIDTH, generator=draw), torch.ones(3), torch.randn(2, generator=draw)) for _ in range(NUM_SAMPLES)
    ]
    for order in bad.split(",") if bad else ():
        what, _, index = order.partition("@")
        x, scale, target = rows[int(index)]
        if what == "value":
            x[3] = float("nan")
        elif what == "log":
            scale[2] = 0.0
        elif what == "backward":
            scale[0] = 0.0
        else:
            target *= 1e4
    return rows


def stray(model: nn.Module, replica: str, order: str) -> None:
    """`r1@9`: in step 9 the first gradient that r1 computes comes out ten thousand times too large, once."""
    who, _, when = order.partition("@")
    if not order or replica.partition(".")[0] != who:
        return
    done: list[int] = []

    def hook(grad: Tensor) -> Tensor:
        if NOW[0] != int(when) or done:
            return grad
        done.append(1)
        return grad * 1e4

    model.first.weight.register_hook(hook)


NOW = [0]


def sharded(model: nn.Module, mesh: Any) -> None:
    """Spread it over the ranks of the replica, in two parts."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def train(
    steps: int,
    microbatches: int,
    bad: str,
    guards: str,
    optimizer: str = "adamw",
    strayed: str = "",
    shard: bool = False,
    gates: Path | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Run to the end: (this process's part, what it found)."""
    run = outlast.join()
    torch.manual_seed(3)
    model = Model()
    if shard:
        sharded(model, run.mesh())
    stray(model, run.name, strayed)
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    chosen = make(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(chosen, 10)
    wanted = outlast.Guards(**json.loads(guards)) if guards.startswith("{") else guards
    training = run.protect(
        model, chosen, data(bad), global_batch_size=3 * microbatches, microbatches=microbatches, seed=11,
        scheduler=scheduler, bucket_mb=0.003, guards=wanted,
    )  # fmt: skip
    hashes, losses = [training.fingerprint()], []
    for step in training.steps(until=steps):
        if gates is not None and (gates / str(step.number)).exists():
            with (gates / str(step.number)).open() as file:  # while the test holds it
                fcntl.flock(file, fcntl.LOCK_SH)
        NOW[0] = step.number
        for x, scale, target in step:
            step.backward((model(x, scale) - target).square().mean())
        hashes.append(training.fingerprint())
        losses.append(step.loss)
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode() + whole(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    state = training.replica.guards.state
    found = {
        "model": sha.hexdigest(), "hashes": hashes, "rates": scheduler.get_last_lr(), "skipped": state.skipped,
        "left_out": state.left_out, "passed": state.passed, "losses": [str(loss) for loss in losses],
        "first": int(len(losses) < steps),
    }  # fmt: skip
    return run, json.loads(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--bad", default="")
    parser.add_argument("--guards", default="default")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--stray", default="")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run, found = train(
        args.steps, args.microbatches, args.bad, args.guards, args.optimizer, args.stray, args.shard, args.gates
    )
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    place = os.environ.get("OUTLAST_PLACE", "0")
    part.rename(args.out / f"{run.name}{f'-{place}' if args.shard else ''}.json")


if __name__ == "__main__":
    main()
