"""What audits cost: a step in which a share of the microbatches is computed twice, beside one without audits.

The line after none is the price of being ready: every gradient is fingerprinted, nothing is computed twice. The claim
is about microbatches: a share a of them computed twice may cost 1.1 a of a step; a is what was drawn in the blocks
measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Table, environment, publish, spread
from benchmarks._variants import Series, compare, parser, title

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

READY = 1e-9
"""A share so small that no audit is ever drawn."""
LIMIT = 1.1


def twice(series: Series) -> float:
    """The share of all microbatches that was computed twice."""
    return sum(series.drawn) / len(series.drawn)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--shares", type=_share, nargs="*", default=[0.02, 0.25, 1.0], help="none: readiness alone")
    args = made.parse_args(argv)
    machine, bounds = environment(args), Bounds()
    found = compare("audits", [f"{share:g}" for share in (0.0, READY, *args.shares)], args)
    plain = found[0]
    for share, series in zip(args.shares, found[2:], strict=True):
        what = f"{args.model}, {args.replicas} replicas, share {share:g}: cost over share, median"
        drawn = twice(series) or share
        bounds.check(f"{what}, wall", series.cost(plain).median / drawn, LIMIT, "times")
        bounds.check(f"{what}, processors", series.cpu_cost(plain).median / drawn, LIMIT, "times")
    return publish("audit", args, machine, [tabulate(found, args)], bounds, [dataclasses.asdict(s) for s in found])


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: a share is above 0 (which is measured in any case) and at most 1")
    return share


def tabulate(found: Sequence[Series], args: argparse.Namespace) -> Table:
    plain, rows = found[0], []
    for series in found:
        cost, cpu, drawn = series.cost(plain), series.cpu_cost(plain), twice(series)
        rows.append([
            "0 (fingerprints only)" if float(series.setting) == READY else series.setting, f"{drawn:.4f}",
            spread(series.step_s).show(1e3, 1), f"{cost.median * 100:+.1f} %",
            f"{cost.quartile1 * 100:+.1f} to {cost.quartile3 * 100:+.1f} %",
            f"{cost.median / drawn:.2f}" if drawn else "", spread(series.cpu_s).show(1e3, 1),
            f"{cpu.median * 100:+.1f} %", f"{cpu.median / drawn:.2f}" if drawn else "",
        ])  # fmt: skip
    return Table(
        title=title(args),
        columns=["share", "computed twice", "step ms", "over no audits, median", "middle half", "cost over share",
                 "processor ms", "over no audits", "cost over share"], rows=rows,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
