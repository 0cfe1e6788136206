"""A dataset or a stream that the script splits by rank: named before anything is trained with a part of the samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev

pytestmark = [pytest.mark.process, pytest.mark.campaign]

SCRIPT = """
import sys

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset, Subset, TensorDataset

import outlast


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples)


run = outlast.join()
source, way = sys.argv[1:3]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8))
if way == "shard":
    fully_shard(model, mesh=run.mesh())
else:
    parallelize_module(model, run.mesh(tp=2)["tp"], {"0": ColwiseParallel()})
samples = TensorDataset(torch.arange(64.0)[:, None] * torch.ones(4))
samples = Subset(samples, range(torch.distributed.get_rank(), 64, 2))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
training = run.protect(
    model, optimizer, Stream() if source == "stream" else samples, global_batch_size=8, microbatches=4, drop_last=True
)
for step in training.steps(until=3):
    for (batch,) in step:
        out = model(batch)
        step.backward(out.square().mean())
"""


@pytest.mark.parametrize(("source", "way"), [("numbers", "shard"), ("stream", "shard"), ("stream", "tp")])
def test_a_part_of_the_samples_is_not_trained_with(
    fleet: Callable[..., Any], tmp_path: Path, source: str, way: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = fleet(replicas=1, ranks=2, steps=3, script=[str(script), source, way], max_restarts=0)
    assert run.finish() == 5, run.logs()
    (end,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert "rank 1 of this replica is given other samples than rank 0" in end.detail + run.logs()
    assert "give protect all samples on every rank" in run.logs()
