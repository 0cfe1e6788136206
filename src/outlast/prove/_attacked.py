"""One replica of `outlast prove attacks`: many small networks on digits, one for each attack under each rule.

Every network is one flat parameter under an aggregation of its own, so one run holds all cases, and a lie about one
leaves the others alone. Row r is microbatch r; its samples are its own share of the digits, all of them in every step.
Guards are off: they evict who sends NaN, and here the rule alone is to be seen.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import outlast
from outlast.examples.data import digits
from outlast.tensors import flip_labels

_NUM_TEST, _HIDDEN, _CLASSES, _SEED = 360, 32, 10, 0
_CUTS = (64 * _HIDDEN, _HIDDEN, _HIDDEN * _CLASSES, _CLASSES)
_RATE, _CLIP, _MOMENTUM = 80.0, 0.01, 0.9  # each row's gradient is cut to this norm, so rates are large


class Shares(Dataset[tuple[Tensor, Tensor, int]]):
    """Item (step, row), in this order: the row's images (n, 64), their labels (n), and the row's number."""

    def __init__(self, rows: int, steps: int) -> None:
        samples: Any = digits()
        images, labels = samples.tensors
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))
        held, own = order[:_NUM_TEST], order[_NUM_TEST:]
        each = len(own) // rows
        self.test = images[held], labels[held]
        self._shares = [(images[p], labels[p]) for p in own[: each * rows].view(rows, each)]
        self._length = steps * rows

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        row = index % len(self._shares)
        return (*self._shares[row], row)


class Networks(nn.Module):
    """64 pixels, 32 tanh units, 10 classes; all begin alike."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(_SEED)
        first = torch.cat(
            [
                torch.randn(_CUTS[0], generator=draw) / 8,
                torch.zeros(_CUTS[1]),
                torch.randn(_CUTS[2], generator=draw) / _HIDDEN**0.5,
                torch.zeros(_CUTS[3]),
            ]
        )
        self.names = names
        self.nets = nn.ParameterDict({name: nn.Parameter(first.clone()) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        """Logits (networks, samples, 10) for images (samples, 64), in the order of the names."""
        flat = torch.stack([self.nets[name] for name in self.names])
        if flat.requires_grad:
            flat.register_hook(_cut)  # type: ignore[no-untyped-call]
        w1, b1, w2, b2 = torch.split(flat, list(_CUTS), dim=1)
        x = x.expand(len(self.names), *x.shape)
        hidden = torch.tanh(torch.baddbmm(b1[:, None], x, w1.view(-1, 64, _HIDDEN)))
        return torch.baddbmm(b2[:, None], hidden, w2.view(-1, _HIDDEN, _CLASSES))


def _cut(grad: Tensor) -> Tensor:
    cut: Tensor = grad * (_CLIP / grad.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return cut


def _loss(models: Networks, batch: Any, flipped: dict[str, list[int]]) -> Tensor:
    """The sum of the networks' mean losses; `flipped`: the rows whose labels lie, of each network."""
    x, labels, row = (part[0] for part in batch)
    y = torch.stack(
        [flip_labels(labels, _CLASSES) if int(row) in flipped.get(name, ()) else labels for name in models.names]
    )
    return cross_entropy(models(x).flatten(0, 1), y.flatten(), reduction="sum") / len(labels)


def _accuracies(models: Networks, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Per cent right on what was held back; 0 for a network that is no longer finite."""
    with torch.no_grad():
        logits = models(test[0])
    right = (logits.argmax(dim=2) == test[1]).double().mean(dim=1) * torch.isfinite(logits).flatten(1).all(dim=1)
    return dict(zip(models.names, (100.0 * right).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="JSON: name -> {aggregation, flipped}")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--check-reducers", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = outlast.join()
    cases = json.loads(args.cases.read_text())
    flipped = {name: case["flipped"] for name, case in cases.items()}
    shares, models = Shares(args.rows, args.steps), Networks(list(cases))
    training = run.protect(
        models,
        torch.optim.SGD(models.parameters(), lr=_RATE),
        shares,
        global_batch_size=args.rows,
        microbatches=args.rows,
        shuffle=False,
        guards="off",
        rows=args.rows,
        row_momentum=_MOMENTUM,
        aggregation={f"nets.{name}": case["aggregation"] for name, case in cases.items()},
        check_reducers=args.check_reducers,
    )
    for step in training.steps(until=args.steps):
        for batch in step:
            step.backward(_loss(models, batch, flipped))
    if run.is_writer:
        found = {"accuracy": _accuracies(models, shares.test), "fingerprint": training.fingerprint()}
        part = args.out.with_name(f"{args.out.name}.{os.getpid()}")
        part.write_text(json.dumps(found))
        part.replace(args.out)


if __name__ == "__main__":
    main()
