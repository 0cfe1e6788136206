"""One replica of the digits campaign: its rows' gradients of many small networks at once, one a case.

Every case (a rule, an attack, a seed) is a network of its own, held as one flat parameter under a rule of its own, so
that one run of a few processes gives all of them. Row r is microbatch r; its samples come from its own share of the
digits (iid, or Dirichlet(alpha) over classes), dealt by the case's seed. The guards are off: they evict who sends NaN,
and here the rule alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import outlast
from outlast.tensors import flip_labels

NUM_TEST, HIDDEN, NUM_CLASSES = 360, 32, 10
CUTS = (64 * HIDDEN, HIDDEN, HIDDEN * NUM_CLASSES, NUM_CLASSES)


class Shares(Dataset[tuple[Tensor, Tensor, Tensor, int]]):
    """Item (step, row) in this order: (seeds, n, 64) images, (seeds, n) labels and weights, and the row's number.

    With a batch, n images drawn from the row's own share, all of one weight; with batch 0 the whole share, filled up
    with images of weight 0. Weights of a seed sum to 1.
    """

    def __init__(self, place: Path, seeds: list[int], rows: int, batch: int, steps: int, alpha: float | None) -> None:
        with np.load(place) as digits:  # loaded once by who starts the replicas
            images, labels = digits["images"], digits["labels"]
        self.seeds, self.rows, self.batch, self.steps = seeds, rows, batch, steps
        self.tests, self.shares = [], []
        for seed in seeds:
            draw = np.random.default_rng(seed)
            order = draw.permutation(len(labels))
            x, y = torch.tensor(images[order] / 16.0, dtype=torch.float32), torch.tensor(labels[order])
            self.tests.append((x[:NUM_TEST], y[:NUM_TEST]))
            self.shares.append(self._deal(x[NUM_TEST:], y[NUM_TEST:], alpha, draw))
        self._whole = [self._filled(row) for row in range(rows)] if batch == 0 else []

    def _deal(
        self, x: Tensor, y: Tensor, alpha: float | None, draw: np.random.Generator
    ) -> list[tuple[Tensor, Tensor]]:
        if alpha is None:
            owners = draw.integers(0, self.rows, len(y))
        else:
            weights = draw.dirichlet([alpha] * self.rows, NUM_CLASSES)
            owners = np.array([draw.choice(self.rows, p=weights[label]) for label in y.tolist()])
        picked = [np.flatnonzero(owners == row) for row in range(self.rows)]
        picked = [mine if len(mine) else draw.integers(0, len(y), 32) for mine in picked]
        return [(x[mine], y[mine]) for mine in picked]

    def _filled(self, row: int) -> tuple[Tensor, Tensor, Tensor, int]:
        longest = max(len(shares[row][1]) for shares in self.shares)
        x, y = torch.zeros(len(self.seeds), longest, 64), torch.zeros(len(self.seeds), longest, dtype=torch.long)
        weights = torch.zeros(len(self.seeds), longest)
        for place, shares in enumerate(self.shares):
            images, labels = shares[row]
            num = len(labels)
            x[place, :num], y[place, :num], weights[place, :num] = images, labels, 1.0 / num
        return x, y, weights, row

    def __len__(self) -> int:
        return self.steps * self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, int]:
        row = index % self.rows
        if self.batch == 0:
            return self._whole[row]
        xs, ys = [], []
        for seed, shares in zip(self.seeds, self.shares, strict=True):
            x, y = shares[row]
            at = torch.from_numpy(np.random.default_rng((seed, index)).integers(len(y), size=self.batch))
            xs.append(x[at])
            ys.append(y[at])
        return torch.stack(xs), torch.stack(ys), torch.full((len(xs), self.batch), 1.0 / self.batch), row


class Networks(nn.Module):
    """One network a case: 64 pixels, 32 tanh units, 10 classes, flat. A row is one microbatch, so the gradient that
    arrives here is a row's own: it is cut to the norm `clip` for each case."""

    def __init__(self, cases: list[dict[str, Any]], clip: float) -> None:
        super().__init__()
        self.names, self.clip = [case["name"] for case in cases], clip
        self.nets = nn.ParameterDict({case["name"]: nn.Parameter(_first(case["seed"])) for case in cases})

    def forward(self, x: Tensor) -> Tensor:
        """Logits (cases, samples, classes) for images (cases, samples, 64), in the order of the cases."""
        flat = torch.stack([self.nets[name] for name in self.names])  # the dictionary has an order of its own
        if flat.requires_grad:
            flat.register_hook(self._cut)  # type: ignore[no-untyped-call]
        w1, b1, w2, b2 = torch.split(flat, list(CUTS), dim=1)
        hidden = torch.tanh(torch.baddbmm(b1[:, None], x, w1.view(-1, 64, HIDDEN)))
        return torch.baddbmm(b2[:, None], hidden, w2.view(-1, HIDDEN, NUM_CLASSES))

    def _cut(self, grad: Tensor) -> Tensor:
        cut: Tensor = grad * (self.clip / grad.norm(dim=1, keepdim=True)).clamp(max=1.0)
        return cut


def _first(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(64 * HIDDEN, generator=draw) / 8, torch.zeros(HIDDEN)]
    return torch.cat(
        [*weights, torch.randn(HIDDEN * NUM_CLASSES, generator=draw) / HIDDEN**0.5, torch.zeros(NUM_CLASSES)]
    )


def loss_of(models: Any, batch: tuple[Tensor, ...], seed_of: Tensor, flipped: Tensor) -> Tensor:
    """The sum over cases of the mean loss; `flipped` (cases, rows): whose labels are flipped."""
    images, labels, weights, row = (part[0] for part in batch)
    y = labels[seed_of]
    y = torch.where(flipped[:, row, None], flip_labels(y, NUM_CLASSES), y)
    each = cross_entropy(models(images[seed_of]).flatten(0, 1), y.flatten(), reduction="none")
    return (each.view(y.shape) * weights[seed_of]).sum()


def accuracies(models: Any, tests: list[tuple[Tensor, Tensor]], seed_of: Tensor) -> list[float]:
    """Per cent right on images held back; 0 for a network that is no longer finite."""
    with torch.no_grad():
        logits = models(torch.stack([x for x, _ in tests])[seed_of])
    right = (logits.argmax(dim=2) == torch.stack([y for _, y in tests])[seed_of]).double().mean(dim=1)
    finite = torch.isfinite(logits).flatten(1).all(dim=1)
    return [float(v) for v in 100.0 * right * finite]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path, required=True, help="JSON: name, seed, flipped, rule of each")
    parser.add_argument("--digits", type=Path, required=True, help="images and labels (npz)")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="0: all of a row's own samples in every step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--momentum", type=float, required=True)
    parser.add_argument("--clip", type=float, required=True, help="norm that each row's gradient is cut to")
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = parse()
    run = outlast.join()
    cases = json.loads(args.cases.read_text())
    seeds = sorted({case["seed"] for case in cases})
    seed_of = torch.tensor([seeds.index(case["seed"]) for case in cases])
    flipped = torch.tensor([[row in case["flipped"] for row in range(args.rows)] for case in cases])
    shares = Shares(args.digits, seeds, args.rows, args.batch, args.steps, args.alpha)
    models = Networks(cases, args.clip)
    optimizer = torch.optim.SGD(models.parameters(), lr=args.rate)
    training = run.protect(
        models, optimizer, shares, global_batch_size=args.rows, microbatches=args.rows, shuffle=False,
        guards="off", aggregation={f"nets.{case['name']}": case["rule"] for case in cases},
        rows=args.rows, row_momentum=args.momentum,
    )  # fmt: skip
    found: list[list[float]] = []
    for step in training.steps(until=args.steps):
        for batch in step:
            step.backward(loss_of(models, batch, seed_of, flipped))
        if step.number >= args.steps - 5:
            found.append(accuracies(models, shares.tests, seed_of))
    if run.is_writer:
        means = [sum(each) / len(each) for each in zip(*found, strict=True)]
        part = args.out.with_name(f"{args.out.name}.{os.getpid()}")
        part.write_text(json.dumps({case["name"]: mean for case, mean in zip(cases, means, strict=True)}))
        part.replace(args.out)


if __name__ == "__main__":
    main()
