"""The script for torchrun and DDP that tests of conversion put their habits into."""

from __future__ import annotations

__all__ = ["IMPORTS", "LOOP"]

IMPORTS = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""
LOOP = """
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(3):
    for x in loader:
        {first}
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {last}
"""
