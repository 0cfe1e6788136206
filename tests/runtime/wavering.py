"""A model with one layer whose gradient is not a function of its microbatch: it draws from a generator of its own,
which begins anywhere (`wavering`) or at the same place on all replicas (`counting`). With `sharded` behind that, the
model is sharded over the ranks of its replica."""

from __future__ import annotations

import sys

import torch
from torch.distributed.fsdp import fully_shard

import outlast


class Wavering(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steady, self.wavering = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.own = torch.Generator()
        self.own.manual_seed(0) if sys.argv[1] == "counting" else self.own.seed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.steady(x)
        noise = torch.rand(hidden.shape, generator=self.own) if sys.argv[1] != "steady" else 1.0
        return self.wavering(hidden.detach() * noise).mean() + hidden.square().mean()


run = outlast.join()
torch.manual_seed(0)
model = Wavering()
if "sharded" in sys.argv:
    fully_shard(model, mesh=run.mesh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = run.protect(model, optimizer, torch.randn(64, 4), global_batch_size=16, microbatches=4)
seen = 0
for step in training.steps(until=3):
    for x in step:
        seen += 1
        step.backward(model(x))
print(f"{run.name} saw {seen} batches, fingerprint {training.fingerprint()}", flush=True)
