"""Train a byte-level GPT on English text in plain PyTorch. Its twin gpt.py survives the death of what it runs on."""

from __future__ import annotations

from itertools import chain, repeat

import torch
from torch.utils.data import DataLoader

from outlast.examples._fingerprint import state_fingerprint
from outlast.examples._script import parse, write_result
from outlast.examples.data import HelpText
from outlast.examples.models import GPT, next_byte_loss


def main() -> None:
    args = parse(__doc__, steps=200, dtypes=True)
    torch.manual_seed(args.seed)
    model = GPT().to(args.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    dataset = HelpText()
    loader = DataLoader(dataset, 32 // args.microbatches, shuffle=True, drop_last=True)
    batches = chain.from_iterable(repeat(loader))
    losses: dict[int, float] = {}
    for number in range(args.steps):
        losses[number] = 0.0
        for _ in range(args.microbatches):
            loss = next_byte_loss(model, next(batches)) / args.microbatches
            loss.backward()
            losses[number] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    write_result(args.out, fingerprint=state_fingerprint(model, optimizer), losses=losses, steps=args.steps)


if __name__ == "__main__":
    main()
