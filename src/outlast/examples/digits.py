"""Train an MLP on scikit-learn's digits, and survive: `outlast run --replicas 4 digits.py`. Twin: digits_plain.py."""

from __future__ import annotations

import torch

import outlast
from outlast.examples._script import parse, write_result
from outlast.examples.data import digits
from outlast.examples.models import DigitsMLP, digits_loss


def main() -> None:
    args = parse(__doc__, steps=500)
    run = outlast.join()
    torch.manual_seed(args.seed)
    model = DigitsMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = run.protect(
        model, optimizer, digits(), global_batch_size=64, microbatches=args.microbatches, seed=args.seed
    )
    losses: dict[int, float] = {}
    for step in training.steps(until=args.steps):
        for batch in step:
            step.backward(digits_loss(model, batch))
        losses[step.number] = step.loss
    if run.is_writer:
        write_result(args.out, fingerprint=training.fingerprint(), losses=losses, steps=args.steps)


if __name__ == "__main__":
    main()
