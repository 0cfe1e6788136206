"""A small network whose steps take as long as a device would. The processor is free meanwhile, so what else goes on
on the machine (hosts that start again) is paid for by nobody's steps; a step takes as long however many share it.
"""

from __future__ import annotations

import argparse
import threading

import torch
from torch import Tensor, nn
from torch.nn import functional

import outlast


class Points(torch.utils.data.Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(512, 16, generator=generator)
        self.labels = torch.randint(0, 4, (512,), generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.points[i], self.labels[i]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--takes", type=float, default=0.1, help="seconds, each step")
    args = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    device = threading.Event()
    training = run.protect(
        model, optimizer, Points(), global_batch_size=4 * args.microbatches, microbatches=args.microbatches, seed=0
    )
    for step in training.steps(until=args.steps):
        device.wait(args.takes)
        for points, labels in step:
            step.backward(functional.cross_entropy(model(points), labels))


if __name__ == "__main__":
    main()
