"""The scenario's training with audits, and with bits that flip where the test says."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from scenario import LATE, Model, data
from torch.nn import functional

import outlast


def train(
    steps: int, microbatches: int, audit: Any, dtype: torch.dtype, guards: str = "default", critical: str = ""
) -> tuple[Any, dict[str, Any]]:
    run = outlast.join()
    torch.manual_seed(3)
    model = Model().to(dtype)
    slow = [model.table, model.unused]
    fast = [p for p in model.parameters() if all(p is not q for q in slow)]
    optimizer = torch.optim.AdamW([{"params": slow, "lr": 1e-3}, {"params": fast, "lr": 1e-2}])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    training = run.protect(
        model, optimizer, data(microbatches), global_batch_size=4 * microbatches, microbatches=microbatches, seed=11,
        scheduler=scheduler, clip_norm=0.5, bucket_mb=0.3, audit=audit,
        audit_params=[critical] if critical else (),
        guards=outlast.Guards(**json.loads(guards)) if guards.startswith("{") else guards,
    )  # fmt: skip
    losses: dict[int, float] = {}
    batches = 0
    for step in training.steps(until=steps):
        for tokens, targets in step:
            batches += 1
            logits = model(tokens, late=step.number >= LATE).float()
            step.backward(functional.cross_entropy(logits, targets))
        losses[step.number] = step.loss
    found = {"fingerprint": training.fingerprint(), "losses": losses, "batches": batches}
    if audit == "auto":
        found["share"] = training.replica.member.audits.share
        vigilance = training.replica.engine.step_checks.vigilance
        found["belief"] = vigilance.state_dict() if vigilance is not None else None
    return run, json.loads(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--audit", required=True)
    parser.add_argument("--guards", default="default")
    parser.add_argument("--critical", default="")
    parser.add_argument("--flips", default="[]")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ["OUTLAST_CORRUPTION"] = args.flips
    run, found = train(
        args.steps, args.microbatches, args.audit, getattr(torch, args.dtype), args.guards, args.critical
    )
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}.json")


if __name__ == "__main__":
    main()
