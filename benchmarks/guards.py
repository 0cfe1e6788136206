"""What guards cost: the same training with guards off and on, in turn, block by block; the ratio within a round.

Fleets with each setting are up at once; one runs a block of steps while the others wait, and the order turns around
every round, so what the machine does to one it does to the other. Time of a block: that of its slowest member.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Table, alone, environment, options, publish, spread
from benchmarks._systems import SYSTEMS, Launch
from benchmarks.overhead import BLOCK_S, START_S, run_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._fleet import Fleet

__all__ = ["main"]

SETTINGS = ("off", "default", "full")
LIMIT = 1.01


@dataclasses.dataclass(kw_only=True, slots=True)
class Series:
    """One setting: seconds a step, a figure a round."""

    guards: str
    step_s: list[float] = dataclasses.field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    machine, bounds = environment(args), Bounds()
    every = measure(args)
    off = every["off"]
    rows = []
    for name, series in every.items():
        ratio = spread(mine / other for mine, other in zip(series.step_s, off.step_s, strict=True))
        rows.append([
            name, spread(series.step_s).show(1e3, 2), f"{(ratio.median - 1) * 100:+.2f} %",
            f"{(ratio.quartile1 - 1) * 100:+.2f} to {(ratio.quartile3 - 1) * 100:+.2f} %",
        ])  # fmt: skip
        if name == "default":
            bounds.check(f"{args.model}: median step with guards over without", ratio.median, LIMIT, "times")
    table = Table(
        title=f"{args.model} parameters, {args.replicas} replicas, {args.microbatches} microbatches",
        columns=["guards", "step ms", "over off, median", "middle half"], rows=rows,
        notes=[f"{args.rounds} rounds of blocks of {args.block} steps"],
    )  # fmt: skip
    return publish("guards", args, machine, [table], bounds, [dataclasses.asdict(s) for s in every.values()])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--model", default="3.2M")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=12, help="steps in a block")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["off", "default"])
    args = parser.parse_args(argv)
    if "off" not in args.settings:
        parser.error("--settings needs off: it is what the others are compared with")
    return args


def measure(args: argparse.Namespace) -> dict[str, Series]:
    """All fleets up, then rounds of blocks; the first round warms up and is dropped."""
    found = {name: Series(guards=name) for name in args.settings}
    with contextlib.ExitStack() as stack:
        fleets = {name: stack.enter_context(start(name, args, stack)) for name in args.settings}
        for fleet in fleets.values():
            fleet.wait_for("first block", lambda fleet=fleet: fleet.all_wait(args.replicas), START_S)
        with alone(args.lock):
            for turn in range(args.rounds + 1):
                for name in args.settings if turn % 2 else list(reversed(args.settings)):
                    step_s = run_block(fleets[name], args.replicas, args.block)
                    if turn:
                        found[name].step_s.append(step_s)
    return found


def start(guards: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> Fleet:
    launch = Launch(
        replicas=args.replicas, model=args.model, microbatches=args.microbatches, seed=args.seed,
        python=Path(sys.executable), timeout_s=BLOCK_S, settings={"guards": guards},
        scratch=Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))),
    )  # fmt: skip
    fleet = SYSTEMS["outlast"].fleet(launch)
    fleet.set_block(args.block)
    return fleet


if __name__ == "__main__":
    sys.exit(main())
