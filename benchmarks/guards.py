"""What guards cost: steps with guards beside steps without, in one fleet.

The ceiling on what watching activations may cost ("full") is one of wall time, which passes in the other settings'
blocks too: looks are as many times too frequent here as there are settings, and that line shows more than is so.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Table, environment, publish, spread
from benchmarks._variants import compare, parser, title

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

SETTINGS = ("off", "default", "full")
LIMIT = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--settings", nargs="+", choices=SETTINGS[1:], default=["default"])
    args = made.parse_args(argv)
    machine, bounds = environment(args), Bounds()
    found = compare("guards", ["off", *args.settings], args)
    rows = []
    for series in found:
        cost, cpu = series.cost(found[0]), series.cpu_cost(found[0])
        rows.append([
            series.setting, spread(series.step_s).show(1e3, 2), f"{cost.median * 100:+.2f} %",
            f"{cost.quartile1 * 100:+.2f} to {cost.quartile3 * 100:+.2f} %", spread(series.cpu_s).show(1e3, 2),
            f"{cpu.median * 100:+.2f} %",
        ])  # fmt: skip
        if series.setting == "default":
            what = f"{args.model}: what guards cost of a step, median"
            bounds.check(f"{what}, wall", cost.median, LIMIT, "of a step")
            bounds.check(f"{what}, processors", cpu.median, LIMIT, "of a step")
    table = Table(
        title=title(args), rows=rows,
        columns=["guards", "step ms", "over off, median", "middle half", "processor ms", "over off, median"],
    )  # fmt: skip
    return publish("guards", args, machine, [table], bounds, [dataclasses.asdict(s) for s in found])


if __name__ == "__main__":
    sys.exit(main())
