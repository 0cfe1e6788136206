"""The benchmark's MLP under outlast: the loop of the documentation, with the probe's marks around the computing."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import outlast
from benchmarks._probe import BITS, FINGERPRINTS_S, Probe, in_turn
from benchmarks._workload import MODELS, build, loss_of, samples
from benchmarks.peers.ddp import parser
from outlast.core.policy import Guards
from outlast.runtime.checks.guards import Guarding

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--audits", default="0", help="shares, one a step in turn: 0,0.02")
    options.add_argument("--guards", default="default", help="one a step in turn: off,default")
    options.add_argument("--fingerprints", action="store_true", help="report what fingerprints take")
    options.add_argument("--bits", action="store_true", help="report the bits after each block, as the next begins")
    args = options.parse_args()
    probe = Probe(rank=os.getpid())
    run = outlast.join()
    model, optimizer = build(args.model, args.seed)
    shares = [float(share) for share in args.audits.split(",")]
    settings = args.guards.split(",")
    training: Any = run.protect(
        model, optimizer, samples(args.model), global_batch_size=MODELS[args.model].samples * args.microbatches,
        microbatches=args.microbatches, seed=args.seed, audit=max(shares),
        guards=settings[0],
    )  # fmt: skip
    guards = [Guarding(training.engine, Guards.of(setting)) for setting in settings] if len(settings) > 1 else []
    spent = watch_fingerprints() if args.fingerprints else [0.0]
    for step in training.steps(until=args.steps):
        if len(shares) > 1:
            training._course.audit.share = in_turn(shares, step.number)
        if guards:
            training.replica.guards = training.engine.step_checks.guards = in_turn(guards, step.number)
        for batch in step:
            with probe.computing():
                step.backward(loss_of(model, batch))
        if args.fingerprints and probe.block and (step.number + 1) % probe.block == 0:
            probe.number(FINGERPRINTS_S, spent[0] / probe.block)
            spent[0] = 0.0
        probe.commit(step.number)
        if args.bits and probe.block and (step.number + 1) % probe.block == 0:
            probe.number(BITS + step.number, int(training.fingerprint()[:12], 16))


def watch_fingerprints() -> list[float]:
    """Count the processor time of a step's fingerprints: of the reduced gradient, and of a part of the state. The first
    come of the pass that reduces: what is counted is a look of its own, which takes more."""
    from outlast.runtime.checks import _state_rotation as _agreement
    from outlast.runtime.exchange import plane

    spent = [0.0]
    _plane: Any = plane  # whose functions are replaced

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                spent[0] += time.thread_time() - began_s

        return call

    reduce, look = _plane.reduce_and_look, timed(_plane.look)

    def reduce_and_look(*args: Any, squares: bool, **options: Any) -> Any:
        found, (out, first) = reduce(*args, squares=squares, **options), args[-2:]
        look(out, first, squares=squares)
        return found

    _plane.reduce_and_look = reduce_and_look
    _agreement.Agreement.fingerprint = timed(_agreement.Agreement.fingerprint)  # type: ignore[method-assign]
    return spent


if __name__ == "__main__":
    main()
