"""The benchmark's MLP under outlast: the loop of the documentation, with the probe's marks around the computing."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import outlast
from benchmarks._probe import FINGERPRINTS_S, Probe
from benchmarks._workload import MODELS, build, loss_of, samples
from benchmarks.peers.ddp import parser

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--audit", type=float, default=0.0)
    options.add_argument("--fingerprints", action="store_true", help="report what fingerprints take")
    args = options.parse_args()
    probe = Probe(rank=os.getpid())
    run = outlast.join()
    model, optimizer = build(args.model, args.seed)
    training = run.protect(
        model, optimizer, samples(args.model), global_batch_size=MODELS[args.model].samples * args.microbatches,
        microbatches=args.microbatches, seed=args.seed, audit=args.audit,
    )  # fmt: skip
    spent = watch_fingerprints() if args.fingerprints else [0.0]
    for step in training.steps(until=args.steps):
        for batch in step:
            with probe.computing():
                step.backward(loss_of(model, batch))
        if args.fingerprints and probe.block and (step.number + 1) % probe.block == 0:
            probe.number(FINGERPRINTS_S, spent[0] / probe.block)
            spent[0] = 0.0
        probe.commit(step.number)


def watch_fingerprints() -> list[float]:
    """Count the processor time of a step's fingerprints: of the reduced gradient, and of a part of the state."""
    from outlast.runtime import _agreement, _plane

    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                spent[0] += time.thread_time() - began_s

        return call

    _plane.fingerprint = timed(_plane.fingerprint)
    _agreement.Agreement.fingerprint = timed(_agreement.Agreement.fingerprint)  # type: ignore[method-assign]
    return spent


if __name__ == "__main__":
    main()
