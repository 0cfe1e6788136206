"""Train a compiled GPT in numbers of fewer bits: `outlast run --replicas 2 gpt_precision.py --precision fp16`.

bf16: autocast, which needs nothing else. fp16: autocast under a gradient scale. masters: parameters in bfloat16, of
which the optimizer keeps copies in float32 and takes its steps there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

import outlast
from outlast.examples._script import parse, write_result
from outlast.examples.data import HelpText
from outlast.examples.models import GPT, next_byte_loss


class MasterAdamW(torch.optim.Optimizer):
    """AdamW for parameters of few bits: what it keeps of each is in float32, the parameter itself among it."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step in float32, and round the parameters to what they are kept in."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    master = param.float()
                    self.state[param] |= {"master": master, "exp_avg": torch.zeros_like(master)}
                    self.state[param] |= {"exp_avg_sq": torch.zeros_like(master), "step": torch.tensor(0.0)}
            rows = [self.state[param] for param in params]
            kept = {key: [row[key] for row in rows] for key in ("master", "exp_avg", "exp_avg_sq", "step")}
            adamw(
                kept["master"], [param.grad.float() for param in params], kept["exp_avg"], kept["exp_avg_sq"], [],
                kept["step"], amsgrad=False, beta1=0.9, beta2=0.999, lr=group["lr"],
                weight_decay=group["weight_decay"], eps=1e-8, maximize=False,
            )  # fmt: skip
            for param, master in zip(params, kept["master"], strict=True):
                param.copy_(master)


def build(
    precision: str, device: torch.device, compiled: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler | None, Callable[[], AbstractContextManager[Any]]]:
    """The model, its optimizer, its gradient scaler if it needs one, and what a forward runs in."""
    model = GPT(dropout=0.0).to(device)
    if precision == "masters":
        model = model.to(torch.bfloat16)
    for block in model.blocks if compiled else ():
        block.compile()  # in place: names and checkpoints are those of the plain model
    if precision == "masters":
        return model, MasterAdamW(model.parameters(), lr=3e-3), None, contextlib.nullcontext
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, growth_interval=4) if precision == "fp16" else None
    fused = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    return model, fused, scaler, lambda: torch.autocast(device.type, dtype=half)


def main() -> None:
    args = parse(__doc__, steps=200, precisions=("bf16", "fp16", "masters"))
    run = outlast.join()
    torch.manual_seed(args.seed)
    model, optimizer, scaler, autocast = build(args.precision, run.device)
    training = run.protect(
        model, optimizer, HelpText(), clip_norm=1.0, scaler=scaler,
        global_batch_size=32, microbatches=args.microbatches, seed=args.seed,
        drop_last=True,  # a short batch would be compiled for its own shape
    )  # fmt: skip
    losses: dict[int, float] = {}
    for step in training.steps(until=args.steps):
        for batch in step:
            with autocast():
                loss = next_byte_loss(model, batch.to(run.device))
            step.backward(loss)
        losses[step.number] = step.loss
    if run.is_writer:
        write_result(args.out, fingerprint=training.fingerprint(), losses=losses, steps=args.steps)


if __name__ == "__main__":
    main()
