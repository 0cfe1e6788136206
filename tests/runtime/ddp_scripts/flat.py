"""No function at all, bfloat16, accumulation, a scaler that is off, a scheduler stepped with the optimizer."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
master = rank == 0
torch.manual_seed(1)
net = DDP(nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
scaler = torch.amp.GradScaler("cpu", enabled=False)
data = TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
accum = 2
total = 0
for epoch in range(int(sys.argv[2])):
    sampler.set_epoch(epoch)
    running = 0.0
    for it, (x, y) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(net(x), y)
        loss = loss / accum
        scaler.scale(loss).backward()
        if (it + 1) % accum == 0 or it + 1 == len(loader):
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            sched.step()
        running += loss.item()
        total += 1
    dist.barrier()
    if master:
        print(epoch, running / len(loader), total)
        torch.save(net.module.state_dict(), sys.argv[4] + "/model.pt")
dist.destroy_process_group()
