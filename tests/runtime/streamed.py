"""The streaming example's model, with gates, and what of a stream each step was computed from.

The stream is the example's, or, with `--source`, one of a library's (`sources.py`) that says which windows of the text.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import outlast
from outlast.examples.data import HelpText
from outlast.examples.models import GPT, next_byte_loss

BATCH, WINDOWS = 4, 120  # of the text: a pass has seven steps, so training goes over several


def source(told: argparse.Namespace) -> Any:
    if told.source is not None:
        sys.path.append(str(Path(__file__).parents[2]))
        from tests.runtime.sources import SOURCES

        return SOURCES[told.source](WINDOWS, told.out)
    from outlast.examples.stream_gpt import loader  # torchdata is needed for this one alone

    return loader(WINDOWS)


def windows(batch: Any) -> Tensor:
    """The batch itself, or the windows that its numbers say."""
    text = HelpText()
    return torch.stack([text[number] for number in batch["n"].tolist()]) if isinstance(batch, dict) else batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source")
    told = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(0)
    model = GPT(width=32, depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = run.protect(
        model, optimizer, source(told), global_batch_size=4 * BATCH, microbatches=4, drop_last=True, clip_norm=1.0
    )  # fmt: skip
    losses: dict[int, float] = {}
    passes: dict[int, int] = {}
    seen: dict[str, list[Any]] = {}
    for step in training.steps(until=told.steps):
        if told.gates is not None and (told.gates / str(step.number)).exists():
            with (told.gates / str(step.number)).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        batches = seen.setdefault(str(step.number), [])
        for batch in map(windows, step):
            batches.append(batch.sum().item())
            step.backward(next_byte_loss(model, batch))
        losses[step.number], passes[step.number] = step.loss, step.epoch
    found = {"fingerprint": training.fingerprint(), "losses": losses, "passes": passes, "seen": seen}
    part = told.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(told.out / f"{run.name}.json")


if __name__ == "__main__":
    main()
