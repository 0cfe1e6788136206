"""The benchmark's MLP under outlast, for fleets whose hosts fail: says at its end what its parameters are."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import outlast
from benchmarks._workload import MODELS, build, loss_of, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="0.15M")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = outlast.join()
    model, optimizer = build(args.model, args.seed)
    training = run.protect(
        model, optimizer, samples(args.model), global_batch_size=MODELS[args.model].samples * 8, microbatches=8,
        seed=args.seed,
    )  # fmt: skip
    for step in training.steps(until=args.steps):
        for batch in step:
            step.backward(loss_of(model, batch))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    (args.out / run.name).write_text(digest)


if __name__ == "__main__":
    main()
