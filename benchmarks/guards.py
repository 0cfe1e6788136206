"""What guards cost: steps with guards beside steps without, in one fleet.

The ceiling on what watching activations may cost ("full") is one of wall time, which passes in the other settings'
steps too: looks are as many times too frequent here as there are settings, and that line shows more than is so.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Table, environment, publish
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
    plain, rows = found[0], []
    for series in found:
        wall, cpu, (wall_ms, cpu_ms) = series.wall_cost(plain), series.cpu_cost(plain), series.show()
        beside = series is not plain
        rows.append([
            series.setting, wall_ms, wall.show() if beside else "", cpu_ms, cpu.show() if beside else "",
        ])  # fmt: skip
        if series.setting == "default":
            bounds.check(f"{args.model}: what guards cost of a step, wall", wall.value, LIMIT, "of a step")
            bounds.check(f"{args.model}: what guards cost of a step, processors", cpu.value, LIMIT, "of a step")
    table = Table(
        title=title(args), rows=rows,
        columns=["guards", "step ms", "over off (standard error)", "processor ms", "over off (standard error)"],
    )  # fmt: skip
    return publish("guards", args, machine, [table], bounds, [dataclasses.asdict(s) for s in found])


if __name__ == "__main__":
    sys.exit(main())
