"""Settings of one training beside each other: one fleet whose setting changes from step to step.

Two fleets of one kind differ by up to 1 % here, as their memory happens to lie, and the machine drifts by as much
within a minute. So every member changes its setting with each step. A step's time is that of its slowest member, from
commit to commit; processor time is that of all members. Steps in which microbatches are computed twice are told apart
from the others: a setting's cost is the median of each kind, weighted by how often it came.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks._common import alone, options, spread
from benchmarks._probe import in_turn
from benchmarks._systems import SYSTEMS, Launch
from benchmarks.overhead import BLOCKS, START_S, run_block

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benchmarks._fleet import Fleet

__all__ = ["Cost", "Series", "StepTime", "compare", "parser", "title"]

DRAWS = 200


class StepTime(NamedTuple):
    """One step: wall seconds of its slowest member, processor seconds of all, and microbatches that were computed more
    than once."""

    wall_s: float
    cpu_s: float
    extra: int


class Cost(NamedTuple):
    """More than a step of another setting, as a part of it, and its standard error (by drawing the steps anew)."""

    value: float
    error: float

    def show(self) -> str:
        return f"{self.value * 100:+.2f} % ({self.error * 100:.2f})"


@dataclasses.dataclass(kw_only=True, slots=True)
class Series:
    """One setting, and the steps that were made with it, of so many microbatches each."""

    setting: str
    microbatches: int
    steps: list[StepTime] = dataclasses.field(default_factory=list)

    @property
    def twice(self) -> float:
        """The share of all microbatches that was computed twice."""
        return sum(step.extra for step in self.steps) / (len(self.steps) * self.microbatches)

    def wall_cost(self, plain: Series) -> Cost:
        return _cost([(s.wall_s, s.extra) for s in self.steps], [s.wall_s for s in plain.steps])

    def cpu_cost(self, plain: Series) -> Cost:
        return _cost([(s.cpu_s, s.extra) for s in self.steps], [s.cpu_s for s in plain.steps])

    def show(self) -> tuple[str, str]:
        """Wall and processor milliseconds of a step."""
        walls, cpus = spread(s.wall_s for s in self.steps), spread(s.cpu_s for s in self.steps)
        return walls.show(1e3, 1), cpus.show(1e3, 1)


def _cost(mine: Sequence[tuple[float, int]], plain: Sequence[float]) -> Cost:
    draw = random.Random(0)
    again = [_ratio(draw.choices(mine, k=len(mine)), draw.choices(plain, k=len(plain))) for _ in range(DRAWS)]
    return Cost(_ratio(mine, plain), statistics.stdev(again))


def _ratio(mine: Sequence[tuple[float, int]], plain: Sequence[float]) -> float:
    kinds: dict[int, list[float]] = defaultdict(list)
    for seconds, extra in mine:
        kinds[extra].append(seconds)
    usual = sum(len(seconds) * statistics.median(seconds) for seconds in kinds.values()) / len(mine)
    return usual / statistics.median(plain) - 1.0


def parser(about: str | None) -> argparse.ArgumentParser:
    made = options(about)
    made.add_argument("--model", choices=BLOCKS, default="3.2M")
    made.add_argument("--replicas", type=int, default=2)
    made.add_argument("--microbatches", type=int, default=8)
    made.add_argument("--steps", type=int, default=1000, help="with each setting")
    return made


def title(args: argparse.Namespace) -> str:
    return f"{args.model} parameters, {args.replicas} replicas, {args.microbatches} microbatches"


def compare(option: str, settings: Sequence[str], args: argparse.Namespace) -> list[Series]:
    """One setting of the worker's `--option` a step, in turn; the first block warms up and is dropped."""
    found = [Series(setting=setting, microbatches=args.microbatches) for setting in settings]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        launch = Launch(
            replicas=args.replicas, model=args.model, microbatches=args.microbatches, seed=args.seed,
            python=Path(sys.executable), scratch=Path(scratch), options=[f"--{option}=" + ",".join(settings)],
        )  # fmt: skip
        fleet, block = SYSTEMS["outlast"].fleet(launch), 10 * BLOCKS[args.model]
        fleet.set_block(block)
        with fleet:
            fleet.wait_for("first block", lambda: fleet.all_wait(args.replicas), START_S)
            with alone(args.lock):
                while len(found[-1].steps) < args.steps:
                    run_block(fleet, args.replicas, block)
                    for step, time in _last(fleet, block, args.microbatches):
                        in_turn(found, step).steps.append(time)
    return found


def _last(fleet: Fleet, block: int, microbatches: int) -> list[tuple[int, StepTime]]:
    """The steps of the last block, but its first, which was waited for."""
    members = [list(pairwise(member.commits[-block:])) for member in fleet.living]
    return [
        (row[0][1].step, StepTime(
            max(now.at_s - before.at_s for before, now in row), sum(now.cpu_s - before.cpu_s for before, now in row),
            sum(now.num_computed for _, now in row) - microbatches,
        ))
        for row in zip(*members, strict=True)
    ]  # fmt: skip
