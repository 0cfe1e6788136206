"""The benchmark's MLP under outlast: the loop of the documentation, with the probe's marks around the computing."""

from __future__ import annotations

import os

import outlast
from benchmarks._probe import Probe
from benchmarks._workload import MODELS, build, loss_of, samples
from benchmarks.peers.ddp import parser


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--audit", type=float, default=0.0)
    args = options.parse_args()
    probe = Probe(rank=os.getpid())
    run = outlast.join()
    model, optimizer = build(args.model, args.seed)
    training = run.protect(
        model, optimizer, samples(args.model), global_batch_size=MODELS[args.model].samples * args.microbatches,
        microbatches=args.microbatches, seed=args.seed, audit=args.audit,
    )  # fmt: skip
    for step in training.steps(until=args.steps):
        for batch in step:
            with probe.computing():
                step.backward(loss_of(model, batch))
        probe.commit(step.number)


if __name__ == "__main__":
    main()
