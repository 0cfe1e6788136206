"""The limit of a step: one replica's share of the microbatches and its optimizer, with nothing to exchange."""

from __future__ import annotations

import argparse

import torch

from benchmarks._probe import Probe
from benchmarks._workload import MODELS, build, loss_of, microbatch, samples, share
from benchmarks.peers.ddp import parser


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    probe = Probe(args.rank)
    model, optimizer = build(args.model, args.seed)
    dataset, size = samples(args.model), MODELS[args.model].samples
    mine = share(args.rank, args.world, args.microbatches)
    for step in range(args.steps):
        for number in mine:
            with probe.computing():
                data = microbatch(dataset, size, step * args.microbatches + number)
                (loss_of(model, data) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.commit(step)


def parse() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--rank", type=int, default=0)
    options.add_argument("--world", type=int, default=1)
    return options.parse_args()


if __name__ == "__main__":
    main()
