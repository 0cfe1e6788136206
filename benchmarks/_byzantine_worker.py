"""One replica of the digits campaign: its row's gradients of several networks at once, one a seed.

Every network is a group of parameters with a rule of its own, so that one run of fifteen processes gives all seeds. Row
r is microbatch r; its samples come from its own share of the digits (iid, or Dirichlet(alpha) over classes). The
guards are off: they evict who sends NaN, and here the rule alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import outlast
from outlast.tensors import flip_labels

NUM_TEST, HIDDEN, NUM_CLASSES = 360, 32, 10


class Shares(Dataset[tuple[Tensor, Tensor]]):
    """Item (step, row, j) in this order: (seeds, 64) images and (seeds,) labels, from the row's share for each seed."""

    def __init__(self, seeds: int, rows: int, batch: int, steps: int, alpha: float | None, flipped: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.rows, self.batch, self.steps, self.flipped = rows, batch, steps, flipped
        self.tests, self.shares = [], []
        for seed in range(seeds):
            draw = np.random.default_rng(seed)
            order = draw.permutation(len(labels))
            x, y = torch.tensor(images[order] / 16.0, dtype=torch.float32), torch.tensor(labels[order])
            self.tests.append((x[:NUM_TEST], y[:NUM_TEST]))
            self.shares.append(self._deal(x[NUM_TEST:], y[NUM_TEST:], alpha, draw))

    def _deal(
        self, x: Tensor, y: Tensor, alpha: float | None, draw: np.random.Generator
    ) -> list[tuple[Tensor, Tensor]]:
        if alpha is None:
            owners = draw.integers(0, self.rows, len(y))
        else:
            weights = draw.dirichlet([alpha] * self.rows, NUM_CLASSES)
            owners = np.array([draw.choice(self.rows, p=weights[label]) for label in y.tolist()])
        picked = [np.flatnonzero(owners == row) for row in range(self.rows)]
        picked = [mine if len(mine) else draw.integers(0, len(y), self.batch) for mine in picked]
        return [(x[mine], y[mine]) for mine in picked]

    def __len__(self) -> int:
        return self.steps * self.rows * self.batch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = index // self.batch % self.rows
        xs, ys = [], []
        for seed, shares in enumerate(self.shares):
            x, y = shares[row]
            at = int(np.random.default_rng((seed, index)).integers(len(y)))
            xs.append(x[at])
            ys.append(flip_labels(y[at], NUM_CLASSES) if row < self.flipped else y[at])
        return torch.stack(xs), torch.stack(ys)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, NUM_CLASSES))


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        logits = model(test[0])
    right = float((logits.argmax(dim=1) == test[1]).double().mean())
    return 100.0 * right * bool(torch.isfinite(logits).all())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.6)
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--flipped", type=int, default=0)
    parser.add_argument("--rule", type=json.loads, default={})
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = outlast.join()
    shares = Shares(args.seeds, args.rows, args.batch, args.steps, args.alpha, args.flipped)
    models = nn.ModuleList(network(seed) for seed in range(args.seeds))
    optimizer = torch.optim.SGD(models.parameters(), lr=args.rate)
    rule: dict[str, Any] = dict(args.rule)
    if rule:
        rule["aggregation"] = {f"{seed}.*": rule["aggregation"] for seed in range(args.seeds)}
    training = run.protect(
        models, optimizer, shares, global_batch_size=args.rows * args.batch, microbatches=args.rows, shuffle=False,
        guards="off", **rule,
    )  # fmt: skip
    found: list[list[float]] = []
    for step in training.steps(until=args.steps):
        for images, labels in step:
            losses = [cross_entropy(model(images[:, s]), labels[:, s]) for s, model in enumerate(models)]
            step.backward(torch.stack(losses).sum())
        if step.number >= args.steps - 5:
            found.append([accuracy(model, test) for model, test in zip(models, shares.tests, strict=True)])
    if run.is_writer:
        part = args.out.with_name(f"{args.out.name}.{os.getpid()}")
        part.write_text(json.dumps([sum(each) / len(each) for each in zip(*found, strict=True)]))
        part.replace(args.out)


if __name__ == "__main__":
    main()
