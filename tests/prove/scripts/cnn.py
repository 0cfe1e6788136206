"""A convolutional network with batch norm, augmented pictures and two loader workers, epoch by epoch.

`--plant time`: the list of files is shuffled by the time, as some loaders do.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import outlast


class Pictures(torch.utils.data.Dataset):
    def __init__(self, by_time: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pictures = torch.randn(128, 1, 8, 8, generator=generator)
        self.labels = torch.randint(0, 4, (128,), generator=generator)
        self.files = list(range(128))
        if by_time:
            random.Random(time.time_ns()).shuffle(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        picture = self.pictures[self.files[i]]
        if random.random() < 0.5:
            picture = picture.flip(-1)
        return picture + 0.05 * torch.randn_like(picture), int(self.labels[self.files[i]])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 4),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plant", default="")
    args = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    data = Pictures(by_time=args.plant == "time")
    training = run.protect(
        model, optimizer, data, global_batch_size=32, microbatches=4, seed=0, num_workers=args.workers,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 8),
    )  # fmt: skip
    for step in training.steps(until=args.epochs * 4):
        for pictures, labels in step:
            step.backward(functional.cross_entropy(model(pictures), labels))


if __name__ == "__main__":
    main()
