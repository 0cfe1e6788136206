"""Train a GPT that FSDP2 shards over the ranks of each replica: `outlast run --replicas 2 --ranks 2 fsdp_gpt.py`."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard

import outlast
from outlast.examples._script import parse, write_result
from outlast.examples.data import HelpText
from outlast.examples.models import GPT, next_byte_loss


def main() -> None:
    args = parse(__doc__, steps=200)
    run = outlast.join()
    torch.manual_seed(args.seed)
    model = GPT()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=run.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = run.protect(
        model, optimizer, HelpText(), clip_norm=1.0,
        global_batch_size=32, microbatches=args.microbatches, seed=args.seed,
        drop_last=True,
    )  # fmt: skip
    losses: dict[int, float] = {}
    for step in training.steps(until=args.steps):
        for batch in step:
            step.backward(next_byte_loss(model, batch))
        losses[step.number] = step.loss
    fingerprint = training.fingerprint()  # of all shards: every rank takes part
    if run.is_writer:
        write_result(args.out, fingerprint=fingerprint, losses=losses, steps=args.steps)


if __name__ == "__main__":
    main()
