"""A training whose loop is slow in every honest way: a slow first step, evaluations, garbage, a stalled loader."""

from __future__ import annotations

import gc
import sys
import threading

import torch

import outlast


class Stalling(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Now and then one sample takes its time."""

    def __init__(self, every: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(4096, 16, generator=generator)
        self.every = every

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index % self.every == 0:
            threading.Event().wait(0.8)
        return self.x[index], self.x[index].sum() > 0


def main() -> None:
    steps, out = int(sys.argv[1]), sys.argv[2]
    run = outlast.join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = run.protect(model, optimizer, Stalling(4000), global_batch_size=32, microbatches=8, seed=0)
    mine = int(run.name[1:].partition(".")[0])
    for step in training.steps(until=steps):
        if step.number == 0 and mine == 1:
            threading.Event().wait(1.5)
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y.long()))
        if step.number % max(1, steps // 4) == mine:
            threading.Event().wait(1.0)  # an evaluation, on one replica only
        if step.number % 50 == 0:
            junk = [[i] for i in range(200_000)]
            del junk
            gc.collect()
    if run.is_writer:
        with open(out, "w", encoding="utf-8") as file:
            file.write(training.fingerprint())


if __name__ == "__main__":
    main()
