"""Fault to next committed step, four replicas of the same MLP: outlast, torchft, torchrun, plain restart.

One sample: let a fleet train, hurt one replica at a random moment, and read from every survivor's commits how long the
interrupted step took. `net` is that time less a median step, less what had to be computed again (microbatches
recomputed, or steps redone); `gross` is what a clock on the wall saw from the fault to the next new step. outlast
replaces its dead, so one fleet gives many samples, and each also shows how long a joiner held up the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._analysis import Outcome
from benchmarks._common import Bounds, Table, alone, environment, options, publish, spread
from benchmarks._fleet import FleetStuck
from benchmarks._strike import FAULTS, START_S, Striker, steady
from benchmarks._systems import SYSTEMS, Launch, interpreter, peers_missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchmarks._fleet import Fleet

__all__ = ["main"]

VOLLEY = 8
"""Strikes in a row under one --lock: about a minute."""
JOIN_LIMIT_S = 0.05
MEDIAN_S = {"SIGKILL": 0.1}
WORST_S = {"SIGKILL": 0.3, "SIGKILL-coordinator": 1.0}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rng, machine, bounds = random.Random(args.seed), environment(args), Bounds()
    outcomes = [Outcome(**told) for path in args.add for told in json.loads(path.read_text())["data"]]
    absent = {name: why for name in args.systems if (why := peers_missing(SYSTEMS[name], args))}
    for name in args.systems:
        for fault in args.faults:
            if name in absent or (fault.endswith("-coordinator") and not name.startswith("outlast")):
                continue
            for outcome in sample(name, fault, args, rng):
                outcomes.append(outcome)
                print(outcome.line(), file=sys.stderr, flush=True)
    claim(outcomes, bounds)
    shown = [name for name in SYSTEMS if name in args.systems or any(o.system == name for o in outcomes)]
    faults = [fault for fault in FAULTS if fault in args.faults or any(o.fault == fault for o in outcomes)]
    tables = [summary(fault, shown, outcomes, absent, args.timeout_s) for fault in faults]
    return publish("recovery", args, machine, tables, bounds, [dataclasses.asdict(outcome) for outcome in outcomes])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=[n for n in SYSTEMS if n != "ddp"])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["SIGKILL"])
    parser.add_argument("--samples", type=int, default=3, help="of each system and fault")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--model", default="0.15M")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of the peers' collectives")
    parser.add_argument("--peers-python", type=interpreter, help="interpreter of an environment with the peers")
    parser.add_argument("--add", nargs="*", type=Path, default=[], help="earlier --out files of this machine")
    return parser.parse_args(argv)


def sample(name: str, fault: str, args: argparse.Namespace, rng: random.Random) -> Iterator[Outcome]:
    """`args.samples` outcomes; a fleet that does not replace its dead is started anew for each, and one whose
    coordinator dies for every few: the run ends when that happens more than eight times within a minute."""
    left = args.samples
    while left:
        count = min(left, VOLLEY) if fault.endswith("-coordinator") else left
        count = count if SYSTEMS[name].replaces else 1
        left -= count
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            launch = Launch(
                replicas=args.replicas, model=args.model, microbatches=args.microbatches, seed=args.seed,
                python=args.peers_python or Path(sys.executable), scratch=Path(scratch), timeout_s=args.timeout_s,
                settings={"max_restarts": str(2 * count + 2)},
            )  # fmt: skip
            striker = Striker(name=name, system=SYSTEMS[name], launch=launch, rng=rng)
            yield from campaign(striker, fault, count, args.lock)


def campaign(striker: Striker, fault: str, count: int, lock: Path | None) -> Iterator[Outcome]:
    """Up to `count` strikes in one fleet; it ends early when one is not survived."""
    with striker.system.fleet(striker.launch) as fleet:
        try:
            fleet.wait_for("steady training", lambda: steady(fleet, striker.launch.replicas), START_S)
        except FleetStuck as stuck:
            yield Outcome(system=striker.name, fault=fault, failed=str(stuck))
            return
        while count > 0:
            with alone(lock):
                for outcome in volley(striker, fleet, fault, min(count, VOLLEY)):
                    yield outcome
                    count = 0 if outcome.failed else count - 1


def volley(striker: Striker, fleet: Fleet, fault: str, count: int) -> Iterator[Outcome]:
    """Some strikes in a row; the last is the first that is not survived."""
    for _ in range(count):
        outcome = striker.strike(fleet, fault)
        if striker.system.replaces and not outcome.failed:
            outcome = striker.rejoin(fleet, outcome)
        yield outcome
        if outcome.failed:
            return


def claim(outcomes: Sequence[Outcome], bounds: Bounds) -> None:
    """The bounds are outlast's alone: what it promises, not what the peers do."""
    groups = sorted({(o.system, o.fault) for o in outcomes if o.system in {"outlast", "outlast-spare"}})
    for system, fault in groups:
        mine = [o for o in outcomes if (o.system, o.fault) == (system, fault)]
        nets = [float("inf") if o.failed else o.net_s - o.deadline_s for o in mine]
        less = " less its deadline" if fault == "SIGSTOP" else ""
        bounds.check(
            f"{system}: {fault}{less}, median", spread(nets).median, MEDIAN_S.get(fault, WORST_S.get(fault, 0.1))
        )
        bounds.check(f"{system}: {fault}{less}, worst of {len(nets)}", max(nets), WORST_S.get(fault, 0.1))
        for what, stalls in (
            ("a joiner's stall", [o.join_stall_s for o in mine if o.join_stall_s]),
            ("the longest step until its 40th", [o.later_stall_s for o in mine if o.join_stall_s]),
            ("what members waited of it", [o.served_stall_s for o in mine if o.served_stall_s]),
        ):
            if stalls:
                bounds.check(f"{system}: {what} after {fault}, worst of {len(stalls)}", max(stalls), JOIN_LIMIT_S)


def summary(
    fault: str, systems: Sequence[str], outcomes: Sequence[Outcome], absent: dict[str, str], timeout_s: float
) -> Table:
    rows = []
    for name in systems:
        mine = [o for o in outcomes if o.system == name and o.fault == fault]
        well = [o for o in mine if not o.failed]
        failed = f"{len(mine) - len(well)} of {len(mine)}" if mine else ""
        title = SYSTEMS[name].title
        if not mine and name not in absent:
            continue
        if not well:
            rows.append([title, absent.get(name, "never recovered"), *[""] * 8, failed])
            continue
        rows.append([
            title, spread(o.net_s for o in well).show(), spread(o.gross_s for o in well).show(),
            f"{spread(o.redone_steps for o in well).median:.0f}", _stalls(o.served_stall_s for o in well),
            _stalls(o.join_stall_s for o in well), _stalls(o.later_stall_s for o in well),
            _stalls(o.quiet_wait_s for o in well if o.served_stall_s),
            spread(o.median_step_s for o in well).show(1e3, 1), failed,
        ])  # fmt: skip
    columns = [
        "system", "net s: median (low to high)", "gross s", "steps redone", "joiner's stall ms", "with its start ms",
        "to its 40th step ms", "calm ms", "median step ms", "failed",
    ]  # fmt: skip
    phases = ", ".join(sorted({o.phase for o in outcomes if o.fault == fault and o.phase}))
    notes = [
        "joiner's stall: the longest that a member did not compute in a step since the replacement was served, until "
        "it had made five steps, less the median: median and worst; then a whole step since the recovery (it starts on "
        "the same processors), less the microbatches of who is missing; then that until its 40th step; calm: the "
        "first for as many steps before the fault",
        "net: the interrupted step less a median step, less what was computed again",
        f"the peers' collectives time out after {timeout_s:g} s (their defaults: 60 s and more); outlast's after 60 s",
    ]
    return Table(
        title=f"{fault} of one replica", columns=columns, rows=rows, notes=[*notes, f"the victims were in: {phases}"]
    )


def _stalls(values: Iterable[float]) -> str:
    kept = [value * 1e3 for value in values if value]
    return f"{spread(kept).median:.0f}, {max(kept):.0f}" if kept else ""


if __name__ == "__main__":
    sys.exit(main())
