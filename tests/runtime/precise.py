"""The example in fewer bits, with gates: what it ends with, its gradient scale included."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from scenario import pass_gate  # beside this file

import outlast
from outlast.examples.data import HelpText
from outlast.examples.gpt_precision import build
from outlast.examples.models import next_byte_loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(3)
    model, optimizer, scaler, autocast = build(told.precision, run.device, told.compiled)
    if scaler is not None:  # far too large at first, and soon again
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2, growth_factor=16.0)
    training = run.protect(
        model, optimizer, HelpText(), clip_norm=1.0, scaler=scaler, global_batch_size=8, microbatches=4, drop_last=True
    )
    log = outlast.Log(run, told.out / "curve.jsonl")
    overflows = 0
    for step in training.steps(until=told.steps):
        pass_gate(told.gates, step.number)
        for batch in step:
            with autocast():
                loss = next_byte_loss(model, batch)
            step.backward(loss)
        log(step, loss=step.loss, norm=step.grad_norm)
        overflows += step.grad_norm is not None and not step.grad_norm < float("inf")
    log.close()
    scale = scaler.get_scale() if scaler is not None else 1.0
    found = {"fingerprint": training.fingerprint(), "scale": scale}
    late = run.name.endswith(".2")  # who came later has not seen all steps
    found |= {} if late else {"overflows": overflows}
    part = told.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(told.out / f"{run.name}.json")


if __name__ == "__main__":
    main()
