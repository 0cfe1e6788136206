"""Train an MLP on scikit-learn's digits in plain PyTorch. Its twin digits.py survives the death of what it runs on."""

from __future__ import annotations

from itertools import chain, repeat

import torch
from torch.utils.data import DataLoader

from outlast.examples._fingerprint import state_fingerprint
from outlast.examples._script import parse, write_result
from outlast.examples.data import digits
from outlast.examples.models import DigitsMLP, digits_loss


def main() -> None:
    args = parse(__doc__, steps=500)
    torch.manual_seed(args.seed)
    model = DigitsMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(digits(), 64 // args.microbatches, shuffle=True, drop_last=True)
    batches = chain.from_iterable(repeat(loader))
    losses: dict[int, float] = {}
    for number in range(args.steps):
        losses[number] = 0.0
        for _ in range(args.microbatches):
            loss = digits_loss(model, next(batches)) / args.microbatches
            loss.backward()
            losses[number] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    write_result(args.out, fingerprint=state_fingerprint(model, optimizer), losses=losses, steps=args.steps)


if __name__ == "__main__":
    main()
