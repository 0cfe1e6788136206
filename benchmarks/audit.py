"""What audits cost: a step in which a share of the microbatches is computed twice, beside one without audits.

The line after none is the price of being ready: every gradient is fingerprinted, nothing is computed twice. The claim
is about microbatches: a share a of them computed twice may cost 1.1 a of a step; a is what was drawn in the steps
measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Table, environment, publish
from benchmarks._variants import Series, compare, parser, title

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

READY = 1e-9
"""A share so small that no audit is ever drawn."""
LIMIT = 1.1


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--shares", type=_share, nargs="*", default=[0.02, 0.25, 1.0], help="none: readiness alone")
    args = made.parse_args(argv)
    machine, bounds = environment(args), Bounds()
    found = compare("audits", [f"{share:g}" for share in (0.0, READY, *args.shares)], args)
    plain = found[0]
    for share, series in zip(args.shares, found[2:], strict=True):
        what, drawn = f"{args.model}, {args.replicas} replicas, share {share:g}: cost over share", series.twice or share
        bounds.check(f"{what}, wall", series.wall_cost(plain).value / drawn, LIMIT, "times")
        bounds.check(f"{what}, processors", series.cpu_cost(plain).value / drawn, LIMIT, "times")
    return publish("audit", args, machine, [tabulate(found, args)], bounds, [dataclasses.asdict(s) for s in found])


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: a share is above 0 (which is measured in any case) and at most 1")
    return share


def tabulate(found: Sequence[Series], args: argparse.Namespace) -> Table:
    plain, rows = found[0], []
    for series in found:
        wall, cpu, drawn, (wall_ms, cpu_ms) = (
            series.wall_cost(plain),
            series.cpu_cost(plain),
            series.twice,
            series.show(),
        )
        rows.append([
            "0 (fingerprints only)" if float(series.setting) == READY else series.setting, f"{drawn:.4f}",
            wall_ms, wall.show() if series is not plain else "", f"{wall.value / drawn:.2f}" if drawn else "",
            cpu_ms, cpu.show() if series is not plain else "", f"{cpu.value / drawn:.2f}" if drawn else "",
        ])  # fmt: skip
    return Table(
        title=title(args), rows=rows,
        columns=["share", "computed twice", "step ms", "over no audits (standard error)", "cost over share",
                 "processor ms", "over no audits (standard error)", "cost over share"],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
