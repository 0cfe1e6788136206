"""Fault to next committed step, four replicas of the same MLP: outlast, torchft, torchrun, plain restart.

One sample: start a fleet, let it run, hurt one replica at a random moment, and read from every survivor's commits how
long the interrupted step took. `net` is that time less a median step, less what had to be computed again (microbatches
recomputed, or steps redone); `gross` is what a clock on the wall saw from the fault to the next new step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._analysis import Outcome, measure_restart, measure_survivors, newest_step
from benchmarks._common import Bounds, Table, alone, environment, options, publish, spread
from benchmarks._fleet import FleetStuck
from benchmarks._systems import SYSTEMS, Launch, System, peers_missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._fleet import Fleet, Member

__all__ = ["main"]

FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
WARM_STEPS, AFTER_STEPS = 40, 4
START_S, GIVE_UP_S = 120.0, 90.0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rng, machine, bounds = random.Random(args.seed), environment(args), Bounds()
    outcomes: list[Outcome] = []
    absent = {name: why for name in args.systems if (why := peers_missing(SYSTEMS[name], args))}
    for _ in range(args.samples):
        for name in args.systems:
            for fault in args.faults:
                if name not in absent:
                    outcomes.append(sample(name, fault, args, rng))
                    print(outcomes[-1].line(), file=sys.stderr)
    claim(outcomes, bounds)
    tables = [summary(fault, args.systems, outcomes, absent) for fault in args.faults]
    return publish("recovery", args, machine, tables, bounds, [dataclasses.asdict(outcome) for outcome in outcomes])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[n for n in SYSTEMS if n != "ddp"])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["SIGKILL"])
    parser.add_argument("--samples", type=int, default=3, help="of each system and fault")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--model", default="0.15M")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of the peers' collectives")
    parser.add_argument("--peers-python", type=Path, help="interpreter of an environment with the peers")
    return parser.parse_args(argv)


def sample(name: str, fault: str, args: argparse.Namespace, rng: random.Random) -> Outcome:
    """Start one fleet, hurt it once, measure."""
    system = SYSTEMS[name]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        launch = Launch(
            replicas=args.replicas, model=args.model, microbatches=args.microbatches, seed=args.seed,
            python=args.peers_python or Path(sys.executable), scratch=Path(scratch), timeout_s=args.timeout_s,
        )  # fmt: skip
        with system.fleet(launch) as fleet:
            try:
                fleet.wait_for("steady training", lambda: steady(fleet, args.replicas), START_S)
                with alone(args.lock):
                    return strike(name, system, fault, fleet, rng, args.replicas)
            except FleetStuck as stuck:
                return Outcome(system=name, fault=fault, failed=str(stuck))


def steady(fleet: Fleet, replicas: int) -> bool:
    return sum(len(member.commits) >= WARM_STEPS for member in fleet.living) >= replicas


def strike(name: str, system: System, fault: str, fleet: Fleet, rng: random.Random, replicas: int) -> Outcome:
    """Hurt one member at a random moment and wait until everybody else has gone on for a few steps."""
    fleet.listen(rng.uniform(0.3, 1.0))
    before = fleet.living
    victim = rng.choice([member for member in before if member.rank != system.immune])
    phase, at_s = fleet.phase(victim), time.monotonic()
    os.kill(victim.pid, FAULTS[fault])
    reached = newest_step(before, at_s)
    others = [member for member in before if member is not victim]
    wanted = replicas - 1 if system.keeps else replicas

    def gone_on() -> bool:
        return sum(has_gone_on(member, reached, at_s) for member in fleet.living if member is not victim) >= wanted

    def broken() -> bool:
        return system.keeps and any(member.gone for member in others)

    told = Outcome(system=name, fault=fault, phase=phase)
    try:
        fleet.wait_for("new step after the fault", lambda: broken() or gone_on(), GIVE_UP_S)
    except FleetStuck as stuck:
        return dataclasses.replace(told, failed=str(stuck))
    if broken():
        lost = sum(member.gone for member in others)
        return dataclasses.replace(told, failed=f"{lost} or more survivors died too\n{fleet.tail()}")
    if system.keeps:
        found = measure_survivors(others, at_s)
    else:
        found = measure_restart(before, [m for m in fleet.members if m not in before], at_s, reached)
    return dataclasses.replace(found, system=name, fault=fault, phase=phase)


def has_gone_on(member: Member, reached: int, at_s: float) -> bool:
    return sum(commit.at_s > at_s and commit.step > reached for commit in member.commits) >= AFTER_STEPS


def claim(outcomes: Sequence[Outcome], bounds: Bounds) -> None:
    """The bounds are outlast's alone: what it promises, not what the peers do."""
    own = [o for o in outcomes if o.system in {"outlast", "outlast-spare"} and o.fault == "SIGKILL"]
    for system in sorted({outcome.system for outcome in own}):
        nets = [o.net_s if not o.failed else float("inf") for o in own if o.system == system]
        bounds.check(f"{system}: SIGKILL, median", spread(nets).median, 0.1)
        bounds.check(f"{system}: SIGKILL, worst of {len(nets)}", max(nets), 0.3)


def summary(fault: str, systems: Sequence[str], outcomes: Sequence[Outcome], absent: dict[str, str]) -> Table:
    rows = []
    for name in systems:
        mine = [o for o in outcomes if o.system == name and o.fault == fault]
        well = [o for o in mine if not o.failed]
        failed = f"{len(mine) - len(well)} of {len(mine)}" if mine else ""
        if not well:
            rows.append([SYSTEMS[name].title, absent.get(name, "never recovered"), "", "", "", failed])
            continue
        rows.append([
            SYSTEMS[name].title, spread(o.net_s for o in well).show(), spread(o.gross_s for o in well).show(),
            f"{spread(o.redone_steps for o in well).median:.0f}",
            spread(o.median_step_s for o in well).show(1e3, 1), failed,
        ])  # fmt: skip
    columns = ["system", "net s: median (low to high)", "gross s", "steps redone", "median step ms", "failed"]
    phases = ", ".join(sorted({o.phase for o in outcomes if o.fault == fault and o.phase}))
    return Table(
        title=f"{fault} of one replica", columns=columns, rows=rows,
        notes=["net: the interrupted step less a median step, less what was computed again",
               f"the victim was in: {phases}"],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
