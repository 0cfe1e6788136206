"""The loop of image classification: meters, a function for an epoch and one for the validation, arguments."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", dest="epochs", type=int, default=3)
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", default=".")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(device)
    model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    x = torch.randn(256, 16)
    data = TensorDataset(x, (x[:, :4]).argmax(1))
    train_sampler = torch.utils.data.distributed.DistributedSampler(data)
    train_loader = torch.utils.data.DataLoader(
        data, batch_size=args.batch_size, shuffle=(train_sampler is None), num_workers=0, sampler=train_sampler
    )
    val_loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=False)
    for epoch in range(args.start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc = validate(val_loader, model, device)
        scheduler.step()
        if args.rank == 0:
            print(f"epoch {epoch} acc {acc:.3f}")
            torch.save(
                {"epoch": epoch + 1, "state_dict": model.module.state_dict()}, os.path.join(args.out, "model.pt")
            )
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        data_time = time.time() - end
        # move to the device
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)

        output = model(images)
        loss = criterion(output, target)

        acc1 = accuracy(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))

        # compute gradient and do SGD step
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        end = time.time()
        if i % 10 == 0 and args.rank == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item():.4f} data {data_time:.3f}")


def validate(loader, model, device):
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, target in loader:
            right += (model(images.to(device)).argmax(1) == target.to(device)).sum().item()
            total += len(target)
    return right / total


if __name__ == "__main__":
    main()
