"""Train a byte-level GPT on English text, and survive: `outlast run --replicas 4 gpt.py`. Twin: gpt_plain.py."""

from __future__ import annotations

import torch

import outlast
from outlast.examples._script import parse, write_result
from outlast.examples.data import HelpText
from outlast.examples.models import GPT, next_byte_loss


def main() -> None:
    args = parse(__doc__, steps=200, dtypes=True)
    run = outlast.join()
    torch.manual_seed(args.seed)
    model = GPT().to(args.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    dataset = HelpText()
    training = run.protect(
        model, optimizer, dataset, scheduler=scheduler, clip_norm=1.0,
        global_batch_size=32, microbatches=args.microbatches, seed=args.seed,
    )  # fmt: skip
    losses: dict[int, float] = {}
    for step in training.steps(until=args.steps):
        for batch in step:
            step.backward(next_byte_loss(model, batch))
        losses[step.number] = step.loss
    if run.is_writer:
        write_result(args.out, fingerprint=training.fingerprint(), losses=losses, steps=args.steps)


if __name__ == "__main__":
    main()
