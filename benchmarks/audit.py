"""What audits cost: a step in which a share of the microbatches is computed twice, beside one without audits.

One fleet, whose share changes from block to block: two fleets of one kind differ by up to 1 % here, as their memory
happens to lie. Ratios are taken within a round of blocks. The line after none is the price of being ready: every
gradient is fingerprinted, nothing is computed twice. The claim is about microbatches: a share a of them computed twice
may cost 1.1 a of a step; a is what was drawn in the blocks measured. Processor seconds are counted beside wall time: a
machine that is shared with others disturbs them less, and who waits for a peer spends none.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Spread, Table, alone, environment, options, publish, spread
from benchmarks._probe import in_turn
from benchmarks._systems import SYSTEMS, Launch
from benchmarks.overhead import BLOCKS, START_S, run_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._fleet import Fleet

__all__ = ["main"]

READY = 1e-9
"""A share so small that no audit is ever drawn."""
LIMIT = 1.1


@dataclasses.dataclass(kw_only=True, slots=True)
class Series:
    """One share: seconds a step of the slowest member, processor seconds a step of all, and the share of microbatches
    that was drawn; a figure a round."""

    share: float
    step_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    drawn: list[float] = dataclasses.field(default_factory=list)

    @property
    def twice(self) -> float:
        """The share of all microbatches that was computed twice."""
        return sum(self.drawn) / len(self.drawn)

    def cost(self, plain: Series) -> Spread:
        """Of a step without audits, a figure a round."""
        return _over(self.step_s, plain.step_s)

    def cpu_cost(self, plain: Series) -> Spread:
        return _over(self.cpu_s, plain.cpu_s)


def _over(mine: Sequence[float], other: Sequence[float]) -> Spread:
    return spread(a / b - 1.0 for a, b in zip(mine, other, strict=True))


def cpu_seconds(fleet: Fleet) -> float:
    """User and system time of all members so far."""
    fields = [Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split() for member in fleet.living]
    return sum(int(row[11]) + int(row[12]) for row in fields) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    machine, bounds = environment(args), Bounds()
    found = compare([0.0, READY, *args.shares], args)
    plain = found[0]
    for series in found[2:]:
        what = f"{args.model}, {args.replicas} replicas, share {series.share:g}: cost over share, median"
        bounds.check(f"{what}, wall", series.cost(plain).median / (series.twice or series.share), LIMIT, "times")
        bounds.check(
            f"{what}, processors", series.cpu_cost(plain).median / (series.twice or series.share), LIMIT, "times"
        )
    return publish("audit", args, machine, [tabulate(found, args)], bounds, [dataclasses.asdict(s) for s in found])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--model", choices=BLOCKS, default="3.2M")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--shares", type=_share, nargs="*", default=[0.02, 0.25, 1.0], help="none: readiness alone")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20, help="a block")
    return parser.parse_args(argv)


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: a share is above 0 (which is measured in any case) and at most 1")
    return share


def compare(shares: Sequence[float], args: argparse.Namespace) -> list[Series]:
    """Rounds of blocks, one a share; the first round warms up and is dropped."""
    found = [Series(share=share) for share in shares]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, start(shares, args, Path(scratch)) as fleet:
        fleet.wait_for("first block", lambda: fleet.all_wait(args.replicas), START_S)
        with alone(args.lock):
            for block in range(1, (args.rounds + 1) * len(shares)):  # block 0 is over
                before = cpu_seconds(fleet)
                step_s = run_block(fleet, args.replicas, args.steps)
                if block >= len(shares):
                    series = found[shares.index(in_turn(shares, block))]
                    series.step_s.append(step_s)
                    series.cpu_s.append((cpu_seconds(fleet) - before) / args.steps)
                    computed = sum(c.num_computed for member in fleet.living for c in member.commits[-args.steps :])
                    series.drawn.append(computed / (args.steps * args.microbatches) - 1.0)
    return found


def start(shares: Sequence[float], args: argparse.Namespace, scratch: Path) -> Fleet:
    launch = Launch(
        replicas=args.replicas, model=args.model, microbatches=args.microbatches, seed=args.seed,
        python=Path(sys.executable), scratch=scratch, options=["--audits=" + ",".join(map(str, shares))],
    )  # fmt: skip
    fleet = SYSTEMS["outlast"].fleet(launch)
    fleet.set_block(args.steps)
    return fleet


def tabulate(found: Sequence[Series], args: argparse.Namespace) -> Table:
    plain, rows = found[0], []
    for series in found:
        cost, cpu = series.cost(plain), series.cpu_cost(plain)
        ready = series.share == READY
        rows.append([
            "0 (fingerprints only)" if ready else f"{series.share:g}", f"{series.twice:.4f}",
            spread(series.step_s).show(1e3, 1), f"{cost.median * 100:+.1f} %",
            f"{cost.quartile1 * 100:+.1f} to {cost.quartile3 * 100:+.1f} %",
            f"{cost.median / series.twice:.2f}" if series.twice else "", spread(series.cpu_s).show(1e3, 1),
            f"{cpu.median * 100:+.1f} %", f"{cpu.median / series.twice:.2f}" if series.twice else "",
        ])  # fmt: skip
    return Table(
        title=f"{args.model} parameters, {args.replicas} replicas, {args.microbatches} microbatches",
        columns=["share", "computed twice", "step ms", "over no audits, median", "middle half", "cost over share",
                 "processor ms", "over no audits", "cost over share"], rows=rows,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
