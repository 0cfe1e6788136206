"""Settings of one training beside each other: one fleet whose setting changes from block to block.

Two fleets of one kind differ by up to 1 % here, as their memory happens to lie, and the machine drifts by as much
within a minute. So every member changes its setting at the same step, blocks are short, and ratios are taken within a
round of blocks. Processor seconds are counted beside wall time: a machine that is shared with others disturbs them
less, and who waits for a peer spends none.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._common import Spread, alone, options, spread
from benchmarks._probe import in_turn
from benchmarks._systems import SYSTEMS, Launch
from benchmarks.overhead import BLOCKS, START_S, run_block

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benchmarks._fleet import Fleet

__all__ = ["Series", "compare", "parser", "title"]


@dataclasses.dataclass(kw_only=True, slots=True)
class Series:
    """One setting: seconds a step of the slowest member, processor seconds a step of all, and how much more than each
    microbatch once was computed; a figure a round."""

    setting: str
    step_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    drawn: list[float] = dataclasses.field(default_factory=list)

    def cost(self, plain: Series) -> Spread:
        """More than a step of `plain`, as a part of it; a figure a round."""
        return _over(self.step_s, plain.step_s)

    def cpu_cost(self, plain: Series) -> Spread:
        return _over(self.cpu_s, plain.cpu_s)


def _over(mine: Sequence[float], other: Sequence[float]) -> Spread:
    return spread(a / b - 1.0 for a, b in zip(mine, other, strict=True))


def parser(about: str | None) -> argparse.ArgumentParser:
    made = options(about)
    made.add_argument("--model", choices=BLOCKS, default="3.2M")
    made.add_argument("--replicas", type=int, default=2)
    made.add_argument("--microbatches", type=int, default=8)
    made.add_argument("--rounds", type=int, default=60)
    made.add_argument("--steps", type=int, default=20, help="a block")
    return made


def title(args: argparse.Namespace) -> str:
    return (
        f"{args.model} parameters, {args.replicas} replicas, {args.microbatches} microbatches, "
        f"{args.rounds} rounds of blocks of {args.steps} steps"
    )


def compare(option: str, settings: Sequence[str], args: argparse.Namespace) -> list[Series]:
    """Rounds of blocks, one a setting of the worker's `--option`; the first round warms up and is dropped."""
    found = [Series(setting=setting) for setting in settings]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        launch = Launch(
            replicas=args.replicas, model=args.model, microbatches=args.microbatches, seed=args.seed,
            python=Path(sys.executable), scratch=Path(scratch), options=[f"--{option}=" + ",".join(settings)],
        )  # fmt: skip
        fleet = SYSTEMS["outlast"].fleet(launch)
        fleet.set_block(args.steps)
        with fleet:
            fleet.wait_for("first block", lambda: fleet.all_wait(args.replicas), START_S)
            with alone(args.lock):
                for block in range(1, (args.rounds + 1) * len(settings)):  # block 0 is over
                    before = _cpu_seconds(fleet)
                    step_s = run_block(fleet, args.replicas, args.steps)
                    if block >= len(settings):
                        series = in_turn(found, block)
                        series.step_s.append(step_s)
                        series.cpu_s.append((_cpu_seconds(fleet) - before) / args.steps)
                        computed = sum(c.num_computed for member in fleet.living for c in member.commits[-args.steps :])
                        series.drawn.append(computed / (args.steps * args.microbatches) - 1.0)
    return found


def _cpu_seconds(fleet: Fleet) -> float:
    """User and system time of all members so far."""
    fields = [Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split() for member in fleet.living]
    return sum(int(row[11]) + int(row[12]) for row in fields) / os.sysconf("SC_CLK_TCK")
