"""Train a GPT whose blocks are the stages of a pipeline over the ranks of each replica: `outlast run --replicas 2
--ranks 2 pipeline_gpt.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import outlast
from outlast.examples._script import parse, write_result
from outlast.examples.data import CONTEXT, NUM_BYTES, HelpText
from outlast.examples.models import Block


class StagedGPT(nn.Module):
    """A byte-level GPT of which any part may be missing. (batch, time) of int64 in, or (batch, time, width) from the
    stage before; logits (batch, time, 256) out, or what the next stage takes."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(NUM_BYTES, width)
        self.place: nn.Module | None = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleDict({str(number): Block(width, heads, dropout=0.0) for number in range(depth)})
        self.norm: nn.Module | None = nn.LayerNorm(width)
        self.head: nn.Module | None = nn.Linear(width, NUM_BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None and self.place is not None:
            x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def stage_of(model: StagedGPT, stage: int, stages: int) -> StagedGPT:
    """Leave of the whole model what one stage has. What stays keeps its name."""
    share = len(model.blocks) // stages
    for number in list(model.blocks):
        if int(number) // share != stage:
            del model.blocks[number]
    if stage > 0:
        model.embed = model.place = None
    if stage < stages - 1:
        model.norm = model.head = None
    return model


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy (nats a byte) of (batch, time, 256) against (batch, time)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    args = parse(__doc__, steps=200, stages=2)
    run = outlast.join()
    mesh = run.mesh(pipeline=args.stages)
    torch.manual_seed(args.seed)
    model = stage_of(StagedGPT(), mesh.get_local_rank("pipeline"), args.stages)
    stage = PipelineStage(
        model, mesh.get_local_rank("pipeline"), args.stages, torch.device("cpu"), group=mesh.get_group("pipeline")
    )
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=next_byte_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = run.protect(
        model, optimizer, HelpText(), clip_norm=1.0,
        global_batch_size=64, microbatches=args.microbatches, seed=args.seed,
        drop_last=True,
    )  # fmt: skip
    losses: dict[int, float] = {}
    for step in training.steps(until=args.steps):
        for batch in step:  # the same on all stages: the first takes the inputs of it, the last the targets
            step.pipeline(schedule, batch[:, :-1], target=batch[:, 1:])
        losses[step.number] = step.loss
    fingerprint = training.fingerprint()  # of all stages: every rank takes part
    if run.is_writer:
        write_result(args.out, fingerprint=fingerprint, losses=losses, steps=args.steps)


if __name__ == "__main__":
    main()
