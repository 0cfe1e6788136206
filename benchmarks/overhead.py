"""A healthy step beside plain DDP's: same microbatches, same threads, block by block in turn.

All fleets of a model are up at once; each runs a block of steps while the others wait, and the order turns around every
round. A ratio is taken within a round, so what the machine does to one it does to the other. The time of a block is
that of its slowest member, from its first commit to its last. Beside the times: what a rank's memory should be by the
formula and what it was, and what of outlast's step its fingerprints take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Spread, Table, alone, environment, options, publish, spread
from benchmarks._memory import needs
from benchmarks._probe import FINGERPRINTS_S, SHARE_BYTES
from benchmarks._systems import COMPUTING, SYSTEMS, Launch, interpreter, peers_missing
from benchmarks._workload import build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._fleet import Fleet

__all__ = ["main"]

KNOWN = {**SYSTEMS, **COMPUTING}
BLOCKS = {"0.15M": 100, "3.2M": 20, "10M": 8}
"""Steps in a block: one to three seconds on two cores."""
EXCHANGES = {"outlast": "shm", "outlast-c10d": "c10d"}
LIMITS = {"outlast": 1.05, "outlast-c10d": 1.25}
START_S, BLOCK_S = 240.0, 120.0


@dataclasses.dataclass(kw_only=True, slots=True)
class Series:
    """One system with one model and fleet size: seconds a step, a figure a round.

    `peak_bytes`: resident, of its largest member, shared pages counted whole; `usual_bytes`: the same of the median
    member at the end of its first block; `share_bytes`: divided among users.
    `fingerprints_s`: processor time a step, of the member that needed most.
    """

    system: str
    model: str
    replicas: int
    step_s: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    usual_bytes: float = 0.0
    share_bytes: float = 0.0
    fingerprints_s: float = float("nan")

    def ratio(self, reference: Series) -> Spread:
        return spread(mine / other for mine, other in zip(self.step_s, reference.step_s, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    machine, bounds, every = environment(args), Bounds(), list[Series]()
    absent = {name: why for name in args.systems if (why := peers_missing(KNOWN[name], args))}
    names = ["ddp", *(name for name in args.systems if name not in absent)]
    for model in args.models:
        every += compare(names, model, args.replicas, args)
    tables = [tabulate(model, every, absent, args) for model in args.models]
    tables.append(besides(every, args))
    for series in every:
        if series.system in LIMITS:
            what = f"{series.system}, {series.model}, {series.replicas} replicas: median step over DDP's"
            bounds.check(what, series.ratio(reference(series, every)).median, LIMITS[series.system], "times")
    return publish("overhead" + args.suffix, args, machine, tables, bounds, [dataclasses.asdict(s) for s in every])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--systems", nargs="+", choices=[name for name in KNOWN if name != "ddp"],
                        default=["alone", "apart", "outlast", "outlast-c10d", "torchft", "torchft-ddp"])  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--shrunk", action="store_true", help="start one replica more under outlast, and kill it first")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers-python", type=interpreter, help="interpreter of an environment with the peers")
    args = parser.parse_args(argv)
    args.suffix = " after shrinking" if args.shrunk else ""
    return args


def compare(names: Sequence[str], model: str, replicas: int, args: argparse.Namespace) -> list[Series]:
    """Start all fleets, then rounds of blocks; the first round warms up and is dropped."""
    with contextlib.ExitStack() as stack:
        fleets = {name: stack.enter_context(start(name, model, args, stack)) for name in names}
        for name, fleet in fleets.items():
            prepare(name, fleet, members(name, args), args)
        found = {name: Series(system=name, model=model, replicas=replicas) for name in names}
        for name, fleet in fleets.items():
            found[name].usual_bytes = statistics.median(member.peak_bytes for member in fleet.living)
        with alone(args.lock):
            for turn in range(args.rounds + 1):
                for name in names if turn % 2 else list(reversed(names)):
                    step_s = run_block(fleets[name], members(name, args), BLOCKS[model])
                    if turn:
                        found[name].step_s.append(step_s)
        for name, fleet in fleets.items():
            found[name].peak_bytes = max(member.peak_bytes for member in fleet.living)
            found[name].share_bytes = max(member.numbers[SHARE_BYTES] for member in fleet.living)
            told = [member.numbers[FINGERPRINTS_S] for member in fleet.living if FINGERPRINTS_S in member.numbers]
            found[name].fingerprints_s = max(told, default=float("nan"))
        for series in found.values():
            times = spread(series.step_s).show(1e3, 1)
            print(f"{series.system} {model}: {times} ms, {series.peak_bytes / 2**20:.0f} MiB", file=sys.stderr)
        return list(found.values())


def start(name: str, model: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> Fleet:
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    own = name.startswith("outlast")
    launch = Launch(
        replicas=args.replicas + (args.shrunk and own), model=model, microbatches=args.microbatches, seed=args.seed,
        python=args.peers_python or Path(sys.executable), scratch=scratch, timeout_s=60.0,
        settings={"max_restarts": "0"} if args.shrunk else {}, options=("--fingerprints",) if own else (),
    )  # fmt: skip
    fleet = KNOWN[name].fleet(launch)
    fleet.set_block(BLOCKS[model])
    return fleet


def members(name: str, args: argparse.Namespace) -> int:
    """Processes of a system's fleet, when it is measured."""
    return 1 if name == "alone" else args.replicas


def prepare(name: str, fleet: Fleet, replicas: int, args: argparse.Namespace) -> None:
    """Every member waits at the end of its first block; if the fleet is to shrink, it does so in its second."""
    extra = int(args.shrunk and name.startswith("outlast"))
    fleet.wait_for("first block", lambda: fleet.all_wait(replicas + extra), START_S)
    if extra:
        os.kill(fleet.living[-1].pid, signal.SIGKILL)
        fleet.wait_for("death of one", lambda: len(fleet.living) == replicas, BLOCK_S)


def run_block(fleet: Fleet, replicas: int, num_steps: int) -> float:
    """Let the fleet run one block. Seconds a step of its slowest member."""
    fleet.release()
    fleet.wait_for("end of a block", lambda: fleet.all_wait(replicas), BLOCK_S)
    last = [member.commits[-num_steps:] for member in fleet.living]
    return max((commits[-1].at_s - commits[0].at_s) / (len(commits) - 1) for commits in last)


def reference(series: Series, every: Sequence[Series]) -> Series:
    return next(s for s in every if s.system == "ddp" and s.model == series.model and s.replicas == series.replicas)


def tabulate(model: str, every: Sequence[Series], absent: dict[str, str], args: argparse.Namespace) -> Table:
    rows = []
    for series in (s for s in every if s.model == model):
        plain = reference(series, every)
        ratio = series.ratio(plain)
        rows.append([
            KNOWN[series.system].title, spread(series.step_s).show(1e3, 1), f"{(ratio.median - 1) * 100:+.1f} %",
            f"{(ratio.quartile1 - 1) * 100:+.1f} to {(ratio.quartile3 - 1) * 100:+.1f} %",
            f"{series.peak_bytes / 2**20:.0f}", f"{(series.peak_bytes - plain.peak_bytes) / 2**20:+.0f}",
            f"{(series.share_bytes - plain.share_bytes) / 2**20:+.0f}",
        ])  # fmt: skip
    rows += [[KNOWN[name].title, why, "", "", "", "", ""] for name, why in absent.items()]
    return Table(
        title=f"{model} parameters, {args.replicas} replicas{args.suffix}, {args.microbatches} microbatches",
        columns=["system", "step ms", "over DDP, median", "middle half", "peak MiB a rank", "over DDP",
                 "PSS over DDP, MiB"], rows=rows,
    )  # fmt: skip


def besides(every: Sequence[Series], args: argparse.Namespace) -> Table:
    """outlast's memory by its formula beside what was measured, and its fingerprints."""
    rows = []
    for series in (s for s in every if s.system in EXCHANGES):
        plain, step_s = reference(series, every), spread(series.step_s).median
        params = list(build(series.model, args.seed)[0].parameters())
        need = needs(params, series.replicas, args.microbatches, EXCHANGES[series.system])
        rows.append([
            f"{KNOWN[series.system].title}, {series.model}", f"{need.gradient / 2**20:.1f}", str(need.sums),
            f"{need.own / 2**20:.1f}", f"{need.mapped / 2**20:.1f}", f"{need.fixed / 2**20:.1f}",
            f"{need.ddp / 2**20:.1f}", f"{need.over_ddp / 2**20:+.1f}",
            f"{(series.usual_bytes - plain.usual_bytes) / 2**20:+.1f}",
            f"{series.fingerprints_s * 1e3:.2f}", f"{series.fingerprints_s / step_s * 100:.1f} %",
        ])  # fmt: skip
    return Table(
        title=f"Memory a rank by the formula, MiB, and fingerprints, {args.replicas} replicas{args.suffix}",
        columns=["system", "gradient", "sums", "own", "peers' mapped", "fixed", "DDP's", "formula over DDP",
                 "peak measured over DDP", "fingerprints ms a step", "of the step"],
        rows=rows, notes=[
            "beside parameters, optimizer state, activations, interpreter; docs/explanation/costs.md has the formula",
            "measured: the median rank's peak after its first block; ranks of one fleet differ by tens of MiB by how "
            "their heaps fell, and DDP's grows by as much later",
            "fingerprints: processor time, of the reduced gradient and a part of the state, on the rank with most",
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
