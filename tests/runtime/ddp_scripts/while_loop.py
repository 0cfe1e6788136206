"""Steps in a `while`, batches drawn at random, as small language models have it: explained, not converted."""

from __future__ import annotations

import os

import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    master_process = ddp_rank == 0
else:
    master_process = True
model = torch.nn.Linear(4, 4)
if ddp:
    model = DDP(model)
iter_num = 0
optimizer = torch.optim.AdamW(model.parameters())


def get_batch():
    return torch.randn(3, 4)


X = get_batch()
while True:
    for _ in range(4):
        loss = model(X).sum() / 4
        X = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > 10:
        break
