"""Train the small GPT on a stream, and survive: `outlast run --replicas 2 stream_gpt.py`.

Needs torchdata (`pip install 'outlast[trainers]'`). The text is read in order by torchdata's StatefulDataLoader, whose
worker packs it into windows and shuffles them within a buffer: no sample has a number. A batch of the loader is one
microbatch. Who joins or resumes reads on at the very sample where the others are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import outlast
from outlast.examples._script import parse, write_result
from outlast.examples.data import HelpText
from outlast.examples.models import GPT, next_byte_loss

BATCH, BUFFER = 4, 64


class Shuffled(IterableDataset[Tensor]):
    """Windows of a text in order, each drawn from a buffer at random."""

    def __init__(self, limit: int | None = None) -> None:
        self._text, self._limit = HelpText(), limit

    def __iter__(self) -> Iterator[Tensor]:
        held: list[Tensor] = []
        for number in range(min(self._limit or len(self._text), len(self._text))):
            held.append(self._text[number])
            if len(held) == BUFFER:
                yield held.pop(random.randrange(BUFFER))
        random.shuffle(held)
        yield from held


def loader(limit: int | None = None, workers: int = 1) -> Any:
    """Batches of the stream, read by a worker process."""
    return StatefulDataLoader(Shuffled(limit), batch_size=BATCH, num_workers=workers, drop_last=True)


def main() -> None:
    args = parse(__doc__, steps=200)
    run = outlast.join()
    torch.manual_seed(args.seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = run.protect(
        model, optimizer, loader(), global_batch_size=BATCH * args.microbatches, microbatches=args.microbatches,
        seed=args.seed, clip_norm=1.0,
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
