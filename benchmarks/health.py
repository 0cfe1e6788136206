"""Health: what checked sums, device tests, readings, prediction and link localisation find, and what they cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import _health_fleet, _health_moves, _health_records, _health_sums, _health_worth
from benchmarks._common import Bounds, environment, options, publish
from benchmarks._workload import MODELS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

PARTS = ("sums", "trade", "tests", "readings", "links", "rival", "alarms", "prediction", "moves")


def main(argv: Sequence[str] | None = None) -> int:
    made = options(__doc__)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--models", nargs="+", choices=sorted(MODELS.keys() - {"none"}), default=["3.2M", "10M"])
    made.add_argument("--dtypes", nargs="+", choices=sorted(_health_sums.DTYPES), default=["float32", "bf16"])
    made.add_argument("--tries", type=int, default=5, help="flips of each bit in each kind of product")
    made.add_argument("--rounds", type=int, default=12, help="steps that are timed, of each kind")
    made.add_argument("--rows", type=int, nargs="+", default=[32, 256], help="samples of a microbatch that is timed")
    made.add_argument("--steps", type=int, default=10_000, help="training steps without a fault")
    made.add_argument("--quiet-model", default="0.15M", choices=sorted(MODELS.keys() - {"none"}), help="for --steps")
    made.add_argument("--minutes", type=float, default=1.0, help="of known answers without a fault")
    made.add_argument("--draws", type=int, default=6, help="of bad links in each fabric")
    made.add_argument("--alarms", type=int, default=2_000, help="simulated alarms of each known hazard")
    made.add_argument("--runs", type=int, default=500, help="simulated runs behind each ETTR")
    made.add_argument("--fleet-steps", type=int, default=6_000, help="of the real fleet whose hosts fail")
    made.add_argument("--true-alarms", type=float, default=0.8, help="share of its alarms that come true")
    made.add_argument("--data", type=Path, help="a folder of failure records: see `_health_records`")
    made.add_argument("--units", nargs="+", default=[], help="RECORD=NUMBER of units observed, if some never failed")
    args = made.parse_args(argv)
    torch.set_num_threads(1)
    machine, bounds, tables = environment(args), Bounds(), []
    data: list[Any] = []
    if "sums" in args.parts:
        tables += _health_sums.tables_of(args, bounds, data)
    if "trade" in args.parts:
        for name in args.models:
            for kind in args.dtypes:
                subject = _health_sums.Subject(name, _health_sums.DTYPES[kind], args.seed)
                shown = f"{name}, {kind}"
                tables.append(_health_worth.trade_off(subject, args.tries, args.rounds, args.seed, shown, data))
    if "tests" in args.parts:
        tables += _health_fleet.tests(args.minutes, args.seed, bounds, data)
    if "readings" in args.parts:
        tables.append(_health_fleet.readings(bounds, data))
        small = _health_sums.Subject(args.quiet_model, torch.float32, args.seed)
        tables.append(_health_worth.undisturbed(small, args.rounds, data))
    if "links" in args.parts:
        tables.append(_health_fleet.links(args.seed, args.draws, bounds, data))
    if "rival" in args.parts:
        small_fabrics, ours = _health_fleet.fabrics_of(64), _health_fleet.named
        tables.append(_health_worth.netbouncer(small_fabrics, args.draws, args.seed, ours, data))
    if "alarms" in args.parts:
        tables.append(_health_worth.policies(args.alarms, args.seed, bounds, data))
    units = {name: int(number) for name, _, number in (each.rpartition("=") for each in args.units)}
    if "prediction" in args.parts and args.data is not None:
        found, measured = _health_records.prediction(args.data, units, args.seed, data)
        tables += [*found, _health_worth.gain(measured, args.runs, args.seed, data)]
    if "moves" in args.parts:
        tables.append(_health_moves.moves(args.fleet_steps, args.true_alarms, args.seed, bounds, data))
    machine["options"].pop("data", None)
    return publish("health", args, machine, tables, bounds, data)


if __name__ == "__main__":
    sys.exit(main())
